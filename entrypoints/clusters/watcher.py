"""Watches a run from outside of its nodes, by what they store.

Each call checks once. It alerts when the nodes' heartbeats cease, and asks them to stop when the
budget is spent. What it has decided is stored next to the records with the sinks that each alert
has yet to reach (:mod:`alert_outbox`), so that the next call repeats nothing and forgets nothing.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sm_train.entrypoints.clusters.attempts import clock_findings, newest_attempt
from sm_train.entrypoints.clusters.node_record import (
    StopRequest,
    StoredNode,
    read_nodes,
    read_stop_request,
    store_stop_request,
)
from sm_train.entrypoints.clusters.silence import Silence, find_silence
from sm_train.entrypoints.job_interface.checkpoint_layout import MARKER, newest_listed
from sm_train.entrypoints.job_interface.job_config import (
    JOB_FILE,
    RUN_FILE,
    AlertsConfig,
    read_job_config,
)
from sm_train.entrypoints.job_interface.node_description import NodeDescription
from sm_train.entrypoints.monitoring.alert_outbox import Delivery, deliver, read_alerts
from sm_train.entrypoints.monitoring.alert_sinks import configured_sinks
from sm_train.entrypoints.monitoring.alerts import LEVELS, Alert
from sm_train.entrypoints.records.budget import enforced_usd, is_spent
from sm_train.entrypoints.storage.storage import Storage, open_storage
from sm_train.entrypoints.storage.store import S3Access

_HOUR = 3600.0


@dataclass(frozen=True)
class WatchedStage:
    """A stage to watch. ``usd_per_hour`` is the price of a node, None if it is unknown."""

    run: str
    stage: str
    storage: Storage
    alerts: AlertsConfig
    usd_per_hour: float | None = None


def alert_on_silence(
    stage: WatchedStage, nodes: Sequence[StoredNode], now: float
) -> list[Delivery]:
    """Send an alert for what is newly wrong with a stage's nodes, or that it is over.

    Alerts that did not reach a sink at an earlier check are sent to it again.

    Raises:
        OSError: the storage cannot be read or written.
    """
    silence = find_silence(nodes, now)
    state = read_alerts(stage.storage)
    opened, decided = dict[str, float](), list[Alert]()
    if silence is None:
        decided += [_resolved(stage, key, now) for key in state.opened]
    elif silence.key in state.opened:
        opened[silence.key] = state.opened[silence.key]
    elif LEVELS.index(silence.level) >= LEVELS.index(stage.alerts.level):
        # An alert about some nodes is not over when all are silent: this one replaces it.
        opened[silence.key] = now
        decided.append(_alert(stage, nodes, silence, now))
    return deliver(
        stage.storage, configured_sinks(stage.alerts), state, state.decide(decided, opened), now
    )


def stop_at_budget(
    stage: WatchedStage,
    nodes: Sequence[StoredNode],
    spent_usd: float,
    budget_usd: float,
    now: float,
) -> list[Delivery]:
    """Ask a stage's live nodes to stop if the budget is spent, once for each attempt; then alert.

    Raises:
        OSError: the storage cannot be read or written.
    """
    live = [node for node in nodes if node.is_live(now)]
    if not is_spent(budget_usd, spent_usd) or not live:
        return []
    request = read_stop_request(stage.storage)
    started = max(node.started for node in live)
    # By the node's own clock: what does not change from one heartbeat to the next.
    attempt = max(node.record.started for node in live)
    by = f"the budget of ${budget_usd:,.2f}, which is spent,"
    job_id = live[-1].record.job_id
    if request is None or not request.applies_to(started, job_id):
        store_stop_request(stage.storage, by, job_id)
        request = StopRequest(by, now)
    state = read_alerts(stage.storage)
    if request.by != by or state.budget_announced == attempt:
        return []
    alert = Alert(
        key="budget",
        level="critical",
        title="the budget is spent",
        run=stage.run,
        stage=stage.stage,
        symptom=f"${spent_usd:,.2f} of ${budget_usd:,.2f}: the nodes stop after a checkpoint",
        time=now,
        last_checkpoint=_newest_checkpoint(stage.storage),
        command=_command(nodes, "resume"),
    )
    decided = replace(state.decide([alert], state.opened), budget_announced=attempt)
    return deliver(stage.storage, configured_sinks(stage.alerts), state, decided, now)


def node_hours(nodes: Sequence[StoredNode]) -> float:
    """Return the hours that nodes have run, as far as their heartbeats show."""
    return sum(node.record.ran for node in nodes) / _HOUR


def _alert(stage: WatchedStage, nodes: Sequence[StoredNode], silence: Silence, now: float) -> Alert:
    newest = nodes[-1].record
    price = stage.usd_per_hour
    return Alert(
        key=silence.key,
        level=silence.level,
        title=silence.title,
        run=stage.run,
        stage=stage.stage,
        symptom=silence.symptom,
        time=now,
        worst=silence.worst,
        silent_seconds=silence.seconds,
        burned_usd=None if price is None else price * newest.nodes * silence.seconds / _HOUR,
        last_checkpoint=_newest_checkpoint(stage.storage),
        command=_command(nodes, silence.purpose),
    )


def _resolved(stage: WatchedStage, key: str, now: float) -> Alert:
    return Alert(
        key=key,
        level="info",
        title="nodes send heartbeats again, or have ended as planned",
        run=stage.run,
        stage=stage.stage,
        symptom="",
        time=now,
        last_checkpoint=_newest_checkpoint(stage.storage),
        resolved=True,
    )


def _command(nodes: Sequence[StoredNode], purpose: str) -> str | None:
    return nodes[-1].record.commands.get(purpose)


def _newest_checkpoint(storage: Storage) -> str | None:
    """Return the name of the newest complete checkpoint."""
    sizes = storage.list_sizes("")
    return newest_listed(sizes, lambda name: storage.read(f"{name}/{MARKER}")).name


@dataclass(frozen=True)
class WatchReport:
    """What a check has sent, and what it could not do or found besides."""

    deliveries: tuple[Delivery, ...]
    warnings: tuple[str, ...] = ()


def watch_bundle(bundle: Path, description: NodeDescription, now: float) -> WatchReport:
    """Check all stages of the run once whose code is in ``bundle``.

    Raises:
        OSError: the storage cannot be read or written.
    """
    root = description.checkpoints.rpartition("/")[0]
    names = json.loads((bundle / JOB_FILE).read_bytes())
    stages = [_stage(bundle, root, name) for name in names]
    nodes = {stage.stage: read_nodes(stage.storage) for stage in stages}
    deliveries, warnings = [], []
    budget = _budget(json.loads((bundle / RUN_FILE).read_bytes()))
    spent = _spent(stages, nodes)
    if budget is not None and spent is None:
        warnings.append("budget.usd cannot be enforced: the price of a node is unknown")
    for stage in stages:
        if budget is not None and spent is not None:
            deliveries += stop_at_budget(stage, nodes[stage.stage], spent, budget, now)
        deliveries += alert_on_silence(stage, nodes[stage.stage], now)
        warnings += clock_findings(newest_attempt(nodes[stage.stage]))
    return WatchReport(tuple(deliveries), tuple(warnings))


def _stage(bundle: Path, root: str, name: str) -> WatchedStage:
    config = read_job_config(bundle / JOB_FILE, name)
    storage = open_storage(f"{root}/{name}", S3Access())
    price = config.expected.usd_per_instance_hour
    return WatchedStage(config.run, name, storage, config.alerts, price)


def _budget(run_file: dict[str, Any]) -> float | None:
    """Return the dollars at which a run stops; None without a limit that stops it."""
    budget = run_file.get("budget")
    if budget is None:
        return None
    return enforced_usd(float(budget["usd"]), budget.get("on_exceed", "stop"))


def _spent(
    stages: Sequence[WatchedStage], nodes: Mapping[str, Sequence[StoredNode]]
) -> float | None:
    """Return the dollars of all nodes' hours; None if a price is unknown."""
    amounts = [
        (stage.usd_per_hour, node_hours(nodes[stage.stage]))
        for stage in stages
        if nodes[stage.stage]
    ]
    if any(price is None for price, _ in amounts):
        return None
    return sum((price or 0.0) * hours for price, hours in amounts)
