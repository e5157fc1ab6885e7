"""Shows a run's state on the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from sm_train.toolkit.platforms.placed_run import PlacedRun
from sm_train.toolkit.records.stage_state import StageState
from sm_train.toolkit.runs.next_command import next_command
from sm_train.toolkit.runs.remediation import other_platform_message
from sm_train.toolkit.runs.run_state import RunState, read_state
from sm_train.toolkit.terminal.console import escaped
from sm_train.toolkit.terminal.formatting import (
    format_duration,
    format_number,
    format_percent,
)
from sm_train.toolkit.terminal.rich_table import rich_table

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table


def show_status(run: PlacedRun, console: Console) -> None:
    """Print what is known about a run: stages, the newest job, cost and the next command, at most
    100 columns wide.
    """
    state = read_state(run)
    console.print(f"[bold]{escaped(run.name)}[/] {escaped(run.place)}\n")
    console.print(_stage_table(state.stages))
    console.print()
    for line in _summary(state):
        console.print(
            line, markup=False, soft_wrap=line.startswith("next: ") or ": model in " in line
        )


def _stage_table(stages: Sequence[StageState]) -> Table:
    """Return a row for each stage."""
    figures = ["step", "of", "checkpoint", "it/s", "remaining", "jobs"]
    table = rich_table(["stage", "state", *figures], right=figures)
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
            str(len(stage.jobs)),
        )
    return table


def _summary(state: RunState) -> list[str]:
    lines = []
    stage = state.current
    if stage is not None and stage.job is not None:
        job = stage.job
        region = "" if job.region == state.run.region else f" in {job.region}"
        is_known = job.secondary_status in ("", job.status)
        phase = "" if is_known else f" ({job.secondary_status})"
        lines.append(f"{job.name}{region}: {job.status}{phase}")
        if job.failure_reason:
            lines.append(f"  {job.failure_reason}")
        if job.live and stage.progress.last_activity is not None:
            age = state.now.timestamp() - stage.progress.last_activity
            lines.append(f"  last activity {age:.0f} s ago")
        if stage.state == "no-results":
            lines.append(f"  ended without results: nothing is stored below {job.checkpoint_uri}")
        if (share := stage.effective_share(state.now)) is not None:
            lines.append(f"  {format_percent(share)} of its time so far made steps that count")
        lines += [f"  WARNING: {warning}" for warning in state.warnings]
        lines += [f"  {folder} is skipped: {reason}" for folder, reason in stage.stored.skipped]
    if state.run.starts_jobs and stage is not None and stage.other_platform is not None:
        lines.append(other_platform_message(stage))
    lines += [line for each in state.stages for line in _model(each)]
    if state.run.platform.is_paid:
        lines.append(str(state.projection))
    if (command := next_command(state.run, stage)) is not None:
        lines.append(f"next: {command}")
    return lines


def _model(stage: StageState) -> list[str]:
    """Say where the final model of a stage is, if it is a folder on this machine."""
    is_here = stage.state == "done" and stage.stored.model is not None
    return [f"{stage.name}: model in {stage.stored.model}"] if is_here else []
