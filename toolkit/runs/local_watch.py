"""Follows a local run: `watch` of a folder."""

from __future__ import annotations

import json
import sys
import time
from typing import TYPE_CHECKING

from sm_train.toolkit.errors import ExitCode
from sm_train.toolkit.jobs.local_folder import LocalRunFolder, read_stages
from sm_train.toolkit.jobs.stage_state import StageState, current
from sm_train.toolkit.runs.run_status import local_status
from sm_train.toolkit.runs.status_view import show_local
from sm_train.toolkit.terminal.formatting import format_duration, format_number

if TYPE_CHECKING:
    from rich.console import Console


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
            sys.stdout.write(json.dumps(local_status(run).document) + "\n")
            sys.stdout.flush()
        elif once or not training:
            show_local(run, console)
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
