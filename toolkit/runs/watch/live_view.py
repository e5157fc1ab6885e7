"""``watch`` on a terminal: a live view, updated from the job's log between polls."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import datetime
from types import TracebackType
from typing import TYPE_CHECKING

from sm_train.toolkit.base.errors import UserError
from sm_train.toolkit.platforms.placed_run import EventFollower
from sm_train.toolkit.records.live_state import LiveState, merge
from sm_train.toolkit.records.run_job import RunJob
from sm_train.toolkit.runs.watch.controller import WatchResult, WatchView, kind
from sm_train.toolkit.runs.watch.gpu_metrics import gpu_utilization
from sm_train.toolkit.runs.watch.output import JsonWatchView, LineWatchView, message_worth_showing
from sm_train.toolkit.runs.watch.screen import ScreenState, screen
from sm_train.toolkit.terminal.console import stderr_console

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

_NO_LOG_SECONDS = 15.0
"""Interval at which a job without any log line is polled for its first one."""

_REFRESH_PER_SECOND = 2


@contextmanager
def open_view(*, as_json: bool) -> Iterator[WatchView]:
    """Open a live view on a terminal with cursor control; otherwise print lines."""
    console = stderr_console()
    if as_json:
        yield JsonWatchView()
    elif console.is_terminal and not console.is_dumb_terminal:
        with LiveWatchView(console) as view:
            yield view
    else:
        yield LineWatchView()


def print_view(result: WatchResult) -> None:
    """Print the view of a single poll."""
    console = stderr_console()
    state = result.state
    model = ScreenState(result, state.live, gpu_utilization(state))
    console.print(screen(model, state.now.timestamp(), console.width))
    if (message := message_worth_showing(result)) is not None:
        console.print(message, markup=False)


class LiveWatchView:
    """A live view below the terminal's previous output, as a context manager.

    Messages about actions, such as a started job, are printed above it; how the run ended is
    printed below it at the end.
    """

    def __init__(self, console: Console) -> None:
        from rich.live import Live

        self._console = console
        self._model: ScreenState | None = None
        self._clock_ahead = 0.0
        """Seconds by which AWS's clock is ahead of this machine's."""
        self._job: RunJob | None = None
        self._follower: EventFollower | None = None
        self._next_poll = 0.0
        self._error = ""
        self._final_message: str | None = None
        # Live renders at once, so everything that _render reads is set above.
        self._live = Live(
            get_renderable=self._render, console=console, refresh_per_second=_REFRESH_PER_SECOND
        )

    def __enter__(self) -> LiveWatchView:
        self._live.__enter__()
        return self

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._next_poll = 0.0
        self._live.__exit__(error_type, error, traceback)
        if self._final_message is not None:
            self._console.print(self._final_message, markup=False)

    # ------------------------------------------------------------------ WatchView

    def show(self, result: WatchResult) -> None:
        """Update the view with the result of a poll."""
        state = result.state
        self._clock_ahead = state.now.timestamp() - time.time()
        job = state.current.job if state.current else None
        job = job if job is not None and job.live else None
        same_job = _name(job) == _name(self._job)
        live = self._model.live if self._model is not None and same_job else LiveState()
        if not same_job:
            self._follower = None
        self._job, self._error = job, ""
        gpus = gpu_utilization(state)
        self._model = ScreenState(result, merge(live, state.live), gpus)
        message = message_worth_showing(result)
        if kind(result.action) == "end":
            self._final_message = message
        elif message is not None:
            self._console.print(f"{datetime.now():%H:%M:%S}  {message}", markup=False)
        self._live.refresh()

    def poll_failed(self, error: UserError, seconds: float) -> None:
        """Show the error below the last known state."""
        self._error = f"{error}; "

    def wait(self, seconds: float) -> None:
        """Follow the log until the next poll is due."""
        self._next_poll = time.monotonic() + seconds
        while (remaining := self._next_poll - time.monotonic()) > 0:
            time.sleep(min(remaining, self._follow()))

    # ------------------------------------------------------------------ the log

    def _follow(self) -> float:
        """Merge the job's new events; returns the seconds until the log should be read again."""
        if self._job is None or self._model is None:
            return math.inf
        try:
            if self._follower is None:
                self._follower = self._model.result.state.run.follow_events(self._job)
            events = self._follower.poll() if self._follower is not None else LiveState()
        except UserError as error:
            # The next poll of the run decides whether the error ends the watch.
            self._error = f"{error}; "
            return math.inf
        self._model = replace(self._model, live=merge(self._model.live, events))
        if self._follower is None:
            return _NO_LOG_SECONDS
        last_error = self._follower.error
        self._error = "" if last_error is None else f"{last_error}; "
        return self._follower.pause

    # ------------------------------------------------------------------ rendering

    def _render(self) -> RenderableType:
        model = self._model
        if model is None:
            return self._error or "polling …"
        remaining = self._next_poll - time.monotonic()
        if self._next_poll:
            due = f"next poll in {remaining:.0f} s" if remaining > 0 else "polling …"
            footer = f"{self._error}{due}; Ctrl-C ends the watch, not the run"
            model = replace(model, footer=footer)
        now = time.time() + self._clock_ahead
        return screen(model, now, self._console.width, self._console.height)


def _name(job: RunJob | None) -> str | None:
    return None if job is None else job.name
