"""Each look of a watch: a view or a line for a person, an object for a script."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping
from datetime import datetime
from typing import TYPE_CHECKING, Any

from sm_train.toolkit.errors import UserError
from sm_train.toolkit.jobs.live_state import node_states, notices, stragglers
from sm_train.toolkit.runs.status_view import as_document
from sm_train.toolkit.terminal.console import stderr_console
from sm_train.toolkit.terminal.formatting import format_duration, format_number, format_usd
from sm_train.toolkit.watch.controller import WatchResult, kind
from sm_train.toolkit.watch.gpu_metrics import gpu_utilization, hosts_of

if TYPE_CHECKING:
    from rich.console import Console

RECENT_NOTICES = 20
"""Warnings and errors in a document."""


def watch_document(seen: WatchResult, gpus: Mapping[str, float] | None = None) -> dict[str, Any]:
    """The status with what was done about it; an object of ``watch --json``.

    ``gpus`` is each host's GPU utilization by CloudWatch, where that was asked.
    """
    state = seen.state
    now, live, stage = state.now.timestamp(), state.live, state.current
    budget = state.run.config.budget
    step = live.newest["step"].event if "step" in live.newest else {}
    saved = live.newest.get("checkpoint")
    nodes = node_states(live, hosts_of(state), now, gpus or {})
    return {
        **as_document(state),
        "action": kind(seen.action),
        "message": seen.done,
        "warning": seen.warning,
        "budget_usd": budget.usd if budget else None,
        "remaining_seconds": stage.remaining_seconds if stage else None,
        "images_per_second": step.get("images_per_second"),
        "data_wait_share": step.get("data_wait_share"),
        "mfu": step.get("mfu"),
        "seconds_since_checkpoint": None if saved is None else max(0.0, now - saved.time),
        "nodes": [
            {
                "node": node.host,
                "heartbeat_age_seconds": node.heartbeat_age,
                "step": node.step,
                "gpu_utilization": node.gpu_utilization,
                "gpu_utilization_min": node.gpu_utilization_min,
                "gpu_memory_bytes": node.gpu_memory_bytes,
                "gpu_temperature": node.gpu_temperature,
                "data_wait_share": node.data_wait_share,
                "straggler_ratio": node.straggler_ratio,
                "receive_bytes_per_second": node.receive,
                "send_bytes_per_second": node.send,
            }
            for node in nodes
        ],
        "stragglers": [
            {
                "rank": one.rank,
                "node": one.host,
                "step_seconds": one.step_seconds,
                "ratio": one.ratio,
            }
            for one in stragglers(live)
        ],
        "recent_warnings": [
            {
                "time": one.time,
                "level": one.level,
                "node": one.host,
                "code": one.code,
                "message": one.message,
                "count": one.count,
            }
            for one in notices(live)[-RECENT_NOTICES:]
        ],
    }


def show_json(session: Any, seen: WatchResult) -> None:
    """The look's object in a line of its own."""
    document = watch_document(seen, gpu_utilization(session, seen.state))
    sys.stdout.write(json.dumps(document, allow_nan=False) + "\n")
    sys.stdout.flush()


class JsonWatchView:
    """An object a line for each look."""

    def __init__(self, session: Any) -> None:
        self._session = session

    def show(self, seen: WatchResult) -> None:
        show_json(self._session, seen)

    def refused(self, error: UserError, seconds: float) -> None:
        _tell_refusal(stderr_console(), error, seconds)

    def wait(self, seconds: float) -> None:
        time.sleep(seconds)


class LineWatchView:
    """A line for each look, as for a log."""

    def __init__(self) -> None:
        self._console = stderr_console()

    def show(self, seen: WatchResult) -> None:
        self._console.print(_line(seen), markup=False)
        if seen.warning is not None:
            self._console.print(f"  warning: {seen.warning}", markup=False)
        if (said := worth_saying(seen)) is not None:
            self._console.print(f"  {said}", markup=False)

    def refused(self, error: UserError, seconds: float) -> None:
        _tell_refusal(self._console, error, seconds)

    def wait(self, seconds: float) -> None:
        time.sleep(seconds)


def worth_saying(seen: WatchResult) -> str | None:
    """What a look has led to; None where the run just goes on."""
    return seen.done if kind(seen.action) != "wait" or "next job" in seen.done else None


def _line(seen: WatchResult) -> str:
    stage = seen.state.current
    parts = [f"{datetime.now():%H:%M:%S}"]
    if stage is not None:
        parts += [stage.name, stage.state, f"step {stage.step:,}/{stage.max_steps:,}"]
        if stage.words.steps_per_second:
            parts.append(f"{format_number(stage.words.steps_per_second)} it/s")
        if stage.words.loss is not None:
            parts.append(f"loss {stage.words.loss:.4f}")
        if stage.remaining_seconds and stage.state == "training":
            parts.append(f"{format_duration(stage.remaining_seconds)} left")
    parts.append(f"{format_usd(seen.state.spent_usd)} of {format_usd(seen.state.projected_usd)}")
    return "  ".join(parts)


def _tell_refusal(console: Console, error: UserError, seconds: float) -> None:
    console.print(f"{error}; looking again in {seconds:.0f} s", markup=False)
