"""Measures on SageMaker: finds or starts the job of a measurement, and waits for its end."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime

from sm_train.estimators.config.schema import RunConfig
from sm_train.estimators.config.stage import StageSection
from sm_train.toolkit.base.errors import ExitCode, UserError
from sm_train.toolkit.planning.measured_speeds import MeasuredSpeed
from sm_train.toolkit.planning.price_table import price_table
from sm_train.toolkit.planning.spent import job_usd
from sm_train.toolkit.probes.measuring.measurement_plan import PlannedMeasurement
from sm_train.toolkit.probes.measuring.measurement_result import read_result
from sm_train.toolkit.probes.short_jobs.short_job import ShortJobs
from sm_train.toolkit.records.job_logs import job_events
from sm_train.toolkit.records.run_job import RunJob
from sm_train.toolkit.records.stage_state import live_or_newest
from sm_train.toolkit.records.training_job import jobs_of_run
from sm_train.toolkit.terminal.console import note


@dataclass(frozen=True)
class JobMeasurer:
    """Measures ``stage`` of ``config`` in ``jobs`` on SageMaker."""

    config: RunConfig
    stage: StageSection
    jobs: ShortJobs

    def find(self, planned: PlannedMeasurement) -> RunJob | None:
        """Return the job that measures this or has measured it; None if it is to be started."""
        jobs = jobs_of_run(self.jobs.session, planned.config.name)
        job = live_or_newest([job for job in jobs if job.stage == planned.stage.name])
        if job is None or job.status == "Failed":
            return None
        return None if job.status == "Stopped" and not self._has_steps(job) else job

    def result(self, planned: PlannedMeasurement, job: RunJob) -> MeasuredSpeed:
        """Return what an ended job measured, also if its time limit stopped it.

        Raises:
            UserError: it logged no step.
        """
        cost = job_usd(job, price_table(), job.billable_seconds(datetime.now(UTC)))
        return read_result(
            self.config,
            self.stage,
            planned,
            self.jobs.events(job),
            source=f"job {job.name}",
            date=f"{job.created:%Y-%m-%d}",
            cost_usd=cost,
        )

    def measure(self, planned: PlannedMeasurement) -> MeasuredSpeed:
        """Return the result of the measurement's job; start it if there is none.

        Raises:
            UserError: the job failed, with its cause; something is missing; or AWS returns an
                error.
        """
        job = self.find(planned)
        if job is not None and not job.live:
            return self.result(planned, job)
        if job is None:
            job = self.jobs.start(planned.config, "measure")
        run = planned.config.name
        job = self.jobs.wait(
            job, f"The same command continues with it; `sm-train stop {run}` stops it"
        )
        if job.status == "Failed":
            raise UserError(self.jobs.failure(job), ExitCode.JOB_FAILED)
        if job.status == "Stopped":
            if not self._has_steps(job):
                raise UserError(
                    f"{job.name}: {job.secondary_status} before its first step was logged; give a "
                    "longer --max-runtime, or fewer --steps",
                    ExitCode.JOB_FAILED,
                )
            note(f"{job.name}: {job.secondary_status}; measured with the steps that it logged")
        return self.result(planned, job)

    def _has_steps(self, job: RunJob) -> bool:
        return any(event["kind"] == "step" for event in job_events(self.jobs.session, job.name))
