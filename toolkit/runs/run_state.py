"""Reads the state of a run and its stages from AWS."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import TYPE_CHECKING

from sm_train.estimators.config.naming import checkpoint_uri
from sm_train.estimators.config.stage import StageSection
from sm_train.toolkit.costing.measured_speeds import recorded_speeds
from sm_train.toolkit.costing.price_table import price_table
from sm_train.toolkit.costing.projection import Projection, project
from sm_train.toolkit.costing.spent import job_usd
from sm_train.toolkit.errors import UserError
from sm_train.toolkit.jobs.checkpoints import latest_stored, output_keys
from sm_train.toolkit.jobs.live_events import lag_of, progress_of, read_live
from sm_train.toolkit.jobs.live_state import LiveState
from sm_train.toolkit.jobs.stage_state import StageState, current, live_or_newest, stage_state
from sm_train.toolkit.jobs.training_job import TrainingJob, jobs_of_run, server_time
from sm_train.toolkit.targets.resolved_run import ResolvedRun
from sm_train.toolkit.terminal.formatting import format_duration, format_usd

if TYPE_CHECKING:
    import boto3
    from sm_train.toolkit.clusters.cluster_run import ClusterRun


@dataclass(frozen=True)
class RunState:
    """A run at one moment."""

    run: ResolvedRun | ClusterRun
    stages: tuple[StageState, ...]
    projection: Projection
    now: datetime
    """The time on AWS's clock; of a run on a cluster, on this machine's."""
    live: LiveState
    """The state of the newest job of the current stage."""
    notices: tuple[str, ...] = ()
    """What else endangers the run, one line each."""

    @property
    def current(self) -> StageState | None:
        return current(self.stages)

    @property
    def warnings(self) -> tuple[str, ...]:
        """What endangers the run or wastes money now, one line each."""
        lag = self.current and self.current.lag
        not_stored = lag.describe() if lag and lag.is_too_long else None
        overdue = [overdue_stop(job, self.now) for stage in self.stages for job in stage.jobs]
        return tuple(filter(None, (not_stored, *overdue, *self.notices)))


MAX_STOPPING = timedelta(hours=1)
"""How long a job may be stopping. SageMaker kills it after two minutes, and uploads its output."""


def overdue_stop(job: TrainingJob, now: datetime) -> str | None:
    """Return what a job has cost that has been stopping for too long; None if none has."""
    since = job.stopping_since
    if since is None or now - since <= MAX_STOPPING:
        return None
    seconds = (now - since).total_seconds()
    usd = job_usd(job, price_table(), 0.0 if job.started is None else seconds)
    return (
        f"{job.name} has been stopping for {format_duration(seconds)}, which has cost "
        f"{format_usd(usd)}: SageMaker bills it until it has ended; ask AWS Support to end it"
    )


def read_state(session: boto3.Session, run: ResolvedRun) -> RunState:
    """Read the state of the run and its jobs from AWS, with the logs of each stage's newest job
    only.

    ``session`` is in the run's home region.
    """
    now, jobs = server_time(session), run.jobs
    live = {stage.name: _live_state(session, stage, jobs) for stage in run.config.stages}
    stages = _stages(session, run, jobs, live, now)
    unfinished = current(stages)
    recorded = recorded_speeds(session, run.config, run.region)
    return RunState(
        run,
        stages,
        project(run.config, run.region, stages, now, recorded),
        now,
        live[unfinished.name] if unfinished else LiveState(),
    )


def _live_state(
    session: boto3.Session, stage: StageSection, jobs: Sequence[TrainingJob]
) -> LiveState:
    job = live_or_newest([job for job in jobs if job.stage == stage.name])
    return read_live(session, job) if job is not None else LiveState()


def stages_of(
    session: boto3.Session, run: ResolvedRun
) -> tuple[tuple[StageState, ...], tuple[str, ...]]:
    """Return each stage's state as it is now, and warnings.

    To start a job, logs need not be readable: then the state rests on jobs and checkpoints alone.
    """
    jobs, now = jobs_of_run(session, run.name), server_time(session)
    try:
        live = {stage.name: _live_state(session, stage, jobs) for stage in run.config.stages}
    except UserError as error:
        warning = f"the speed of the run's jobs is unknown, their logs cannot be read: {error}"
        return _stages(session, run, jobs, {}, now), (warning,)
    return _stages(session, run, jobs, live, now), ()


def _stages(
    session: boto3.Session,
    run: ResolvedRun,
    jobs: Sequence[TrainingJob],
    live: Mapping[str, LiveState],
    now: datetime,
) -> tuple[StageState, ...]:
    return tuple(
        _stage(session, run, stage, jobs, live.get(stage.name, LiveState()), now)
        for stage in run.config.stages
    )


def _stage(
    session: boto3.Session,
    run: ResolvedRun,
    stage: StageSection,
    jobs: Sequence[TrainingJob],
    live: LiveState,
    now: datetime,
) -> StageState:
    stage_jobs = [job for job in jobs if job.stage == stage.name]
    stored = latest_stored(session, checkpoint_uri(run.config, stage, run.bucket), stage_jobs)
    own_script, newest = run.config.entry is not None, live_or_newest(stage_jobs)
    if own_script and not stored.final and newest and newest.status == "Completed":
        stored = replace(stored, output=bool(output_keys(session, newest)))
    state = stage_state(
        stage.name,
        stage.max_steps,
        stage_jobs,
        stored,
        progress_of(live),
        now=now,
        stall_after=run.config.heartbeat.max_timeout,
        own_script=own_script,
    )
    lag = lag_of(live, stored.step, run.config.checkpoint.every_steps, now.timestamp())
    return replace(state, lag=lag)
