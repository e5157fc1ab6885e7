"""A run seen from any laptop: which one is meant, where it is, what it has cost and will."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from sm_train.estimators.request import checkpoint_uri, staging_bucket
from sm_train.estimators.run_config import RunConfig, Stage
from sm_train.toolkit.aws import open_session, resolve_region
from sm_train.toolkit.errors import UserError
from sm_train.toolkit.job_records import Record, read_record
from sm_train.toolkit.live_events import last_words, read_live
from sm_train.toolkit.live_state import Live
from sm_train.toolkit.price_book import price_table
from sm_train.toolkit.recovery import Policy
from sm_train.toolkit.run_dollars import projected_usd, spent_usd
from sm_train.toolkit.run_files import load
from sm_train.toolkit.run_state import StageState, current, stage_state
from sm_train.toolkit.stored_checkpoints import stored_checkpoints
from sm_train.toolkit.training_jobs import TrainingJob, find_job, jobs_of_run, server_time


@dataclass(frozen=True)
class Run:
    """A run that a command was told of, by its file, its name or one of its jobs."""

    name: str
    region: str
    bucket: str
    config: RunConfig
    record: Record | None
    """What was submitted last; None where nothing was."""


@dataclass(frozen=True)
class RunState:
    """A run at one moment. Dollars are None where a price is unknown."""

    run: Run
    stages: tuple[StageState, ...]
    spent_usd: float | None
    projected_usd: float | None
    now: datetime
    """By AWS's clock."""
    live: Live
    """What the newest job of the stage that is not done has said."""

    @property
    def current(self) -> StageState | None:
        return current(self.stages)


def find_run(session: Any, target: str, region: str) -> Run:
    """The run that ``target`` means: a run file, a run's name, or a job's.

    Raises:
        UserError: there is no such run in the region, or its file is wrong.
    """
    if is_run_file(target):
        config = load(Path(target))
        newest = next(reversed(jobs_of_run(session, config.name)), None)
        record = None
        if newest is not None:
            record = read_record(session, newest.bucket, config.name, newest.name)
        return Run(config.name, region, staging_bucket(config, region), config, record)
    job = find_job(session, target)
    name = job.run if job else target
    newest = next(reversed(jobs_of_run(session, name)), job)
    if newest is None:
        raise UserError(
            f"{target}: neither a run file here nor a run or job of sm-train in {region}; "
            "`sm-train list` shows what there is"
        )
    record = read_record(session, newest.bucket, name, newest.name)
    if record is None:
        raise UserError(f"{name}: {newest.name} left no record in S3; give the run file instead")
    return Run(name, region, newest.bucket, record.config, record)


def is_run_file(target: str) -> bool:
    return target.endswith((".yaml", ".yml")) or Path(target).is_file()


def read_state(session: Any, run: Run) -> RunState:
    """Ask AWS where the run is; logs are read of its newest jobs only."""
    now = server_time(session)
    jobs = jobs_of_run(session, run.name)
    said = {stage.name: _said(session, stage, jobs) for stage in run.config.stages}
    stages = tuple(
        _stage(session, run, stage, jobs, said[stage.name], now) for stage in run.config.stages
    )
    at = current(stages)
    prices = price_table()
    return RunState(
        run,
        stages,
        spent_usd(jobs, run.region, prices, now),
        projected_usd(run.config, run.region, stages, prices, now),
        now,
        said[at.name] if at else Live(),
    )


def _said(session: Any, stage: Stage, jobs: Sequence[TrainingJob]) -> Live:
    own = [job for job in jobs if job.stage == stage.name]
    return read_live(session, own[-1].name) if own else Live()


def _stage(
    session: Any,
    run: Run,
    stage: Stage,
    jobs: Sequence[TrainingJob],
    said: Live,
    now: datetime,
) -> StageState:
    own = [job for job in jobs if job.stage == stage.name]
    stored = stored_checkpoints(session, checkpoint_uri(run.config, stage, run.bucket))
    return stage_state(
        stage.name,
        stage.iterations,
        own,
        stored,
        last_words(said),
        now=now,
        stall_after=run.config.heartbeat.max,
    )


def policy(run: Run) -> Policy:
    """The run file's limits for what happens by itself."""
    budget, recovery = run.config.budget, run.config.recovery
    return Policy(
        attempts=recovery.attempts,
        delay=timedelta(seconds=recovery.delay),
        budget_usd=budget.usd if budget else None,
        budget_stops=budget is None or budget.on_exceed == "stop",
    )


def open_run(target: str, options: dict[str, Any]) -> tuple[Any, Run]:
    """A session and the run that ``target`` means, for a command with the global ``options``."""
    session, region = open_session_for(target, options)
    return session, find_run(session, target, region)


def open_session_for(target: str, options: dict[str, Any]) -> tuple[Any, str]:
    """A session in the region of ``target``'s run file, if it is one, or of the options."""
    own = load(Path(target)).region if is_run_file(target) else None
    region = resolve_region(options["region"], own, options["profile"])
    return open_session(options["profile"], region), region
