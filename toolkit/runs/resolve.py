"""Finds the run that a command names, and reads its state from AWS."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sm_train.estimators.config.naming import checkpoint_uri, staging_bucket
from sm_train.estimators.config.schema import RunConfig
from sm_train.estimators.config.stage import StageSection
from sm_train.toolkit.aws.session import open_session, resolve_region, session_in_region
from sm_train.toolkit.costing.measured_speeds import recorded_speeds
from sm_train.toolkit.costing.projection import Projection, project
from sm_train.toolkit.errors import UserError
from sm_train.toolkit.jobs.checkpoints import latest_stored, output_keys
from sm_train.toolkit.jobs.launch_record import LaunchRecord, read_record
from sm_train.toolkit.jobs.live_events import lag_of, progress_of, read_live
from sm_train.toolkit.jobs.live_state import LiveState
from sm_train.toolkit.jobs.local_folder import DEFAULT_FOLDER, find_local_run
from sm_train.toolkit.jobs.stage_state import StageState, current, live_or_newest, stage_state
from sm_train.toolkit.jobs.training_job import TrainingJob, jobs_of_run, server_time
from sm_train.toolkit.run_file import RUN_FILE_ENDINGS, load

if TYPE_CHECKING:
    import boto3


@dataclass(frozen=True)
class ResolvedRun:
    """A run, found by its file, its name or one of its jobs.

    ``region`` and ``bucket`` are its home; jobs may also be in other regions.
    """

    name: str
    region: str
    bucket: str
    config: RunConfig
    record: LaunchRecord | None
    """The newest launch record; None if nothing was submitted."""
    jobs: tuple[TrainingJob, ...] = ()
    """Its jobs when it was resolved."""

    @property
    def submitted_config(self) -> RunConfig:
        """The config that code is staged for, whatever the run file has become since."""
        return self.record.config if self.record is not None else self.config


@dataclass(frozen=True)
class RunState:
    """A run at one moment."""

    run: ResolvedRun
    stages: tuple[StageState, ...]
    projection: Projection
    now: datetime
    """By AWS's clock."""
    live: LiveState
    """The state of the newest job of the current stage."""

    @property
    def current(self) -> StageState | None:
        return current(self.stages)


def resolve_run(session: boto3.Session, target: str, region: str) -> ResolvedRun:
    """Return the run of ``target``: a run file, a run's name, or a job's.

    By name it is found from any of its regions: the jobs' tags name its home region.

    Raises:
        UserError: there is no such run in the region, or its file is invalid.
    """
    if is_run_file(target):
        return run_of_config(session, load(Path(target)), region)
    name = target.partition("--")[0]
    jobs = jobs_of_run(session, name)
    if not jobs or (name != target and target not in [job.name for job in jobs]):
        raise UserError(
            f"{target}: neither a run file here nor a run or job of sm-train in {region}; "
            "`sm-train list` shows all runs"
        )
    home, bucket = _home(jobs)
    record = None
    if bucket is not None:
        record = read_record(session_in_region(session, home), bucket, name, jobs[-1].name)
    if bucket is None or record is None:
        raise UserError(f"{name}: {jobs[-1].name} left no record in S3; give the run file instead")
    return ResolvedRun(name, home, bucket, record.config, record, tuple(jobs))


def run_of_config(session: boto3.Session, config: RunConfig, region: str) -> ResolvedRun:
    """Return the run that a run file describes, with its jobs in ``region``."""
    bucket, record = staging_bucket(config, region), None
    jobs = jobs_of_run(session, config.name)
    if jobs:
        record = read_record(session, _home(jobs)[1] or bucket, config.name, jobs[-1].name)
    return ResolvedRun(config.name, region, bucket, config, record, tuple(jobs))


def _home(jobs: Sequence[TrainingJob]) -> tuple[str, str | None]:
    """Return the run's home region, and its bucket there, which holds the launch records."""
    home = jobs[-1].regions[0]
    return home, next((job.bucket for job in reversed(jobs) if job.region == home), None)


def is_run_file(target: str) -> bool:
    return target.endswith(RUN_FILE_ENDINGS) or Path(target).is_file()


def refresh_run(session: boto3.Session, run: ResolvedRun) -> ResolvedRun:
    """Return the run with its jobs as they are now."""
    return replace(run, jobs=tuple(jobs_of_run(session, run.name)))


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


def open_run(target: str, options: dict[str, Any]) -> tuple[boto3.Session, ResolvedRun]:
    """Return the run of ``target`` and a session in its home region, for a command with the global
    ``options``.
    """
    if is_run_file(target):
        config = load(Path(target))
        session, region = _open(config.region, options)
        return session, run_of_config(session, config, region)
    _require_name(target)
    with _local_run_hint(target):
        session, region = _open(None, options)
        run = resolve_run(session, target, region)
    return session_in_region(session, run.region), run


def open_session_for(target: str, options: dict[str, Any]) -> tuple[boto3.Session, str]:
    """Open a session in the region of ``target``, if it is a run file, or of the options."""
    if not is_run_file(target):
        _require_name(target)
    with _local_run_hint(target):
        return _open(load(Path(target)).region if is_run_file(target) else None, options)


def _require_name(target: str) -> None:
    """Refuse a path, which names neither a run nor a job.

    Raises:
        UserError: ``target`` is one.
    """
    if "/" in target:
        problem = "holds no local run" if Path(target).is_dir() else "no such file or folder"
        raise UserError(
            f"{target}: {problem}; name a run file, a run, a job or the folder of a local run"
        )


def _open(run_file_region: str | None, options: dict[str, Any]) -> tuple[boto3.Session, str]:
    region = resolve_region(options["region"], run_file_region, options["profile"])
    return open_session(options["profile"], region), region


@contextmanager
def _local_run_hint(target: str) -> Iterator[None]:
    """Add the path of the local run of the same name, if there is one, to an error."""
    try:
        yield
    except UserError as error:
        path = DEFAULT_FOLDER / target
        if find_local_run(path) is None:
            raise
        raise UserError(f"{error}; the run on this machine is {path}", error.exit_code) from None
