"""When a watcher polls again: errors delay it, and never for long."""

from __future__ import annotations

import pytest
from sm_train.toolkit.base.errors import ExitCode, UserError
from sm_train.toolkit.runs.watch.controller import WatchResult, watch


class StoppedError(Exception):
    """Ends the polling, which otherwise continues until the run ends."""


class Pauses:
    """A view that keeps the seconds until the next poll, and ends the watch after ``most``."""

    def __init__(self, most: int) -> None:
        self.seconds: list[float] = []
        self._most = most

    def show(self, result: WatchResult) -> None: ...

    def poll_failed(self, error: UserError, seconds: float) -> None: ...

    def wait(self, seconds: float) -> None:
        self.seconds.append(seconds)
        if len(self.seconds) == self._most:
            raise StoppedError


def failing(code: ExitCode) -> WatchResult:
    raise UserError("DescribeTrainingJob: AWS returned ServiceUnavailable", code)


def test_errors_double_the_pause_up_to_a_quarter_of_an_hour() -> None:
    """A stall or a spent budget is found within that time once AWS answers again."""
    view = Pauses(7)
    with pytest.raises(StoppedError):
        watch(lambda: failing(ExitCode.UNEXPECTED), dry_run=False, interval=60.0, view=view)
    assert view.seconds == [120.0, 240.0, 480.0, 900.0, 900.0, 900.0, 900.0]


def test_an_error_that_does_not_pass_ends_the_watch() -> None:
    view = Pauses(2)
    with pytest.raises(UserError):
        watch(lambda: failing(ExitCode.PERMISSION), dry_run=False, interval=60.0, view=view)
    assert view.seconds == []
