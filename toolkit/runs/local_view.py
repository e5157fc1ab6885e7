"""Shows and follows a local run: `status`, `logs` and `watch` of a folder."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from sm_train.entrypoints.common.events import PREFIX
from sm_train.toolkit.errors import ExitCode, UserError
from sm_train.toolkit.jobs.events import LOG_NAME
from sm_train.toolkit.jobs.local_folder import (
    LocalRunFolder,
    final_model,
    read_stages,
)
from sm_train.toolkit.jobs.stage_state import StageState, current
from sm_train.toolkit.runs.next_command import next_command
from sm_train.toolkit.runs.status_view import RunStatus, stage_status, stage_table
from sm_train.toolkit.terminal.console import escaped
from sm_train.toolkit.terminal.formatting import format_duration, format_number
from sm_train.toolkit.terminal.printable import printable

if TYPE_CHECKING:
    from rich.console import Console

_POLL_SECONDS = 0.5


def local_document(run: LocalRunFolder) -> RunStatus:
    """Return the document of ``status --json``; a local run has no region and costs nothing."""
    stages = read_stages(run)
    stage = current(stages)
    return {
        "run": run.config().name,
        "region": None,
        "state": stage.state if stage else "done",
        "stage": stage.name if stage else None,
        "spent_usd": 0.0,
        "remaining_usd": 0.0,
        "projected_usd": 0.0,
        "next_command": next_command(run, stage),
        "stages": [stage_status(one, time.time(), 0.0) for one in stages],
    }


def show_local_status(run: LocalRunFolder, console: Console) -> None:
    """Print the stages, where the model is, and the next command."""
    stages = read_stages(run)
    console.print(f"[bold]{run.config().name}[/] on this machine, in {escaped(str(run.target))}\n")
    console.print(stage_table(stages, with_jobs=False))
    console.print()
    for one in stages:
        model = final_model(run.path / one.name) if one.state == "done" else None
        if model is not None:
            console.print(f"{one.name}: model in {model}", markup=False, soft_wrap=True)
        for folder, reason in one.stored.skipped:
            console.print(f"{folder} is skipped: {reason}", markup=False)
    command = next_command(run, current(stages))
    if command is not None:
        console.print(f"next: {command}", markup=False, soft_wrap=True)


def log_lines(run: LocalRunFolder, *, follow: bool) -> Iterator[str]:
    """Yield the lines of the log of the newest stage, or of the one that the user named; with
    ``follow`` until the run has ended, also those of later stages.
    """
    finished: set[Path] = set()
    while True:
        training = follow and run.is_training()
        for stage in run.stages[-1:] if not finished else run.stages:
            if stage not in finished:
                finished.add(stage)
                yield from _stage_lines(run, stage, follow=training)
        if not training:
            return
        time.sleep(_POLL_SECONDS)


def _stage_lines(run: LocalRunFolder, stage: Path, *, follow: bool) -> Iterator[str]:
    """Yield whole lines; with ``follow`` until the run ends or starts its next stage."""
    with (stage / LOG_NAME).open(encoding="utf-8", errors="replace") as log:
        partial = ""
        while True:
            # Read before the last look at the file, so that no line at the end is missed.
            ended = not follow or not run.is_training() or run.stages[-1] != stage
            while line := log.readline():
                partial += line
                if partial.endswith("\n"):
                    yield partial
                    partial = ""
            if ended:
                if partial:
                    yield partial
                return
            time.sleep(_POLL_SECONDS)


def print_log(run: LocalRunFolder, *, follow: bool, raw: bool, as_json: bool) -> None:
    """Print the log. Event lines repeat a readable line, so they are skipped unless ``raw``."""
    for line in log_lines(run, follow=follow):
        text = printable(line.rstrip("\n"))
        if not raw and PREFIX + "{" in text:
            continue
        if as_json:
            text = json.dumps({"time": None, "node": None, "message": text})
        sys.stdout.write(text + "\n")
        sys.stdout.flush()


def watch_local(
    run: LocalRunFolder, console: Console, *, once: bool, interval: float, as_json: bool
) -> int:
    """Print the progress of the run until it has ended; return the exit code.

    Nothing is restarted: the run's own process checkpoints and ends.
    """
    while True:
        training = run.is_training()
        stages = read_stages(run)
        if as_json:
            sys.stdout.write(json.dumps(local_document(run)) + "\n")
            sys.stdout.flush()
        elif once or not training:
            show_local_status(run, console)
        else:
            console.print(_line(current(stages)), markup=False)
        if once or not training:
            stage = current(stages)
            failed = stage is not None and stage.state == "failed"
            return ExitCode.JOB_FAILED if failed else ExitCode.OK
        time.sleep(interval)


def _line(stage: StageState | None) -> str:
    if stage is None:
        return "done"
    parts = [stage.name, stage.state, f"step {stage.step:,}/{stage.max_steps:,}"]
    if stage.progress.steps_per_second:
        parts.append(f"{format_number(stage.progress.steps_per_second)} it/s")
    if stage.progress.loss is not None:
        parts.append(f"loss {stage.progress.loss:.4f}")
    if stage.remaining_seconds:
        parts.append(f"{format_duration(stage.remaining_seconds)} remaining")
    return "  ".join(parts)


def stop_local(run: LocalRunFolder, *, wait: bool) -> str:
    """Make the run's process save a checkpoint and end; return SageMaker's status for its state.

    Raises:
        PreflightError: its process cannot be interrupted from here.
    """
    run.interrupt()
    if wait:
        run.wait()
    return local_job_status(run)


def local_job_status(run: LocalRunFolder) -> str:
    """Return "Stopping" while the run trains, then "Completed", "Failed" or "Stopped"."""
    if run.is_training():
        return "Stopping"
    stage = current(read_stages(run))
    if stage is None:
        return "Completed"
    return "Failed" if stage.state == "failed" else "Stopped"


def reject_options(run: LocalRunFolder, **options: object) -> None:
    """Refuse options that apply to jobs on SageMaker only.

    Raises:
        UserError: one of them is given.
    """
    for name, value in options.items():
        if value:
            raise UserError(
                f"--{name.replace('_', '-')}: applies to jobs on SageMaker; {run.target} is a "
                "local run, with one log of all nodes"
            )
