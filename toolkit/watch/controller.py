"""Follows a run and does what it needs: the same step for a laptop, a cron job and a function."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol

from sm_train.toolkit.alarms.alarms import sync_alarms
from sm_train.toolkit.aws.session import for_region
from sm_train.toolkit.errors import TRANSIENT, ExitCode, UserError
from sm_train.toolkit.jobs.launch_record import ClaimedError
from sm_train.toolkit.jobs.training_job import stop_job
from sm_train.toolkit.runs.remediation import (
    STALL,
    Action,
    Finish,
    NoAction,
    StartJob,
    StopJob,
    next_action,
)
from sm_train.toolkit.runs.resolve import Run, RunState, policy, read_state
from sm_train.toolkit.submit.replicate import replicate_inputs
from sm_train.toolkit.submit.start_job import QuotaError, recorded_request, start_next_job
from sm_train.toolkit.terminal.console import bytes_bar
from sm_train.toolkit.terminal.formatting import format_usd
from sm_train.toolkit.watch.failure_cause import cause_of_failure

_LONGEST_PAUSE = 900.0


@dataclass(frozen=True)
class WatchResult:
    """One look at a run: where it is, what it needed, and what was done about it."""

    state: RunState
    action: Action
    done: str
    warning: str | None
    """The run will cost more than its budget, at its live speed."""


class WatchView(Protocol):
    """Shows one look after the other, and spends the time between them."""

    def show(self, seen: WatchResult) -> None: ...

    def refused(self, error: UserError, seconds: float) -> None:
        """A look was refused; the next one comes in so many seconds."""

    def wait(self, seconds: float) -> None: ...


def reconcile(session: Any, run: Run, *, act: bool) -> WatchResult:
    """Look once and, if ``act``, do what the run needs.

    Raises:
        UserError: AWS refuses.
    """
    session = for_region(session, run.region)
    state = read_state(session, run)
    action = next_action(
        state.stages,
        policy(run),
        lambda job: cause_of_failure(for_region(session, job.region), job),
        spent_usd=state.known_usd,
        now=state.now,
    )
    if not act:
        done = action.words
    elif not isinstance(action, StartJob):
        done = _do(session, state, action)
    elif (started := _start(session, state, action)) is not None:
        done = started
    else:
        return reconcile(session, run, act=act)
    return WatchResult(state, action, done, over_budget(state))


def over_budget(state: RunState) -> str | None:
    """What to say of a run that will cost more than the run file allows."""
    budget, projected = state.run.config.budget, state.projected_usd
    if budget is None or projected is None or projected <= budget.usd:
        return None
    return (
        f"the run will cost {format_usd(projected)} at this speed, more than budget.usd "
        f"{format_usd(budget.usd)}"
    )


def _brought(session: Any, state: RunState, start: StartJob) -> bool:
    """Whether something had to be copied before ``start``; it is now."""
    run = state.run
    if run.record is None:
        raise UserError(f"{run.name}: nothing was submitted yet; `sm-train submit` it first")
    request, region = recorded_request(run.record, start), run.places[start.place].region
    with bytes_bar(f"copying to {region}") as progress:
        return replicate_inputs(session, request, region, state.stages, progress)


def _start(session: Any, state: RunState, action: StartJob) -> str | None:
    """Start the job at its place, or at the next one where the account may have such machines; what
    was done.

    None where something was copied there first. That may have taken an hour, in which somebody
    stopped the run: decide anew.
    """
    many, refused = len(state.run.places), None
    for number in range(many):
        start = replace(action, place=(action.place + number) % many)
        if _brought(session, state, start):
            return None
        try:
            return _started(session, state.run, start)
        except QuotaError as error:
            refused = refused or error
    assert refused is not None
    raise refused


def _started(session: Any, run: Run, start: StartJob) -> str:
    assert run.record is not None  # _brought has looked
    try:
        name = start_next_job(session, run.bucket, run.record, start)
    except ClaimedError as error:
        return str(error)  # the next look sees what they started
    place = run.places[start.place]
    where = "" if len(run.places) == 1 else f", {place.machines(start.stage)}"
    return _with_alarms(
        session, run, f"{start.words}; started {name} from step {start.from_step:,}{where}"
    )


def _do(session: Any, state: RunState, action: NoAction | StopJob | Finish) -> str:
    if isinstance(action, StopJob):
        stop_job(session, action.job, action.cause)
    if isinstance(action, Finish):
        return _with_alarms(session, state.run, action.words)
    return action.words


def _with_alarms(session: Any, run: Run, done: str) -> str:
    """Keep the run's alarms to the jobs that live; ``done``, and what came of that."""
    kept = sync_alarms(session, run.config, run.region)
    return done if kept is None else f"{done}; {kept}"


def watch(
    session: Any,
    find: Callable[[], Run],
    *,
    act: bool,
    interval: float,
    shower: WatchView,
) -> ExitCode:
    """Look every ``interval`` seconds until nothing more happens by itself; the exit code of that.

    The run is found anew each time: somebody may have submitted other code for it. A refusal that
    may pass makes the next look later, never the watch end.

    Raises:
        UserError: AWS refuses for good, as when credentials have expired.
    """
    pause = interval
    while True:
        try:
            seen = reconcile(session, find(), act=act)
        except UserError as error:
            if error.exit_code not in TRANSIENT:
                raise _with_advice(error) from None
            pause = min(2 * pause, _LONGEST_PAUSE)
            shower.refused(error, pause)
        else:
            pause = interval
            shower.show(seen)
            code = exit_code(seen.action, act=act)
            if code is not None:
                return code
        shower.wait(pause)


def exit_code(action: Action, *, act: bool) -> ExitCode | None:
    """How watching ends with ``action``; None where it goes on.

    Without acting, a stall is for the caller to mend. With it, the job is being ended and the next
    look starts another.
    """
    if isinstance(action, Finish):
        return action.exit_code
    if isinstance(action, StopJob) and action.cause == STALL and not act:
        return ExitCode.STALLED
    if isinstance(action, StopJob) and action.cause != STALL:
        return ExitCode.OVER_BUDGET
    return None


def once_code(action: Action, *, act: bool) -> ExitCode:
    """The exit code of a single look, for a cron job's mail or a script."""
    if isinstance(action, StopJob) and action.cause == STALL:
        return ExitCode.STALLED
    return exit_code(action, act=act) or ExitCode.OK


def _with_advice(error: UserError) -> UserError:
    if error.exit_code != ExitCode.PERMISSION:
        return error
    return UserError(f"{error}; the run itself goes on: watch it again then", error.exit_code)


def kind(action: Action) -> str:
    """The action's name in JSON."""
    return {NoAction: "wait", StartJob: "start", StopJob: "stop", Finish: "end"}[type(action)]
