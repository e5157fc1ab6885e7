"""Measures on SageMaker: finds or starts the job of a measurement, and waits for its end."""

from __future__ import annotations

import time
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from sm_train.estimators.config.schema import RunConfig
from sm_train.estimators.config.stage import StageSection
from sm_train.toolkit.costing.measured_speeds import MeasuredSpeed
from sm_train.toolkit.costing.price_table import price_table
from sm_train.toolkit.costing.spent import job_usd
from sm_train.toolkit.errors import ExitCode, UserError
from sm_train.toolkit.jobs.event_lines import Event
from sm_train.toolkit.jobs.job_events import job_events
from sm_train.toolkit.jobs.stage_state import live_or_newest
from sm_train.toolkit.jobs.training_job import TrainingJob, jobs_of_run, refresh
from sm_train.toolkit.measuring.measurement_plan import PlannedMeasurement
from sm_train.toolkit.measuring.measurement_result import read_result
from sm_train.toolkit.submit.planned_job import plan_job, start_planned
from sm_train.toolkit.submit.run_bundle import bundle_of, commit_of
from sm_train.toolkit.submit.submission import prepare
from sm_train.toolkit.submit.submit import session_for_jobs
from sm_train.toolkit.terminal.console import bytes_bar, note
from sm_train.toolkit.terminal.formatting import format_days, format_usd

if TYPE_CHECKING:
    import boto3

_POLL_SECONDS = 10.0

_LOG_ATTEMPTS = 6
"""Times that a completed job's log is read until its end is there: CloudWatch is late."""


@dataclass(frozen=True)
class JobMeasurer:
    """Measures ``stage`` of ``config``, whose run file is in ``base``, on SageMaker."""

    config: RunConfig
    stage: StageSection
    base: Path
    session: boto3.Session
    region: str
    profile: str | None

    @classmethod
    def open(
        cls, config: RunConfig, stage: StageSection, base: Path, region: str, profile: str | None
    ) -> JobMeasurer:
        """Open a session.

        Raises:
            UserError: the role, credentials or a bucket is missing.
        """
        session, _ = session_for_jobs(config, profile, region)
        return cls(config, stage, base, session, region, profile)

    def find(self, planned: PlannedMeasurement) -> TrainingJob | None:
        """Return the job that measures this or has measured it; None if it is to be started."""
        jobs = jobs_of_run(self.session, planned.config.name)
        job = live_or_newest([job for job in jobs if job.stage == planned.stage.name])
        if job is None or job.status == "Failed":
            return None
        return None if job.status == "Stopped" and not self._has_steps(job) else job

    def result(self, planned: PlannedMeasurement, job: TrainingJob) -> MeasuredSpeed:
        """Return what an ended job measured, also if its time limit stopped it.

        Raises:
            UserError: it logged no step.
        """
        cost = job_usd(job, price_table(), job.billable_seconds(datetime.now(UTC)))
        return read_result(
            self.config,
            self.stage,
            planned,
            self._events(job),
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
        name = self._start(planned) if job is None else job.name
        note(f"Following {name}; Ctrl-C leaves it running")
        try:
            job = self._wait(planned, name)
        except KeyboardInterrupt:
            run = planned.config.name
            note(
                f"{name} keeps running and is billed, for at most "
                f"{format_days(planned.config.cluster.max_runtime)}. The same command continues "
                f"with it; `sm-train stop {run}` stops it"
            )
            raise
        if job.status == "Failed":
            raise UserError(self._failure(job), ExitCode.JOB_FAILED)
        if job.status == "Stopped":
            if not self._has_steps(job):
                raise UserError(
                    f"{name}: {job.secondary_status} before its first step was logged; give a "
                    "longer --max-runtime, or fewer --steps",
                    ExitCode.JOB_FAILED,
                )
            note(f"{name}: {job.secondary_status}; measured with the steps that it logged")
        return self.result(planned, job)

    def _has_steps(self, job: TrainingJob) -> bool:
        return any(event["kind"] == "step" for event in job_events(self.session, job.name))

    def _events(self, job: TrainingJob) -> list[Event]:
        """Return the job's events; those of a completed job up to its end, which may come late."""
        for attempt in range(_LOG_ATTEMPTS):
            if attempt:
                time.sleep(_POLL_SECONDS)
            events = list(job_events(self.session, job.name))
            if job.status != "Completed" or any(event["kind"] == "end" for event in events):
                break
        return events

    def _start(self, planned: PlannedMeasurement) -> str:
        """Start the job through the code of `submit`; return its name."""
        submission = prepare(
            planned.config,
            planned.stage.name,
            bundle_of(planned.config, self.base),
            self.region,
            datetime.now(),
            commit_of(self.base),
        )
        # A session compares every request that it sends with the one of its first trainer.
        session, bucket = session_for_jobs(planned.config, self.profile, self.region)
        job = plan_job(submission, session, bucket, cause="measure", auto_advance=False)
        with bytes_bar(f"copying to {self.region}") as progress:
            return start_planned(job, progress)

    def _wait(self, planned: PlannedMeasurement, name: str) -> TrainingJob:
        """Wait for the end of the job, and report each change of its status."""
        shown = None
        job = self._named(planned, name)
        while True:
            status = job.secondary_status or job.status
            if status != shown:
                seconds = job.billable_seconds(datetime.now(UTC))
                spent = format_usd(job_usd(job, price_table(), seconds))
                note(f"{name}: {status}, {format_days(seconds)} billed, {spent}")
                shown = status
            if not job.live:
                return job
            time.sleep(_POLL_SECONDS)
            job = refresh(self.session, job)

    def _named(self, planned: PlannedMeasurement, name: str) -> TrainingJob:
        jobs = jobs_of_run(self.session, planned.config.name)
        return next(job for job in jobs if job.name == name)

    def _failure(self, job: TrainingJob) -> str:
        """Return why the job failed, and what to do."""
        from sm_train.toolkit.diagnose.job_logs import diagnose_job

        try:
            found = diagnose_job(self.session, job.name)
            cause = f"{found.title} ({found.cause})"
            action = f"; {found.action}" if found.action else ""
        except UserError:
            cause, action = job.failure_reason or "no reason given", ""
        return f"{job.name}: failed: {cause}{action}; `sm-train diagnose {job.name}` shows more"
