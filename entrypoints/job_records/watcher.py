"""Watches a run from outside of its nodes, by what they store.

Each call checks once. It alerts when the nodes' heartbeats cease, and asks them to stop when the
budget is spent. What it has sent is stored next to the records, so that the next call repeats
nothing.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sm_train.entrypoints.common.checkpoint_layout import MARKER, parse_step_folder
from sm_train.entrypoints.common.job_config import (
    JOB_FILE,
    RUN_FILE,
    AlertsConfig,
    read_job_config,
)
from sm_train.entrypoints.common.node_description import NodeDescription
from sm_train.entrypoints.job_records.node_record import (
    FOLDER,
    StopRequest,
    StoredNode,
    read_document,
    read_nodes,
    read_stop_request,
    store_stop_request,
)
from sm_train.entrypoints.job_records.silence import Silence, find_silence
from sm_train.entrypoints.monitoring.alert_sinks import UndeliveredError, configured_sinks
from sm_train.entrypoints.monitoring.alerts import LEVELS, Alert
from sm_train.entrypoints.object_store.store import S3Access
from sm_train.entrypoints.shared_work.storage import Storage, open_storage, write_file

_ALERTS_FILE = f"{FOLDER}/alerts.json"
_HOUR = 3600.0


@dataclass(frozen=True)
class WatchedStage:
    """A stage to watch. ``usd_per_hour`` is the price of a node, None if it is unknown."""

    run: str
    stage: str
    storage: Storage
    alerts: AlertsConfig
    usd_per_hour: float | None = None


@dataclass(frozen=True)
class Delivery:
    """An alert, and the reason for each sink that it did not reach."""

    alert: Alert
    sinks: int
    problems: tuple[str, ...] = ()

    @property
    def arrived(self) -> bool:
        """Whether each sink has it, of which there is at least one."""
        return self.sinks > 0 and not self.problems


def alert_on_silence(
    stage: WatchedStage, nodes: Sequence[StoredNode], now: float
) -> list[Delivery]:
    """Send an alert for what is newly wrong with a stage's nodes, or that it is over.

    Raises:
        OSError: the storage cannot be read or written.
    """
    silence = find_silence(nodes, now)
    before = read_document(stage.storage, _ALERTS_FILE) or {}
    after, alerts = dict[str, float](), []
    if silence is None:
        alerts += [_resolved(stage, key, now) for key in before]
    elif silence.key in before:
        after[silence.key] = before[silence.key]
    else:
        # An alert about some nodes is not over when all are silent: this one replaces it.
        alerts.append(_alert(stage, nodes, silence, now))
    deliveries = [_send(stage, alert) for alert in alerts if _is_severe(stage, alert)]
    after |= {item.alert.key: now for item in deliveries if item.arrived and silence is not None}
    if after != before:
        write_file(stage.storage, _ALERTS_FILE, json.dumps(after).encode())
    return deliveries


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
    live = [node.record for node in nodes if node.record.is_live(now)]
    if spent_usd < budget_usd or not live:
        return []
    request = read_stop_request(stage.storage)
    if request is not None and request.requested > max(record.started for record in live):
        return []
    by = f"the budget of ${budget_usd:,.2f}, which is spent,"
    store_stop_request(stage.storage, StopRequest(now, by))
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
    return [_send(stage, alert)]


def node_hours(nodes: Sequence[StoredNode]) -> float:
    """Return the hours that nodes have run, as far as their heartbeats show."""
    return sum(node.record.seconds for node in nodes) / _HOUR


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
    """Return the name of the newest checkpoint with a marker, which is stored last."""
    folders = [
        folder
        for folder, _, file in (name.rpartition("/") for name in storage.list_sizes(""))
        if file == MARKER and parse_step_folder(folder) is not None
    ]
    return max(folders, default=None)


def _is_severe(stage: WatchedStage, alert: Alert) -> bool:
    """Return whether the run file wants an alert of this level, or that one of them is over."""
    return alert.resolved or LEVELS.index(alert.level) >= LEVELS.index(stage.alerts.level)


def _send(stage: WatchedStage, alert: Alert) -> Delivery:
    """Send an alert to each sink in one attempt: the next call tries again."""
    sinks, problems = configured_sinks(stage.alerts), []
    for factory in sinks:
        try:
            factory.create().send(alert)
        except UndeliveredError as error:
            problems.append(f"{factory.name}: {error}")
    return Delivery(alert, len(sinks), tuple(problems))


@dataclass(frozen=True)
class WatchReport:
    """What a check has sent, and what it could not do."""

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
    return WatchReport(tuple(deliveries), tuple(warnings))


def _stage(bundle: Path, root: str, name: str) -> WatchedStage:
    config = read_job_config(bundle / JOB_FILE, name)
    storage = open_storage(f"{root}/{name}", S3Access())
    price = config.expected.usd_per_instance_hour
    return WatchedStage(config.run, name, storage, config.alerts, price)


def _budget(run_file: dict[str, Any]) -> float | None:
    """Return the dollars at which a run stops; None without a limit that stops it."""
    budget = run_file.get("budget")
    stops = budget is not None and budget.get("on_exceed", "stop") == "stop"
    return float(budget["usd"]) if budget is not None and stops else None


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
