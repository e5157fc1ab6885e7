"""Prints the result of each poll: a line for the terminal, or a JSON object for a script."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING

from sm_train.toolkit.base.errors import ExitCode, UserError
from sm_train.toolkit.records.live_state import (
    NamedStraggler,
    NodeState,
    Notice,
    node_states,
    notices,
    saved_checkpoints,
    stragglers,
)
from sm_train.toolkit.runs.remediation import NoAction
from sm_train.toolkit.runs.run_status import Status, status_of
from sm_train.toolkit.runs.watch.controller import ActionKind, WatchResult, kind
from sm_train.toolkit.runs.watch.gpu_metrics import gpu_utilization, live_nodes
from sm_train.toolkit.terminal.console import stderr_console
from sm_train.toolkit.terminal.formatting import format_duration, format_number, format_usd

if TYPE_CHECKING:
    from rich.console import Console

RECENT_NOTICES = 20
"""Warnings and errors in a document."""


@dataclass(frozen=True, repr=False, kw_only=True)
class WatchStatus(Status):
    """One object of ``watch --json`` (docs/watch.md): the status, and what the poll did."""

    action: ActionKind
    message: str
    warning: str | None
    budget_usd: float | None
    remaining_seconds: float | None
    images_per_second: float | None
    data_wait_share: float | None
    mfu: float | None
    seconds_since_checkpoint: float | None
    nodes: tuple[NodeState, ...]
    stragglers: tuple[NamedStraggler, ...] | None
    recent_warnings: tuple[Notice, ...]


def watch_status(result: WatchResult, gpus: Mapping[str, float] | None = None) -> WatchStatus:
    """Return the run's status with the action taken.

    ``gpus`` is each node's GPU utilization by CloudWatch, if it was read.
    """
    state = result.state
    now, live, stage = state.now.timestamp(), state.live, state.current
    budget, slow = state.run.config.budget, stragglers(live)
    step = live.newest["step"].event if "step" in live.newest else {}
    saved = saved_checkpoints(live)
    return WatchStatus(
        **vars(status_of(state)),
        action=kind(result.action),
        message=result.done,
        warning=result.warning,
        budget_usd=budget.usd if budget else None,
        remaining_seconds=stage.remaining_seconds if stage else None,
        images_per_second=step.get("images_per_second"),
        data_wait_share=stage.progress.data_wait_share if stage else None,
        mfu=step.get("mfu"),
        seconds_since_checkpoint=max(0.0, now - saved[-1][0]) if saved else None,
        nodes=tuple(node_states(live, live_nodes(state), now, gpus or {})),
        stragglers=None if slow is None else tuple(slow),
        recent_warnings=tuple(notices(live)[-RECENT_NOTICES:]),
    )


def print_json(result: WatchResult) -> None:
    """Print the result as one line of JSON."""
    document = watch_status(result, gpu_utilization(result.state)).document
    sys.stdout.write(json.dumps(document, allow_nan=False) + "\n")
    sys.stdout.flush()


class JsonWatchView:
    """Prints one JSON object for each poll."""

    def show(self, result: WatchResult) -> None:
        print_json(result)

    def poll_failed(self, error: UserError, seconds: float) -> None:
        _print_error(stderr_console(shows_results=True), error, seconds)

    def wait(self, seconds: float) -> None:
        time.sleep(seconds)


class LineWatchView:
    """Prints one line for each poll, as for a log file."""

    def __init__(self) -> None:
        self._console = stderr_console()

    def show(self, result: WatchResult) -> None:
        self._console.print(_line(result), markup=False)
        if result.warning is not None:
            self._console.print(f"  warning: {result.warning}", markup=False)
        if (message := message_worth_showing(result)) is not None:
            self._console.print(f"  {message}", markup=False)

    def poll_failed(self, error: UserError, seconds: float) -> None:
        _print_error(self._console, error, seconds)

    def wait(self, seconds: float) -> None:
        time.sleep(seconds)


def message_worth_showing(result: WatchResult) -> str | None:
    """Return what was done; None if the run simply continues."""
    action = result.action
    is_calm = isinstance(action, NoAction) and action.exit_code is ExitCode.OK
    return None if is_calm and "next job" not in result.done else result.done


def _line(result: WatchResult) -> str:
    stage = result.state.current
    parts = [f"{datetime.now():%H:%M:%S}"]
    if stage is not None:
        parts += [stage.name, stage.state, f"step {stage.step:,}/{stage.max_steps:,}"]
        if stage.progress.steps_per_second:
            parts.append(f"{format_number(stage.progress.steps_per_second)} it/s")
        if stage.progress.loss is not None:
            parts.append(f"loss {stage.progress.loss:.4f}")
        if stage.remaining_seconds and stage.state == "training":
            parts.append(f"{format_duration(stage.remaining_seconds)} remaining")
    projection = result.state.projection
    if result.state.run.platform.is_paid:
        parts.append(f"{projection.spent} of {format_usd(projection.total_usd)}")
    return "  ".join(parts)


def _print_error(console: Console, error: UserError, seconds: float) -> None:
    console.print(f"{error}; retrying in {seconds:.0f} s", markup=False)
