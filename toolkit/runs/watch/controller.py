"""Polls a run and does what it needs: the same step for a laptop, a cron job and a function."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Literal, Protocol

from sm_train.toolkit.base.errors import TRANSIENT, ExitCode, UserError
from sm_train.toolkit.platforms.placed_run import PlacedRun
from sm_train.toolkit.records.training_job import STALL
from sm_train.toolkit.runs.remediation import (
    Action,
    Finish,
    NoAction,
    StartJob,
    StopJob,
)
from sm_train.toolkit.runs.run_state import RunState
from sm_train.toolkit.terminal.formatting import format_usd

MAX_POLL_SECONDS = 900.0
"""Longest interval between polls after errors."""

ActionKind = Literal["wait", "start", "stop", "end"]


@dataclass(frozen=True)
class WatchResult:
    """The result of one poll: the run's state, the action it needs, and what was done."""

    state: RunState
    action: Action
    done: str
    warning: str | None
    """Set if the run is projected to cost more than its budget."""


class WatchView(Protocol):
    """Shows the results of polls, and waits between them."""

    def show(self, result: WatchResult) -> None: ...

    def poll_failed(self, error: UserError, seconds: float) -> None:
        """Report a failed poll; the next one is in ``seconds``."""

    def wait(self, seconds: float) -> None: ...


def poll_run(run: PlacedRun, *, dry_run: bool) -> WatchResult:
    """Read a run, just found, once and, unless ``dry_run``, do what it needs on its platform.

    Raises:
        UserError: the platform returns an error.
    """
    result: WatchResult = import_module(run.watcher).poll(run, dry_run=dry_run)
    return result


def watch_warning(state: RunState) -> str | None:
    """Return what endangers the run or its budget; None if nothing does."""
    return "; ".join(filter(None, (*state.warnings, budget_warning(state)))) or None


def budget_warning(state: RunState) -> str | None:
    """Return a warning if the run is projected to cost more than the run file allows.

    An unknown price is not 0: then the warning is that the budget cannot be enforced.
    """
    budget, projected = state.run.config.budget, state.projection.total_usd
    if budget is None:
        return None
    if state.projection.spent_usd is None and state.projection.spent_at_most_usd is not None:
        return (
            f"budget.usd: {format_usd(budget.usd)}: only a range of a job's price is known, and "
            f"its upper end counts: {state.projection.spent}; `sm-train cost --refresh` fetches "
            "prices"
        )
    if state.projection.spent_usd is None:
        return (
            f"budget.usd: {format_usd(budget.usd)} cannot be enforced: the price of a job is "
            "unknown; `sm-train cost --refresh` fetches prices"
        )
    if projected is None or projected <= budget.usd:
        return None
    return (
        f"the run is projected to cost {format_usd(projected)}, more than budget.usd "
        f"{format_usd(budget.usd)}"
    )


def watch(
    poll: Callable[[], WatchResult], *, dry_run: bool, interval: float, view: WatchView
) -> ExitCode:
    """Poll every ``interval`` seconds until the run needs nothing more; returns the exit code.

    A transient error delays the next poll; it does not end the watch.

    Raises:
        UserError: AWS returns an error that is not transient, such as expired credentials.
    """
    pause, result = interval, None
    while True:
        try:
            result = poll()
        except UserError as error:
            if error.exit_code not in TRANSIENT:
                raise _with_advice(error, result) from None
            pause = min(2 * pause, MAX_POLL_SECONDS)
            view.poll_failed(error, pause)
        else:
            pause = min(interval, result.state.run.longest_pause)
            view.show(result)
            code = exit_code(result.action, dry_run=dry_run)
            if code is not None:
                return code
        view.wait(pause)


def exit_code(action: Action, *, dry_run: bool) -> ExitCode | None:
    """Return how the watch ends with ``action``; None if it continues.

    In a dry run a stall is left to the caller. Otherwise the stalled job is stopped and the watch
    continues: a later poll starts the next job.
    """
    if isinstance(action, Finish):
        return action.exit_code
    if isinstance(action, StopJob) and action.cause == STALL and dry_run:
        return ExitCode.STALLED
    if isinstance(action, StopJob) and action.cause != STALL:
        return ExitCode.OVER_BUDGET
    return None


def once_exit_code(action: Action, *, dry_run: bool) -> ExitCode:
    """Return the exit code of a single poll, for cron jobs and scripts."""
    if isinstance(action, StopJob) and action.cause == STALL:
        return ExitCode.STALLED
    if isinstance(action, NoAction):
        return action.exit_code
    return exit_code(action, dry_run=dry_run) or ExitCode.OK


def _with_advice(error: UserError, result: WatchResult | None) -> UserError:
    """Say what continues without the watch, and what does not; ``result`` is the last poll's."""
    if error.exit_code != ExitCode.PERMISSION:
        return error
    if result is None:
        message = "the run itself continues, and nothing watches it: fix this and watch again"
        return UserError(f"{error}; {message}", error.exit_code)
    run = result.state.run
    missing, retries = list(run.unwatched), run.platform.own_retries
    if run.config.budget is not None:
        missing.append("stop the run at its budget")
    *first, last = missing
    others = f"{', '.join(first)} or " if first else ""
    message = (
        f"the run itself continues, with its checkpoints, alerts and {retries}; "
        f"nothing will {others}{last}: fix this and watch again"
    )
    return UserError(f"{error}; {message}", error.exit_code)


def kind(action: Action) -> ActionKind:
    """Return the action's name in JSON."""
    if isinstance(action, StartJob):
        return "start"
    if isinstance(action, StopJob):
        return "stop"
    return "end" if isinstance(action, Finish) else "wait"
