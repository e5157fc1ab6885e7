"""Polls a run and does what it needs: the same step for a laptop, a cron job and a function."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

from sm_train.toolkit.alarms.alarms import sync_alarms
from sm_train.toolkit.aws.session import session_in_region
from sm_train.toolkit.clusters.cluster_run import ClusterRun
from sm_train.toolkit.costing.spent import usd_per_hour
from sm_train.toolkit.diagnose.job_logs import diagnose_job
from sm_train.toolkit.errors import TRANSIENT, ExitCode, UserError
from sm_train.toolkit.jobs.launch_record import ClaimedError
from sm_train.toolkit.jobs.run_job import RunJob
from sm_train.toolkit.jobs.training_job import end_warm_pool, stop_job
from sm_train.toolkit.runs.remediation import (
    STALL,
    Action,
    Cause,
    Finish,
    NoAction,
    Policy,
    StartJob,
    StopJob,
    next_action,
)
from sm_train.toolkit.runs.run_state import RunState, read_state
from sm_train.toolkit.submit.relocation import start_where_possible
from sm_train.toolkit.targets.resolved_run import ResolvedRun, refresh_run
from sm_train.toolkit.terminal.formatting import format_usd

if TYPE_CHECKING:
    import boto3

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


def reconcile(session: boto3.Session, run: ResolvedRun, *, dry_run: bool) -> WatchResult:
    """Poll the run once and, unless ``dry_run``, do what it needs.

    Raises:
        UserError: AWS returns an error.
    """
    session = session_in_region(session, run.region)
    run = refresh_run(session, run)
    state = read_state(session, run)
    action = next_action(
        state.stages,
        Policy.of(run.config, run.submitted_config),
        lambda job: cause_of_failure(session, job),
        spent_usd=state.projection.counted_usd,
        now=state.now,
    )
    if dry_run:
        done = action.message
    elif isinstance(action, StartJob):
        started = _start(session, run, state, action)
        if started is None:
            return reconcile(session, run, dry_run=dry_run)
        done = started
    else:
        done = _stop_or_finish(session, run, state, action)
    return WatchResult(state, action, done, watch_warning(state))


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


def cause_of_failure(session: boto3.Session, job: RunJob) -> Cause:
    """Diagnose a failed job.

    The first word of SageMaker's failure reason is the type of the error. Errors of the algorithm
    are diagnosed from the job's logs: only a cause known to be transient is worth another job.
    """
    reason = job.failure_reason or "failed without a reason"
    error_type = reason.partition(":")[0]
    if error_type == "CapacityError":
        return Cause("capacity", f"got no instances ({reason})", retryable=True)
    if error_type == "InternalServerError":
        message = f"failed because of an error in SageMaker ({reason})"
        return Cause("internal-error", message, retryable=True)
    if _INFRASTRUCTURE.search(reason) and not _PROGRAM.search(reason):
        message = f"failed because of its instances ({reason})"
        return Cause("infrastructure", message, retryable=True)
    try:
        diagnosis = diagnose_job(session_in_region(session, job.region), job.name)
    except UserError as error:
        return Cause("unknown", f"failed: {reason} (its log: {error})", retryable=False)
    retryable = bool(diagnosis.retryable) and diagnosis.confidence in ("high", "medium")
    return Cause(diagnosis.cause, f"failed: {diagnosis.title} ({reason})", retryable)


_INFRASTRUCTURE = re.compile(
    r"\b(?:infrastructure|health[ -]?checks?|unhealthy|hardware|capacity)\b",
    re.IGNORECASE,
)
"""Words of reasons that name the platform's machines; AWS documents no list of them."""

_PROGRAM = re.compile("ExecuteUserScriptError|ErrorMessage|exit code", re.IGNORECASE)
"""What a reason has if it quotes the program, whose words say nothing about machines."""


def failed_on_infrastructure(session: boto3.Session, job: RunJob) -> bool:
    """Return whether hardware or AWS failed the job: another job may succeed without a change.

    A job that got no instances has not run on any.
    """
    cause = cause_of_failure(session, job)
    return cause.retryable and cause.code != "capacity"


def _start(
    session: boto3.Session, run: ResolvedRun, state: RunState, action: StartJob
) -> str | None:
    """Start the job and describe it; None if inputs were copied first and the state may be old."""
    try:
        started = start_where_possible(session, run, state.stages, action)
    except ClaimedError as error:
        return str(error)  # the next poll sees the other process's job
    if started is None:
        return None
    cluster = "" if started.cluster is None else f", {started.cluster}"
    message = f"{action.message}; started {started.name} from step {action.from_step:,}{cluster}"
    return _with_alarms(session, run, message)


def _stop_or_finish(
    session: boto3.Session,
    run: ResolvedRun,
    state: RunState,
    action: NoAction | StopJob | Finish,
) -> str:
    if isinstance(action, StopJob):
        hourly = usd_per_hour(action.job)
        warning = stop_job(session, action.job, action.cause, usd_per_hour=hourly)
        return action.message if warning is None else f"{action.message}; {warning}"
    if isinstance(action, Finish):
        message = action.message
        if action.exit_code is ExitCode.OVER_BUDGET:
            message = _without_warm_pools(session, state, message)
        return _with_alarms(session, run, message)
    return action.message


def _without_warm_pools(session: boto3.Session, state: RunState, message: str) -> str:
    """End the warm pools of a run whose budget is spent, and append that to ``message``."""
    for stage in state.stages:
        for job in stage.jobs:
            if job.has_warm_pool:
                end_warm_pool(session, job)
                message += f"; ended the warm pool of {job.name}"
    return message


def _with_alarms(session: boto3.Session, run: ResolvedRun, message: str) -> str:
    """Update the run's alarms to its live jobs, and append the result to ``message``."""
    result = sync_alarms(session, run.config, run.region)
    return message if result is None else f"{message}; {result}"


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
            pause = interval
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
    run = None if result is None else result.state.run
    if isinstance(run, ClusterRun):
        missing = ["alert when all nodes are gone"]
        retries = "the platform's restarts"
    else:
        missing = ["start another job after a failure", "start the next stage"]
        retries = "SageMaker's own retries"
    if run is None or run.config.budget is not None:
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
