"""Watches a run on a cluster by what its nodes store: alerts of silence, and stops at the budget.

The platform starts jobs again; nothing is started here.
"""

from __future__ import annotations

from collections.abc import Sequence

from sm_train.entrypoints.clusters.silence import find_silence
from sm_train.entrypoints.clusters.watcher import WatchedStage, alert_on_silence, stop_at_budget
from sm_train.entrypoints.monitoring.alert_outbox import Delivery
from sm_train.toolkit.clusters.node_records.cluster_run import ClusterRun, readable
from sm_train.toolkit.planning.spent import usd_per_hour
from sm_train.toolkit.records.stage_state import StageState
from sm_train.toolkit.runs.remediation import Policy
from sm_train.toolkit.runs.run_state import RunState, read_state
from sm_train.toolkit.runs.watch.controller import WatchResult, watch_warning
from sm_train.toolkit.runs.watch.platform_watch import platform_action


def poll(run: ClusterRun, *, dry_run: bool) -> WatchResult:
    """Check the run, just found, and, unless ``dry_run``, alert and stop as it needs.

    Raises:
        UserError: the place of its checkpoints cannot be read or written.
    """
    return check_state(run, read_state(run), dry_run=dry_run)


def check_state(run: ClusterRun, state: RunState, *, dry_run: bool) -> WatchResult:
    """Do what a run in this state needs; see :func:`poll`."""
    stage = state.current
    now = state.now.timestamp()
    silence = None if stage is None else find_silence(run.nodes(stage.name), now)
    action = platform_action(state, None if silence is None else silence.symptom)
    deliveries = () if dry_run or stage is None else _act(run, stage, state, now)
    done = "; ".join([action.message, *(delivery.describe() for delivery in deliveries)])
    return WatchResult(state, action, done, watch_warning(state))


def _act(run: ClusterRun, stage: StageState, state: RunState, now: float) -> Sequence[Delivery]:
    """Stop the stage's nodes if the budget is spent, and alert."""
    nodes, limit = run.nodes(stage.name), Policy.of(run.config, run.config).budget_usd
    hourly = None if stage.job is None else usd_per_hour(stage.job)
    watched = WatchedStage(
        run.name,
        stage.name,
        run.folder(stage.name),
        run.config.alerts.job_config(),
        None if hourly is None or stage.job is None else hourly / stage.job.instances[1],
    )
    deliveries = []
    with readable(run.root):
        if limit is not None:
            spent = state.projection.counted_usd
            deliveries += stop_at_budget(watched, nodes, spent, limit, now)
        return [*deliveries, *alert_on_silence(watched, nodes, now)]
