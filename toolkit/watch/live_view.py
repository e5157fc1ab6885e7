"""``watch`` on a terminal: the view, kept up to date by the job's log between two looks."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import datetime
from types import TracebackType
from typing import TYPE_CHECKING, Any

from sm_train.toolkit.aws.cloudwatch_logs import newest_line
from sm_train.toolkit.aws.session import for_region
from sm_train.toolkit.errors import UserError
from sm_train.toolkit.jobs.live_events import EVENT_PATTERN, live_of
from sm_train.toolkit.jobs.live_state import LiveState, merge
from sm_train.toolkit.jobs.log_tail import LogFollower
from sm_train.toolkit.terminal.console import stderr_console
from sm_train.toolkit.watch.controller import WatchResult, WatchView, kind
from sm_train.toolkit.watch.gpu_metrics import gpu_utilization
from sm_train.toolkit.watch.output import JsonWatchView, LineWatchView, worth_saying
from sm_train.toolkit.watch.screen import ScreenState, screen

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

_HISTORY_SECONDS = 3600.0
"""How much of a job's past its curves begin with."""

_SILENT_SECONDS = 15.0
"""Between two questions whether a job that has said nothing yet has begun to speak."""

_REDRAWN_A_SECOND = 2


@contextmanager
def showing(session: Any, *, as_json: bool) -> Iterator[WatchView]:
    """What shows the looks: a view on a terminal that can move its cursor, lines elsewhere."""
    console = stderr_console()
    if as_json:
        yield JsonWatchView(session)
    elif console.is_terminal and not console.is_dumb_terminal:
        with LiveWatchView(session, console) as shower:
            yield shower
    else:
        yield LineWatchView()


def view_of(session: Any, seen: WatchResult) -> None:
    """Print the view of a single look."""
    console = stderr_console()
    model = ScreenState(seen, seen.state.live, gpu_utilization(session, seen.state))
    console.print(screen(model, seen.state.now.timestamp(), console.width))
    if (said := worth_saying(seen)) is not None:
        console.print(said, markup=False)


class LiveWatchView:
    """The view in its place below what the terminal already shows, as a context manager.

    What a look leads to, such as another job, stays above it; how the run ended comes below.
    """

    def __init__(self, session: Any, console: Console) -> None:
        from rich.live import Live as Screen

        self._session, self._console = session, console
        self._there = session
        """In the job's region."""
        self._model: ScreenState | None = None
        self._clock_ahead = 0.0
        """Seconds by which AWS's clock is ahead of this machine's."""
        self._job: str | None = None
        self._follower: LogFollower | None = None
        self._next = 0.0
        self._trouble = ""
        self._last: str | None = None
        # It draws at once.
        self._screen = Screen(
            get_renderable=self._draw, console=console, refresh_per_second=_REDRAWN_A_SECOND
        )

    def __enter__(self) -> LiveWatchView:
        self._screen.__enter__()
        return self

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._next = 0.0
        self._screen.__exit__(error_type, error, traceback)
        if self._last is not None:
            self._console.print(self._last, markup=False)

    # ------------------------------------------------------------------ what a watch tells

    def show(self, seen: WatchResult) -> None:
        """Take over what a look has found."""
        state = seen.state
        self._clock_ahead = state.now.timestamp() - time.time()
        job = state.current.job if state.current else None
        name = job.name if job is not None and job.live else None
        known = self._model.live if self._model is not None and name == self._job else LiveState()
        if name != self._job:
            self._job, self._follower = name, None
        if job is not None:
            self._there = for_region(self._session, job.region)
        self._trouble = ""
        gpus = gpu_utilization(self._session, state)
        self._model = ScreenState(seen, merge(known, state.live), gpus)
        said = worth_saying(seen)
        if kind(seen.action) == "end":
            self._last = said
        elif said is not None:
            self._console.print(f"{datetime.now():%H:%M:%S}  {said}", markup=False)
        self._screen.refresh()

    def refused(self, error: UserError, seconds: float) -> None:
        """Say so below what was known before."""
        self._trouble = f"{error}; "

    def wait(self, seconds: float) -> None:
        """Follow the log until the next look is due."""
        self._next = time.monotonic() + seconds
        while (left := self._next - time.monotonic()) > 0:
            time.sleep(min(left, self._follow()))

    # ------------------------------------------------------------------ the log

    def _follow(self) -> float:
        """Hear what the job has said since; returns the seconds to wait before the next time."""
        if self._job is None or self._model is None:
            return math.inf
        try:
            if self._follower is None:
                self._follower = self._from_history()
            news = live_of(self._follower.ask()) if self._follower is not None else LiveState()
        except UserError as error:
            # Whether that ends the watch is for the next look to find out.
            self._trouble = f"{error}; "
            return math.inf
        self._model = replace(self._model, live=merge(self._model.live, news))
        if self._follower is None:
            return _SILENT_SECONDS
        refused = self._follower.refused
        self._trouble = "" if refused is None else f"{refused}; "
        return self._follower.pause

    def _from_history(self) -> LogFollower | None:
        assert self._job is not None
        newest = newest_line(self._there, self._job)
        if newest is None:
            return None
        since = newest - _HISTORY_SECONDS
        return LogFollower(self._there, f"{self._job}/", since, pattern=EVENT_PATTERN)

    # ------------------------------------------------------------------ the view

    def _draw(self) -> RenderableType:
        model = self._model
        if model is None:
            return self._trouble or "looking …"
        left = self._next - time.monotonic()
        if self._next:
            due = f"next look in {left:.0f} s" if left > 0 else "looking …"
            footer = f"{self._trouble}{due}; Ctrl-C ends the watch, not the run"
            model = replace(model, footer=footer)
        now = time.time() + self._clock_ahead
        return screen(model, now, self._console.width, self._console.height)
