"""Folds a job's events into its live state, in any order and with repetitions.

Pure functions. A :class:`LiveState` keeps the newest event of each kind; merging two states gives
the state that has seen the events of both.

The newest events of a job are read without weeks of its log.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from sm_train.cost.timeline import mean_speed
from sm_train.entrypoints.base.sagemaker_paths import host_name
from sm_train.entrypoints.records.upload_lag import StorageLag, storage_lag
from sm_train.toolkit.aws.cloudwatch_logs import LogEntry, newest_line, search
from sm_train.toolkit.records.job_logs import Event, parse_event
from sm_train.toolkit.records.run_job import RunJob

if TYPE_CHECKING:
    import boto3


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


_WINDOW_SECONDS = 1800.0
"""How far before its newest line a job's events are read: several logging intervals."""

EVENT_PATTERN = '"SMT "'
"""CloudWatch's filter for event lines."""


@dataclass(frozen=True)
class Progress:
    """Progress of one job, in Unix seconds by its own clock; None if it has not logged it yet.

    ``last_activity`` is when any of its processes last took a step, saved, evaluated or started.
    """

    step: int | None = None
    steps_per_second: float | None = None
    """Since its last start, by :func:`~sm_train.cost.timeline.mean_speed`."""
    data_wait_share: float | None = None
    loss: float | None = None
    last_activity: float | None = None
    ended: str | None = None
    """Why training ended, once it has."""
    is_first_interval: bool = False
    """Whether the speed is that of the first interval, which compiles and fills caches."""

    @property
    def measured_speed(self) -> float | None:
        """Steps per second; None while only the first interval is known."""
        return None if self.is_first_interval else self.steps_per_second


def read_live(session: boto3.Session, job: RunJob) -> LiveState:
    """Return the state of the job's newest events.

    Raises:
        UserError: AWS returns an error.
    """
    newest = newest_line(session, job.name, region=job.region)
    if newest is None:
        return LiveState()
    since = newest - _WINDOW_SECONDS
    entries = search(session, f"{job.name}/", region=job.region, pattern=EVENT_PATTERN, since=since)
    return live_of(entries)


def live_of(entries: Iterable[LogEntry]) -> LiveState:
    """Return the state of the events among ``entries``."""
    parsed = ((entry.node, parse_event(entry.message)) for entry in entries)
    return fold_events((node, event) for node, event in parsed if event is not None)


def failed_saves(live: LiveState) -> str | None:
    """Return how many checkpoints a job could not write since the newest complete one; None if
    none.
    """
    newest = live.newest.get("checkpoint")
    since = float("-inf") if newest is None else newest.time
    failed = [
        notice.event
        for notice in live.notices
        if notice.event.get("code") == "checkpoint-failed" and notice.time > since
    ]
    if not failed:
        return None
    what = "a checkpoint" if len(failed) == 1 else f"{len(failed)} checkpoints"
    complete = "" if newest is None else f" since that of step {newest.event['step']:,}"
    return f"{what} could not be written{complete}: {failed[-1]['message']}"


def lag_of(live: LiveState, stored: int | None, every_steps: int, now: float) -> StorageLag | None:
    """Return how far storage is behind the checkpoints that the job saved; None if it is not.

    ``stored`` is the newest stored step, ``every_steps`` the run file's interval.
    """
    lag = storage_lag(saved_checkpoints(live), stored, now, every_steps)
    if lag is None:
        return None
    unstored = [
        now - heartbeat.time + float(seconds)
        for heartbeat in live.heartbeats.values()
        if (seconds := heartbeat.event.get("unstored_seconds")) is not None
    ]
    return replace(lag, seconds=max(lag.seconds, *unstored, 0.0))


@dataclass(frozen=True)
class ShownSpeed:
    """Steps per second of a job, without its first interval."""

    job: RunJob
    steps_per_second: float


def shown_speed(
    jobs: Sequence[RunJob], progress: Progress, read: Callable[[RunJob], LiveState]
) -> ShownSpeed | None:
    """Return the newest speed that the jobs of a stage have shown; None if none has.

    ``progress`` is that of the newest of ``jobs``, and ``read`` reads the events of an earlier one:
    a job that has just started has shown none.
    """
    if not jobs:
        return None
    if progress.measured_speed:
        return ShownSpeed(jobs[-1], progress.measured_speed)
    for job in reversed(jobs[:-1][-_EARLIER_JOBS:]):
        if speed := progress_of(read(job)).measured_speed:
            return ShownSpeed(job, speed)
    return None


_EARLIER_JOBS = 2
"""How many are read at most: jobs that fail early show no speed."""


def progress_of(live: LiveState) -> Progress:
    """Summarize the job's state."""
    step = speed = loss = ended = step_event = None
    if "step" in live.newest:
        event = step_event = live.newest["step"].event
        step, loss, speed = int(event["step"]), event["loss"], mean_speed([event])
    elif live.heartbeats:
        # A hanging job may have logged no step within the window, but its heartbeats continue.
        step = max(int(heartbeat.event["step"]) for heartbeat in live.heartbeats.values())
    if "end" in live.newest:
        event = live.newest["end"].event
        ended, step = str(event["reason"]), max(step or 0, int(event["step"]))
    return Progress(
        step,
        None if speed is None else speed.steps_per_second,
        None if speed is None else speed.data_wait_share,
        loss,
        live.last_activity,
        ended,
        step_event is not None and step_event.get("timed_seconds") == 0,
    )
