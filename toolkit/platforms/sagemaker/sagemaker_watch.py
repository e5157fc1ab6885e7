"""Polls a run on SageMaker and does what it needs: starts, moves and stops its jobs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sm_train.entrypoints.monitoring.alert_outbox import send_now
from sm_train.entrypoints.monitoring.alert_sinks import configured_sinks
from sm_train.entrypoints.monitoring.alerts import Alert
from sm_train.toolkit.base.errors import ExitCode
from sm_train.toolkit.planning.spent import usd_per_hour
from sm_train.toolkit.platforms.sagemaker.job_causes import cause_of_failure
from sm_train.toolkit.platforms.sagemaker.sagemaker_run import SageMakerRun
from sm_train.toolkit.records.launch_record import ClaimedError
from sm_train.toolkit.records.training_job import end_warm_pool, stop_job
from sm_train.toolkit.runs.alarms.alarms import sync_alarms
from sm_train.toolkit.runs.remediation import (
    Finish,
    NoAction,
    Policy,
    StartJob,
    StopJob,
    next_action,
)
from sm_train.toolkit.runs.run_state import RunState, read_state
from sm_train.toolkit.runs.watch.controller import WatchResult, watch_warning
from sm_train.toolkit.submit.relocation import start_where_possible

if TYPE_CHECKING:
    import boto3


def poll(run: SageMakerRun, *, dry_run: bool) -> WatchResult:
    """Do what the run, just found, needs; with ``dry_run`` only report it.

    Raises:
        UserError: AWS returns an error.
    """
    session, state = run.session, read_state(run)
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
        started = _start(run, state, action)
        if started is None:
            return poll(run.refreshed(), dry_run=dry_run)
        done = started
    else:
        done = _stop_or_finish(run, state, action)
    return WatchResult(state, action, done, watch_warning(state))


def _start(run: SageMakerRun, state: RunState, action: StartJob) -> str | None:
    """Start the job and describe it; None if inputs were copied first and the state may be old."""
    try:
        started = start_where_possible(run, state.stages, action)
    except ClaimedError as error:
        return str(error)  # the next poll sees the other process's job
    if started is None:
        return None
    cluster = "" if started.cluster is None else f", {started.cluster}"
    message = f"{action.message}; started {started.name} from step {action.from_step:,}{cluster}"
    return _with_alarms(run, message)


def _stop_or_finish(run: SageMakerRun, state: RunState, action: NoAction | StopJob | Finish) -> str:
    if isinstance(action, StopJob):
        hourly = usd_per_hour(action.job)
        warning = stop_job(run.session, action.job, action.cause, usd_per_hour=hourly)
        return action.message if warning is None else f"{action.message}; {warning}"
    if isinstance(action, Finish):
        message = action.message
        if action.exit_code is ExitCode.OVER_BUDGET:
            message = _without_warm_pools(run.session, state, message)
        if action.exit_code is ExitCode.STALLED:
            message = _with_alert(run, state, message)
        return _with_alarms(run, message)
    return action.message


_ALERTED_SECONDS = 600.0
"""For how long after the limit a poll sends the alert: two polls of a function."""


def _with_alert(run: SageMakerRun, state: RunState, message: str) -> str:
    """Send an alert for a job that stores its results for too long, and append what became of it.

    Its own processes have ended, and can send none.
    """
    stage = state.current
    job = None if stage is None else stage.job
    if job is None or job.phase.limit is None or not job.live:
        return message
    seconds = job.seconds_in_phase(state.now)
    if seconds - job.phase.limit.total_seconds() > _ALERTED_SECONDS:
        return message
    hourly = usd_per_hour(job)
    alert = Alert(
        key="storing",
        level="critical",
        title="results take too long to be stored",
        run=run.name,
        stage=job.stage,
        symptom=message,
        time=state.now.timestamp(),
        silent_seconds=seconds,
        burned_usd=None if hourly is None else hourly * seconds / 3600,
        command=job.stop_command,
    )
    sinks = configured_sinks(run.config.alerts.job_config())
    return f"{message}; {send_now(alert, sinks).describe()}" if sinks else message


def _without_warm_pools(session: boto3.Session, state: RunState, message: str) -> str:
    """End the warm pools of a run whose budget is spent, and append that to ``message``."""
    for stage in state.stages:
        for job in stage.jobs:
            if job.has_warm_pool:
                end_warm_pool(session, job)
                message += f"; ended the warm pool of {job.name}"
    return message


def _with_alarms(run: SageMakerRun, message: str) -> str:
    """Update the run's alarms to its live jobs, and append the result to ``message``."""
    result = sync_alarms(run.session, run.config, run.region)
    return message if result is None else f"{message}; {result}"
