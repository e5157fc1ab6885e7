"""A run's state, for scripts and for people."""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING, Any

from sm_train.toolkit.jobs.stage_state import StageState
from sm_train.toolkit.runs.resolve import RunState
from sm_train.toolkit.terminal.formatting import format_duration, format_number, format_usd

if TYPE_CHECKING:
    from rich.console import Console


def as_document(state: RunState) -> dict[str, Any]:
    """The document of ``status --json``."""
    now_or_next = state.current
    return {
        "run": state.run.name,
        "region": state.run.region,
        "state": now_or_next.state if now_or_next else "done",
        "stage": now_or_next.name if now_or_next else None,
        "spent_usd": state.spent_usd,
        "projected_usd": state.projected_usd,
        "next_command": next_command(state),
        "stages": [_stage(stage, state.now) for stage in state.stages],
    }


def _stage(stage: StageState, now: datetime) -> dict[str, Any]:
    job, words = stage.job, stage.words
    return {
        "name": stage.name,
        "state": stage.state,
        "max_steps": stage.max_steps,
        "step": stage.step,
        "checkpoint_step": stage.stored.step,
        "steps_per_second": words.steps_per_second,
        "loss": words.loss,
        "remaining_seconds": stage.remaining_seconds,
        "seconds_since_sign": None
        if words.sign is None
        else max(0.0, now.timestamp() - words.sign),
        "jobs": [
            {
                "name": one.name,
                "region": one.region,
                "status": one.status,
                "secondary_status": one.secondary,
                "failure_reason": one.failure or None,
                "billable_seconds": one.billable_seconds(now),
            }
            for one in stage.jobs
        ],
        "job": job.name if job else None,
        "incomplete_checkpoints": [
            {"folder": folder, "reason": reason} for folder, reason in stage.stored.passed_over
        ],
    }


def show_status(state: RunState, console: Console) -> None:
    """At most 100 columns: stages, then the newest job's words, dollars, and what to do next."""
    from rich.table import Table

    console.print(f"[bold]{state.run.name}[/] in {state.run.region}\n")
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("stage", "state", "step", "of", "checkpoint", "it/s", "left", "jobs"):
        table.add_column(name, justify="left" if name in ("stage", "state") else "right")
    for stage in state.stages:
        left = stage.remaining_seconds
        table.add_row(
            stage.name,
            stage.state,
            f"{stage.step:,}",
            f"{stage.max_steps:,}",
            "" if stage.stored.step is None else f"{stage.stored.step:,}",
            format_number(stage.words.steps_per_second) if stage.words.step else "",
            "" if left is None or stage.state == "done" else format_duration(left),
            str(len(stage.jobs)),
        )
    console.print(table)
    console.print()
    for line in _words(state):
        console.print(line, markup=False)


def _words(state: RunState) -> list[str]:
    lines = []
    stage = state.current
    if stage is not None and stage.job is not None:
        job = stage.job
        where = "" if job.region == state.run.region else f" in {job.region}"
        doing = f" ({job.secondary})" if job.secondary else ""
        lines.append(f"{job.name}{where}: {job.status}{doing}")
        if job.failure:
            lines.append(f"  {job.failure}")
        if job.live and stage.words.sign is not None:
            lines.append(
                f"  last sign of life {state.now.timestamp() - stage.words.sign:.0f} s ago"
            )
        lines += [
            f"  {folder} is passed over: {reason}" for folder, reason in stage.stored.passed_over
        ]
    lines.append(
        f"spent {format_usd(state.spent_usd)}, in the end about {format_usd(state.projected_usd)}"
    )
    if (command := next_command(state)) is not None:
        lines.append(f"next: {command}")
    return lines


def next_command(state: RunState) -> str | None:
    """What a person would do now; None when the run is done."""
    stage, name = state.current, state.run.name
    if stage is None:
        return None
    if stage.job is not None and stage.job.live:
        return f"sm-train {'watch' if stage.state != 'stopping' else 'status'} {name}"
    if stage.state == "failed" and stage.job is not None:
        job = stage.job
        option = "" if job.region == state.run.region else f" --region {job.region}"
        return f"sm-train{option} diagnose {job.name}"
    return f"sm-train resume {name}"
