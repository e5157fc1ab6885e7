"""Watches a run on a cluster by what its nodes store: alerts of silence, and stops at the budget.

The platform starts jobs again; nothing is started here.
"""

from __future__ import annotations

from collections.abc import Sequence

from sm_train.cost.prices import ON_DEMAND
from sm_train.entrypoints.job_records.alert_outbox import Delivery
from sm_train.entrypoints.job_records.budget import is_spent
from sm_train.entrypoints.job_records.silence import Silence, find_silence
from sm_train.entrypoints.job_records.watcher import (
    WatchedStage,
    alert_on_silence,
    stop_at_budget,
)
from sm_train.toolkit.clusters.cluster_run import ClusterRun, readable
from sm_train.toolkit.costing.price_table import price_table
from sm_train.toolkit.errors import ExitCode
from sm_train.toolkit.jobs.stage_state import StageState
from sm_train.toolkit.runs.cluster_state import read_cluster_state
from sm_train.toolkit.runs.next_command import next_command
from sm_train.toolkit.runs.remediation import (
    BUDGET,
    Action,
    Finish,
    NoAction,
    Policy,
    StopJob,
)
from sm_train.toolkit.runs.run_state import RunState
from sm_train.toolkit.watch.controller import WatchResult, watch_warning


def check_once(run: ClusterRun, *, dry_run: bool) -> WatchResult:
    """Check the run, just found, once and, unless ``dry_run``, alert and stop as it needs.

    Raises:
        UserError: the place of its checkpoints cannot be read or written.
    """
    return check_state(run, read_cluster_state(run), dry_run=dry_run)


def check_state(run: ClusterRun, state: RunState, *, dry_run: bool) -> WatchResult:
    """Do what a run in this state needs; see :func:`check_once`."""
    stage = state.current
    now = state.now.timestamp()
    silence = None if stage is None else find_silence(run.nodes(stage.name), now)
    action = cluster_action(state, silence)
    deliveries = () if dry_run or stage is None else _act(run, stage.name, state, now)
    done = "; ".join([action.message, *map(_delivered, deliveries)])
    return WatchResult(state, action, done, watch_warning(state))


def cluster_action(state: RunState, silence: Silence | None) -> Action:
    """Return what the run needs now; ``silence`` is what its current stage's records show. Pure."""
    stage = state.current
    if stage is None:
        return Finish(ExitCode.OK, "the run is done")
    job = stage.job
    if job is None:
        command = next_command(state.run, stage)
        return Finish(ExitCode.OK, f"no node of {stage.name} has started; to start it: {command}")
    policy = Policy.of(state.run.config, state.run.config)
    over_budget = is_spent(policy.budget_usd, state.projection.counted_usd)
    if job.live and stage.state != "stopping" and over_budget:
        message = f"{job.name} has spent the budget: its nodes stop after a checkpoint"
        return StopJob(job, BUDGET, message)
    if job.live:
        return NoAction(f"{job.name} is {stage.state}{_since(stage, state)}")
    return _after_end(state, stage, silence, over_budget=over_budget)


_MOST_QUEUED_SECONDS = 86_400.0
"""How long an attempt that ended may wait in the platform's queue until `watch` ends."""


def _after_end(
    state: RunState, stage: StageState, silence: Silence | None, *, over_budget: bool
) -> Action:
    """Return what follows an attempt that has ended.

    `watch` stays while the platform may start it again, also over the budget: the next attempt has
    to be stopped, too.
    """
    job = stage.job
    assert job is not None
    reason = job.failure_reason or f"ended at step {stage.resumes_from:,} of {stage.max_steps:,}"
    if silence is not None:
        reason = silence.symptom
    code = ExitCode.STALLED if silence is not None else ExitCode.OK
    code = ExitCode.OVER_BUDGET if over_budget else code
    age = (state.now - (job.ended or job.created)).total_seconds()
    if age <= _MOST_QUEUED_SECONDS and job.may_start_again:
        return NoAction(f"{job.name}: {reason}; the platform may start it again", code)
    if over_budget or silence is not None:
        return Finish(code, f"{job.name}: {reason}")
    if stage.state in ("failed", "no-results"):
        code = ExitCode.JOB_FAILED
    command = next_command(state.run, stage)
    return Finish(code, f"{job.name}: {reason}; next: {command}")


def _since(stage: StageState, state: RunState) -> str:
    if stage.state != "stalled" or stage.progress.last_activity is None:
        return ""
    minutes = (state.now.timestamp() - stage.progress.last_activity) / 60
    return f": no progress since step {stage.step:,}, for {minutes:.0f} minutes"


def _act(run: ClusterRun, stage: str, state: RunState, now: float) -> Sequence[Delivery]:
    """Stop the stage's nodes if the budget is spent, and alert."""
    nodes, limit = run.nodes(stage), Policy.of(run.config, run.config).budget_usd
    watched = WatchedStage(
        run.name,
        stage,
        run.storage(stage),
        run.config.alerts.job_config(),
        _usd_per_hour(run),
    )
    deliveries = []
    with readable(run.root):
        if limit is not None:
            spent = state.projection.counted_usd
            deliveries += stop_at_budget(watched, nodes, spent, limit, now)
        return [*deliveries, *alert_on_silence(watched, nodes, now)]


def _delivered(delivery: Delivery) -> str:
    alert = delivery.alert
    if not delivery.sinks:
        return f"alert `{alert.title}`: this machine has no sink of `alerts` to send it to"
    if delivery.problems:
        return f"alert `{alert.title}` did not arrive: {', '.join(delivery.problems)}"
    return f"alert sent: {alert.title}"


def _usd_per_hour(run: ClusterRun) -> float | None:
    price = price_table().price(run.config.cluster.instance_type, run.region, ON_DEMAND)
    usd = price.usd_per_instance_hour
    return None if usd is None else float(usd)
