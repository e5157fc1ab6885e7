"""Folds a job's events into its live state, in any order and with repetitions.

Pure functions. A :class:`LiveState` keeps the newest event of each kind; merging two states gives
the state that has seen the events of both.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from sm_train.entrypoints.common.sagemaker_paths import host_name
from sm_train.toolkit.jobs.event_lines import Event

_MAX_STEPS, _MAX_NOTICES, _MAX_CHECKPOINTS = 720, 200, 200
"""Step events (an hour at one every five seconds), warnings and errors, and checkpoint events, that
are kept."""

_ACTIVITY = ("start", "step", "checkpoint", "eval", "end", "epoch")
"""Kinds of events that show that the job makes progress."""


@dataclass(frozen=True, order=True)
class LoggedEvent:
    """An event with its node and its time (Unix seconds, by the node's clock)."""

    time: float
    node: str
    text: str
    """The event as JSON: distinguishes events of the same time, and makes duplicates equal."""
    event: Event = field(compare=False)


@dataclass(frozen=True)
class LiveState:
    """The live state of one job.

    ``heartbeats`` and ``node_metrics`` hold each node's newest ``heartbeat`` and ``node`` events,
    ``newest`` the newest event of every other kind. ``last_activity`` is when a process last took
    a step, saved, evaluated or started, in Unix seconds.
    """

    steps: tuple[LoggedEvent, ...] = ()
    notices: tuple[LoggedEvent, ...] = ()
    checkpoints: tuple[LoggedEvent, ...] = ()
    heartbeats: Mapping[str, LoggedEvent] = field(default_factory=dict)
    node_metrics: Mapping[str, LoggedEvent] = field(default_factory=dict)
    newest: Mapping[str, LoggedEvent] = field(default_factory=dict)
    last_activity: float | None = None


def fold_events(events: Iterable[tuple[str, Event]]) -> LiveState:
    """Return the state after ``events``, each given with its node."""
    steps, notices, checkpoints = set[LoggedEvent](), set[LoggedEvent](), set[LoggedEvent]()
    heartbeats: dict[str, LoggedEvent] = {}
    node_metrics: dict[str, LoggedEvent] = {}
    newest: dict[str, LoggedEvent] = {}
    last_activity: float | None = None
    for node, event in events:
        if not isinstance(event.get("time"), (int, float)):
            continue
        logged = LoggedEvent(float(event["time"]), node, json.dumps(event, sort_keys=True), event)
        kind, moment = event["kind"], logged.time
        if kind == "heartbeat":
            heartbeats[node] = max(heartbeats.get(node, logged), logged)
            if event["seconds_since_step"] is None:
                continue
            # Heartbeats continue while training hangs: the step they report counts as activity.
            moment -= float(event["seconds_since_step"])
        elif kind == "node":
            node_metrics[node] = max(node_metrics.get(node, logged), logged)
        elif kind in ("warning", "error"):
            notices.add(logged)
        else:
            newest[kind] = max(newest.get(kind, logged), logged)
        if kind == "step":
            steps.add(logged)
        if kind == "checkpoint":
            checkpoints.add(logged)
        if kind in _ACTIVITY or kind == "heartbeat":
            last_activity = max(moment, last_activity if last_activity is not None else moment)
    return LiveState(
        tuple(sorted(steps)[-_MAX_STEPS:]),
        tuple(sorted(notices)[-_MAX_NOTICES:]),
        tuple(sorted(checkpoints)[-_MAX_CHECKPOINTS:]),
        heartbeats,
        node_metrics,
        newest,
        last_activity,
    )


def merge(first: LiveState, second: LiveState) -> LiveState:
    """Merge two states into one that has seen the events of both."""
    activity = [live.last_activity for live in (first, second) if live.last_activity is not None]
    return LiveState(
        tuple(sorted({*first.steps, *second.steps})[-_MAX_STEPS:]),
        tuple(sorted({*first.notices, *second.notices})[-_MAX_NOTICES:]),
        tuple(sorted({*first.checkpoints, *second.checkpoints})[-_MAX_CHECKPOINTS:]),
        _newer(first.heartbeats, second.heartbeats),
        _newer(first.node_metrics, second.node_metrics),
        _newer(first.newest, second.newest),
        max(activity, default=None),
    )


def _newer(
    first: Mapping[str, LoggedEvent], second: Mapping[str, LoggedEvent]
) -> dict[str, LoggedEvent]:
    return {
        key: max(events[key] for events in (first, second) if key in events)
        for key in {**first, **second}
    }


# ------------------------------------------------------------------ views of the state


@dataclass(frozen=True)
class NodeState:
    """A node's newest state; None is unknown. Shares are of 1, utilization is in percent.

    ``compiling`` is whether its slowest rank compiles layers of the network.
    """

    node: str
    heartbeat_age_seconds: float | None
    step: int | None
    gpu_utilization: float | None
    gpu_utilization_min: float | None
    gpu_memory_bytes: float | None
    gpu_temperature: float | None
    data_wait_share: float | None
    straggler_ratio: float | None
    receive_bytes_per_second: float | None
    send_bytes_per_second: float | None
    compiling: bool | None


@dataclass(frozen=True)
class NamedStraggler:
    """A rank that the others wait for; ``rank`` is None if all ranks of the node are slow.

    ``busy_seconds`` of each step it spends outside collectives, ``ratio`` times as long as the
    other ranks.
    """

    rank: int | None
    node: str
    busy_seconds: float
    ratio: float


@dataclass(frozen=True)
class Notice:
    """Warnings or errors of one code and node: the newest one, and their number."""

    time: float
    level: str
    node: str
    code: str
    message: str
    count: int


def node_states(
    live: LiveState, nodes: Iterable[str], now: float, gpus: Mapping[str, float]
) -> list[NodeState]:
    """Return the state of ``nodes`` and of every node that has logged, by number.

    ``gpus`` is the GPU utilization by CloudWatch, for nodes that do not log their own.
    """
    every = {*nodes, *live.heartbeats, *live.node_metrics}
    return [_node_state(live, node, now, gpus) for node in sorted(every, key=_node_order)]


def _node_state(live: LiveState, node: str, now: float, gpus: Mapping[str, float]) -> NodeState:
    heartbeat = live.heartbeats.get(node)
    metrics: Event = live.node_metrics[node].event if node in live.node_metrics else {}
    utilization = metrics.get("gpu_utilization_mean")
    efa = metrics.get("efa_receive_bytes_per_second"), metrics.get("efa_send_bytes_per_second")
    network = "network_receive_bytes_per_second", "network_send_bytes_per_second"
    return NodeState(
        node,
        None if heartbeat is None else max(0.0, now - heartbeat.time),
        None if heartbeat is None else heartbeat.event["step"],
        gpus.get(node) if utilization is None else utilization,
        metrics.get("gpu_utilization_min"),
        metrics.get("gpu_memory_used_max"),
        metrics.get("gpu_temperature_max"),
        metrics.get("data_wait_share_max"),
        metrics.get("straggler_ratio"),
        _sum_known(efa[0], metrics.get(network[0])),
        _sum_known(efa[1], metrics.get(network[1])),
        None if heartbeat is None else heartbeat.event.get("compiling"),
    )


def _sum_known(*values: float | None) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def _node_order(node: str) -> tuple[int, str]:
    number = node.rpartition("-")[2]
    return (int(number) if number.isdigit() else 0, node)


def saved_checkpoints(live: LiveState) -> list[tuple[float, int]]:
    """Return when checkpoints were saved, and their steps, oldest first.

    Events of checkpoints may be too old to have been read: heartbeats repeat the newest.
    """
    saved = {int(logged.event["step"]): logged.time for logged in live.checkpoints}
    for heartbeat in live.heartbeats.values():
        for step, age in heartbeat.event.get("saves") or ():
            saved.setdefault(int(step), heartbeat.time - float(age))
    return sorted((time, step) for step, time in saved.items())


def stragglers(live: LiveState) -> list[NamedStraggler] | None:
    """Return the stragglers that the job's first node found, slowest first; None if unknown."""
    names = {logged.event.get("node"): node for node, logged in live.node_metrics.items()}
    rows = [logged.event.get("stragglers") for logged in live.node_metrics.values()]
    known = [row for row in rows if isinstance(row, list)]
    if not known:
        return None
    return [
        NamedStraggler(
            straggler.get("rank"),
            names.get(straggler["node"], host_name(straggler["node"], len(names))),
            float(straggler["busy_seconds"]),
            float(straggler["ratio"]),
        )
        for straggler in known[0]
    ]


def notices(live: LiveState) -> list[Notice]:
    """Return warnings and errors, newest last; those a node repeats are counted as one."""
    merged: dict[tuple[str, str, str], Notice] = {}
    for logged in live.notices:
        level, code = logged.event["kind"], str(logged.event["code"])
        key = (logged.node, level, code)
        # Popping moves a repeated notice to the end.
        count = merged.pop(key).count + 1 if key in merged else 1
        message = " ".join(str(logged.event["message"]).split())
        merged[key] = Notice(logged.time, level, logged.node, code, message, count)
    return list(merged.values())
