"""A run seen from any laptop: which one is meant, where it is, what it has cost and will."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from sm_train.estimators.config.naming import checkpoint_uri, staging_bucket
from sm_train.estimators.config.placement import Placement, placements
from sm_train.estimators.config.schema import RunConfig
from sm_train.estimators.config.stage import StageSection
from sm_train.toolkit.aws.session import for_region, open_session, resolve_region
from sm_train.toolkit.costing.price_table import price_table
from sm_train.toolkit.costing.spent import known_spent_usd, projected_usd, spent_usd
from sm_train.toolkit.errors import UserError
from sm_train.toolkit.jobs.checkpoints import latest_stored
from sm_train.toolkit.jobs.launch_record import LaunchRecord, read_record
from sm_train.toolkit.jobs.live_events import last_words, read_live
from sm_train.toolkit.jobs.live_state import LiveState
from sm_train.toolkit.jobs.stage_state import StageState, current, live_or_newest, stage_state
from sm_train.toolkit.jobs.training_job import TrainingJob, jobs_of_run, server_time
from sm_train.toolkit.run_file import RUN_FILE_ENDINGS, load
from sm_train.toolkit.runs.remediation import Policy


@dataclass(frozen=True)
class Run:
    """A run that a command was told of, by its file, its name or one of its jobs.

    ``region`` and ``bucket`` are those of its own place; jobs may be at its fallbacks, too.
    """

    name: str
    region: str
    bucket: str
    config: RunConfig
    record: LaunchRecord | None
    """What was submitted last; None where nothing was."""

    @property
    def places(self) -> tuple[Placement, ...]:
        """Where its code is: those of what was submitted, whatever the file says by now."""
        config = self.record.config if self.record is not None else self.config
        return placements(config, self.region)


@dataclass(frozen=True)
class RunState:
    """A run at one moment. Dollars are None where a price is unknown; ``known_usd`` are those of
    the jobs whose price is known.
    """

    run: Run
    stages: tuple[StageState, ...]
    spent_usd: float | None
    known_usd: float
    projected_usd: float | None
    now: datetime
    """By AWS's clock."""
    live: LiveState
    """What the newest job of the stage that is not done has said."""

    @property
    def current(self) -> StageState | None:
        return current(self.stages)


def resolve_run(session: Any, target: str, region: str) -> Run:
    """The run that ``target`` means: a run file, a run's name, or a job's.

    By name it is found from any of its regions: what jobs are tagged with says which is its own.

    Raises:
        UserError: there is no such run in the region, or its file is wrong.
    """
    if is_run_file(target):
        return _run_of(session, load(Path(target)), region)
    name = target.partition("--")[0]
    jobs = jobs_of_run(session, name)
    if not jobs or (name != target and target not in [job.name for job in jobs]):
        raise UserError(
            f"{target}: neither a run file here nor a run or job of sm-train in {region}; "
            "`sm-train list` shows what there is"
        )
    home, own = _home(jobs)
    record = read_record(for_region(session, home), own, name, jobs[-1].name) if own else None
    if own is None or record is None:
        raise UserError(f"{name}: {jobs[-1].name} left no record in S3; give the run file instead")
    return Run(name, home, own, record.config, record)


def _run_of(session: Any, config: RunConfig, region: str) -> Run:
    """The run of a file."""
    bucket, record = staging_bucket(config, region), None
    if jobs := jobs_of_run(session, config.name):
        record = read_record(session, _home(jobs)[1] or bucket, config.name, jobs[-1].name)
    return Run(config.name, region, bucket, config, record)


def _home(jobs: Sequence[TrainingJob]) -> tuple[str, str | None]:
    """The run's own region, and its bucket there: records are kept in it."""
    home = jobs[-1].regions[0]
    return home, next((job.bucket for job in reversed(jobs) if job.region == home), None)


def is_run_file(target: str) -> bool:
    return target.endswith(RUN_FILE_ENDINGS) or Path(target).is_file()


def read_state(session: Any, run: Run) -> RunState:
    """Ask AWS where the run is; logs are read of its newest jobs only."""
    session = for_region(session, run.region)
    now = server_time(session)
    jobs = jobs_of_run(session, run.name)
    said = {stage.name: _said(session, stage, jobs) for stage in run.config.stages}
    stages = tuple(
        _stage(session, run, stage, jobs, said[stage.name], now) for stage in run.config.stages
    )
    newest = current(stages)
    prices = price_table()
    return RunState(
        run,
        stages,
        spent_usd(jobs, prices, now),
        known_spent_usd((job for stage in stages for job in stage.jobs), prices, now),
        projected_usd(placements(run.config, run.region), stages, prices, now),
        now,
        said[newest.name] if newest else LiveState(),
    )


def _said(session: Any, stage: StageSection, jobs: Sequence[TrainingJob]) -> LiveState:
    job = live_or_newest([job for job in jobs if job.stage == stage.name])
    return read_live(for_region(session, job.region), job.name) if job is not None else LiveState()


def stages_without_logs(session: Any, run: Run) -> tuple[StageState, ...]:
    """Where each stage is by its jobs and checkpoints alone: no log is read."""
    jobs, now = jobs_of_run(session, run.name), server_time(session)
    return tuple(_stage(session, run, stage, jobs, LiveState(), now) for stage in run.config.stages)


def _stage(
    session: Any,
    run: Run,
    stage: StageSection,
    jobs: Sequence[TrainingJob],
    said: LiveState,
    now: datetime,
) -> StageState:
    own = [job for job in jobs if job.stage == stage.name]
    stored = latest_stored(session, checkpoint_uri(run.config, stage, run.bucket), own)
    return stage_state(
        stage.name,
        stage.max_steps,
        own,
        stored,
        last_words(said),
        now=now,
        stall_after=run.config.heartbeat.max_timeout,
    )


def policy(run: Run) -> Policy:
    """The run file's limits for what happens by itself."""
    budget, recovery = run.config.budget, run.config.recovery
    return Policy(
        attempts=recovery.max_attempts,
        delay=timedelta(seconds=recovery.backoff),
        places=len(run.places),
        budget_usd=budget.usd if budget else None,
        budget_stops=budget is None or budget.on_exceed == "stop",
    )


def open_run(target: str, options: dict[str, Any]) -> tuple[Any, Run]:
    """The run that ``target`` means, for a command with the global ``options``, and a session in
    its own region.
    """
    if is_run_file(target):
        config = load(Path(target))
        session, region = _open(config.region, options)
        return session, _run_of(session, config, region)
    session, region = _open(None, options)
    run = resolve_run(session, target, region)
    return for_region(session, run.region), run


def open_session_for(target: str, options: dict[str, Any]) -> tuple[Any, str]:
    """A session in the region of ``target``'s run file, if it is one, or of the options."""
    return _open(load(Path(target)).region if is_run_file(target) else None, options)


def _open(own: str | None, options: dict[str, Any]) -> tuple[Any, str]:
    region = resolve_region(options["region"], own, options["profile"])
    return open_session(options["profile"], region), region
