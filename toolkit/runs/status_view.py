"""Shows a run's state: as a document for scripts and as a table for the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, TypedDict

from sm_train.toolkit.costing.projection import ProjectionDocument
from sm_train.toolkit.jobs.stage_state import StageState, State
from sm_train.toolkit.runs.next_command import next_command
from sm_train.toolkit.runs.remediation import other_platform_message
from sm_train.toolkit.runs.run_state import RunState
from sm_train.toolkit.terminal.console import escaped
from sm_train.toolkit.terminal.formatting import format_duration, format_number

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table


class JobStatus(TypedDict):
    name: str
    region: str
    status: str
    secondary_status: str
    failure_reason: str | None
    billable_seconds: float


class IncompleteCheckpoint(TypedDict):
    folder: str
    reason: str


class StorageLagDocument(TypedDict):
    """How far storage is behind the checkpoints that the job logged."""

    saved: int
    stored: int | None
    seconds: float


class StageStatus(TypedDict):
    name: str
    state: State
    max_steps: int
    step: int
    checkpoint_step: int | None
    storage_lag: StorageLagDocument | None
    steps_per_second: float | None
    loss: float | None
    remaining_seconds: float | None
    remaining_usd: float | None
    seconds_since_activity: float | None
    jobs: list[JobStatus]
    job: str | None
    incomplete_checkpoints: list[IncompleteCheckpoint]


class RunStatus(ProjectionDocument):
    """The document of ``status --json``; null is unknown."""

    run: str
    region: str | None
    state: State
    stage: str | None
    next_command: str | None
    stages: list[StageStatus]


def as_document(state: RunState) -> RunStatus:
    """Return the document of ``status --json``."""
    stage = state.current
    return {
        "run": state.run.name,
        "region": state.run.region,
        "state": stage.state if stage else "done",
        "stage": stage.name if stage else None,
        **state.projection.as_dict(),
        "next_command": next_command(state.run, stage),
        "stages": [
            stage_status(one, state.now.timestamp(), state.projection.stages[one.name])
            for one in state.stages
        ],
    }


def stage_status(stage: StageState, now: float, remaining_usd: float | None) -> StageStatus:
    """Return one stage of the document; ``now`` is in Unix seconds by the clock of its events, and
    ``remaining_usd`` what the rest of the stage costs.
    """
    job, progress = stage.job, stage.progress
    return {
        "name": stage.name,
        "state": stage.state,
        "max_steps": stage.max_steps,
        "step": stage.step,
        "checkpoint_step": stage.stored.step,
        "storage_lag": None
        if stage.lag is None
        else {
            "saved": stage.lag.saved,
            "stored": stage.lag.stored,
            "seconds": stage.lag.seconds,
        },
        "steps_per_second": progress.steps_per_second,
        "loss": progress.loss,
        "remaining_seconds": stage.remaining_seconds,
        "remaining_usd": remaining_usd,
        "seconds_since_activity": None
        if progress.last_activity is None
        else max(0.0, now - progress.last_activity),
        "jobs": [
            {
                "name": one.name,
                "region": one.region,
                "status": one.status,
                "secondary_status": one.secondary_status,
                "failure_reason": one.failure_reason or None,
                "billable_seconds": one.billable_seconds(datetime.fromtimestamp(now, UTC)),
            }
            for one in stage.jobs
        ],
        "job": job.name if job else None,
        "incomplete_checkpoints": [
            {"folder": folder, "reason": reason} for folder, reason in stage.stored.skipped
        ],
    }


def show_status(state: RunState, console: Console) -> None:
    """Print stages, the newest job, cost and the next command, at most 100 columns wide."""
    console.print(f"[bold]{escaped(state.run.name)}[/] in {state.run.region}\n")
    console.print(stage_table(state.stages, with_jobs=True))
    console.print()
    for line in _summary(state):
        console.print(line, markup=False)


def stage_table(stages: Sequence[StageState], *, with_jobs: bool) -> Table:
    """Return a row for each stage."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    names = ["stage", "state", "step", "of", "checkpoint", "it/s", "remaining"]
    for name in names + ["jobs"] * with_jobs:
        table.add_column(name, justify="left" if name in ("stage", "state") else "right")
    for stage in stages:
        remaining = stage.remaining_seconds
        table.add_row(
            stage.name,
            stage.state,
            f"{stage.step:,}",
            f"{stage.max_steps:,}",
            "" if stage.stored.step is None else f"{stage.stored.step:,}",
            format_number(stage.progress.steps_per_second) if stage.progress.step else "",
            "" if remaining is None or stage.state == "done" else format_duration(remaining),
            *([str(len(stage.jobs))] if with_jobs else []),
        )
    return table


def _summary(state: RunState) -> list[str]:
    lines = []
    stage = state.current
    if stage is not None and stage.job is not None:
        job = stage.job
        region = "" if job.region == state.run.region else f" in {job.region}"
        phase = f" ({job.secondary_status})" if job.secondary_status else ""
        lines.append(f"{job.name}{region}: {job.status}{phase}")
        if job.failure_reason:
            lines.append(f"  {job.failure_reason}")
        if job.live and stage.progress.last_activity is not None:
            age = state.now.timestamp() - stage.progress.last_activity
            lines.append(f"  last activity {age:.0f} s ago")
        if stage.state == "no-results":
            lines.append(f"  ended without results: nothing is stored below {job.checkpoint_uri}")
        if stage.lag is not None and stage.lag.is_too_long:
            lines.append(f"  WARNING: {stage.lag.describe()}")
        lines += [f"  {folder} is skipped: {reason}" for folder, reason in stage.stored.skipped]
    if stage is not None and stage.other_platform is not None:
        lines.append(other_platform_message(stage))
    lines.append(str(state.projection))
    if (command := next_command(state.run, stage)) is not None:
        lines.append(f"next: {command}")
    return lines
