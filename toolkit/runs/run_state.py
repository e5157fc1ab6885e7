"""Reads the state of a run and its stages, on any platform."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta

from sm_train.estimators.config.stage import StageSection
from sm_train.toolkit.base.errors import UserError
from sm_train.toolkit.planning.price_table import price_table
from sm_train.toolkit.planning.spent import Projection, job_usd, project
from sm_train.toolkit.platforms.placed_run import PlacedRun
from sm_train.toolkit.records.live_state import (
    LiveState,
    failed_saves,
    lag_of,
    progress_of,
    shown_speed,
)
from sm_train.toolkit.records.run_job import RunJob
from sm_train.toolkit.records.stage_state import StageState, current, live_or_newest, stage_state
from sm_train.toolkit.terminal.formatting import format_duration, format_usd


@dataclass(frozen=True)
class RunState:
    """A run at one moment."""

    run: PlacedRun
    stages: tuple[StageState, ...]
    projection: Projection
    now: datetime
    """The time by the platform's clock."""
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
        overdue = [
            overdue_phase(job, stage.progress.last_activity, self.now)
            for stage in self.stages
            for job in stage.jobs
            if job.live
        ]
        not_written = self.current.not_written if self.current else None
        return tuple(filter(None, (not_written, not_stored, *overdue, *self.notices)))


def overdue_phase(job: RunJob, last_activity: float | None, now: datetime) -> str | None:
    """Return what a live job has cost in a phase that takes longer than usual; None in all others.

    ``last_activity`` is that of the stage's live job, in Unix seconds.
    """
    phase, seconds = job.phase, job.seconds_in_phase(now)
    since = job.phase_since.timestamp()
    if phase.usual is None or seconds <= phase.usual.total_seconds():
        return None
    if phase.silence == "trains" and last_activity is not None and last_activity >= since:
        return None
    usd = format_usd(job_usd(job, price_table(), 0.0 if job.started is None else seconds))
    text = f"for {format_duration(seconds)}, which has cost {usd}"
    platform = job.platform.title
    if phase.name == "Stopping":
        return (
            f"{job.name} has been stopping {text}: {platform} bills it until it has ended; ask "
            f"{job.platform.support} to end it"
        )
    if phase.silence == "stores":
        return (
            f"{job.name} has been storing its results {text}: sm-train does not stop it, as they "
            f"would be lost; `{job.stop_command}` does"
        )
    then = "" if phase.limit is None else f"; `watch` stops it after {_hours(phase.limit)}"
    return f"{job.name} has been in phase {phase.name} {text}, without an event{then}"


def _hours(duration: timedelta) -> str:
    return format_duration(duration.total_seconds())


def read_state(run: PlacedRun) -> RunState:
    """Read the state of the run, just found, with the logs of each stage's newest job only.

    Raises:
        UserError: what its platform knows cannot be read.
    """
    now = run.now()
    jobs = run.jobs(now)
    live = _live_states(run, jobs)
    stages = _stages(run, jobs, live, now)
    unfinished = current(stages)
    return RunState(
        run,
        stages,
        projected(run, stages, now),
        now,
        live[unfinished.name] if unfinished else LiveState(),
        tuple(run.notices(stages, now)),
    )


def projected(run: PlacedRun, stages: Sequence[StageState], now: datetime) -> Projection:
    """Project the cost of a run whose stages are in these states."""
    if not run.platform.is_paid:
        return Projection(0.0, 0.0, 0.0, 0.0, {stage.name: 0.0 for stage in stages})
    return project(run.config, run.region, stages, now, run.recorded_speeds())


def stages_of(run: PlacedRun) -> tuple[tuple[StageState, ...], tuple[str, ...]]:
    """Return each stage's state as it is now, and warnings.

    To start a job, logs need not be readable: then the state rests on jobs and checkpoints alone.

    Raises:
        UserError: jobs or checkpoints cannot be read.
    """
    run, now = run.refreshed(), run.now()
    jobs = run.jobs(now)
    try:
        live = _live_states(run, jobs)
    except UserError as error:
        warning = f"the speed of the run's jobs is unknown, their logs cannot be read: {error}"
        return _stages(run, jobs, {}, now), (warning,)
    return _stages(run, jobs, live, now), ()


def _live_states(run: PlacedRun, jobs: Sequence[RunJob]) -> dict[str, LiveState]:
    newest = {
        stage.name: live_or_newest([job for job in jobs if job.stage == stage.name])
        for stage in run.config.stages
    }
    return {stage: LiveState() if job is None else run.live(job) for stage, job in newest.items()}


def _stages(
    run: PlacedRun, jobs: Sequence[RunJob], live: Mapping[str, LiveState], now: datetime
) -> tuple[StageState, ...]:
    return tuple(_stage(run, stage, jobs, live.get(stage.name), now) for stage in run.config.stages)


def _stage(
    run: PlacedRun,
    stage: StageSection,
    jobs: Sequence[RunJob],
    live: LiveState | None,
    now: datetime,
) -> StageState:
    """Return the state of a stage; ``live`` is None if its logs cannot be read."""
    stage_jobs = [job for job in jobs if job.stage == stage.name]
    stored = run.stored(stage, stage_jobs)
    state = stage_state(
        stage.name,
        stage.max_steps,
        stage_jobs,
        stored,
        progress_of(live or LiveState()),
        now=now,
        stall_after=run.config.heartbeat.max_timeout,
        own_script=run.config.entry is not None,
    )
    shown = state.shown
    if live is not None and state.state != "done":
        with contextlib.suppress(UserError):  # the remaining cost is then the plan's
            shown = shown_speed(stage_jobs, state.progress, run.live)
    lag = lag_of(
        live or LiveState(), stored.step, run.config.checkpoint.every_steps, now.timestamp()
    )
    return replace(
        state,
        shown=shown,
        lag=lag,
        platform=run.platform.name,
        not_written=failed_saves(live or LiveState()),
    )
