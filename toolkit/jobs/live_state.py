"""What a job's event lines come to: in whatever order they are heard, however often.

Pure functions. A :class:`LiveState` keeps the newest value of each kind; merging two states gives
the state that has seen the events of both.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from sm_train.toolkit.jobs.events import Event

_STEPS, _NOTICES = 720, 200
"""Step events (an hour of them at one every five seconds), warnings and errors that are kept."""

_SIGNS = ("start", "step", "checkpoint", "eval", "end", "epoch")

STRAGGLES = 1.1
"""A rank whose median step takes so many times the median of all is told of."""


@dataclass(frozen=True, order=True)
class LoggedEvent:
    """An event, who said it and when (Unix seconds, by the machine's clock)."""

    time: float
    host: str
    text: str
    """The event again: what makes two of the same time different, and one said twice the same."""
    event: Event = field(compare=False)


@dataclass(frozen=True)
class LiveState:
    """Of one job. ``beats`` and ``figures`` are each host's newest ``heartbeat`` and ``node``
    events, ``newest`` those of every other kind; ``sign`` is when a process last took a step,
    saved, evaluated or started.
    """

    steps: tuple[LoggedEvent, ...] = ()
    notices: tuple[LoggedEvent, ...] = ()
    beats: Mapping[str, LoggedEvent] = field(default_factory=dict)
    figures: Mapping[str, LoggedEvent] = field(default_factory=dict)
    newest: Mapping[str, LoggedEvent] = field(default_factory=dict)
    sign: float | None = None


def fold_events(lines: Iterable[tuple[str, Event]]) -> LiveState:
    """The state that the events, each with its host, come to."""
    steps, notices = set[LoggedEvent](), set[LoggedEvent]()
    beats, figures, newest = (
        dict[str, LoggedEvent](),
        dict[str, LoggedEvent](),
        dict[str, LoggedEvent](),
    )
    sign: float | None = None
    for host, event in lines:
        if not isinstance(event.get("time"), (int, float)):
            continue
        said = LoggedEvent(float(event["time"]), host, json.dumps(event, sort_keys=True), event)
        kind, moment = event["kind"], said.time
        if kind == "heartbeat":
            beats[host] = max(beats.get(host, said), said)
            if event["seconds_since_step"] is None:
                continue
            # A heartbeat goes on while training hangs: what counts is the step it tells of.
            moment -= float(event["seconds_since_step"])
        elif kind == "node":
            figures[host] = max(figures.get(host, said), said)
        elif kind in ("warning", "error"):
            notices.add(said)
        else:
            newest[kind] = max(newest.get(kind, said), said)
        if kind == "step":
            steps.add(said)
        if kind in _SIGNS or kind == "heartbeat":
            sign = max(moment, sign if sign is not None else moment)
    return LiveState(
        tuple(sorted(steps)[-_STEPS:]),
        tuple(sorted(notices)[-_NOTICES:]),
        beats,
        figures,
        newest,
        sign,
    )


def merge(one: LiveState, other: LiveState) -> LiveState:
    """What had heard all that either has."""
    signs = [live.sign for live in (one, other) if live.sign is not None]
    return LiveState(
        tuple(sorted({*one.steps, *other.steps})[-_STEPS:]),
        tuple(sorted({*one.notices, *other.notices})[-_NOTICES:]),
        _later(one.beats, other.beats),
        _later(one.figures, other.figures),
        _later(one.newest, other.newest),
        max(signs, default=None),
    )


def _later(
    one: Mapping[str, LoggedEvent], other: Mapping[str, LoggedEvent]
) -> dict[str, LoggedEvent]:
    return {
        key: max(found[key] for found in (one, other) if key in found) for key in {**one, **other}
    }


# ------------------------------------------------------------------ what is shown of it


@dataclass(frozen=True)
class NodeState:
    """A machine as it was last heard of; None is unknown. Shares are of 1, utilization of 100."""

    host: str
    heartbeat_age: float | None
    step: int | None
    gpu_utilization: float | None
    gpu_utilization_min: float | None
    gpu_memory_bytes: float | None
    gpu_temperature: float | None
    data_wait_share: float | None
    straggler_ratio: float | None
    receive: float | None
    send: float | None


@dataclass(frozen=True)
class Straggler:
    """``ratio``: its median step over the median of all ranks'."""

    rank: int
    host: str
    step_seconds: float
    ratio: float


@dataclass(frozen=True)
class Notice:
    """Warnings or errors of one code and host: the newest, and how many there were."""

    time: float
    level: str
    host: str
    code: str
    message: str
    count: int


def node_states(
    live: LiveState, hosts: Iterable[str], now: float, gpus: Mapping[str, float]
) -> list[NodeState]:
    """Every host that should be there or was heard, by number; ``gpus`` is the GPUs' utilization
    by CloudWatch, for those that do not say their own.
    """
    every = {*hosts, *live.beats, *live.figures}
    return [_node_state(live, host, now, gpus) for host in sorted(every, key=_number)]


def _node_state(live: LiveState, host: str, now: float, gpus: Mapping[str, float]) -> NodeState:
    beat = live.beats.get(host)
    figures: Event = live.figures[host].event if host in live.figures else {}
    utilization = figures.get("gpu_utilization_mean")
    efa = figures.get("efa_receive_bytes_per_second"), figures.get("efa_send_bytes_per_second")
    network = "network_receive_bytes_per_second", "network_send_bytes_per_second"
    return NodeState(
        host,
        None if beat is None else max(0.0, now - beat.time),
        None if beat is None else beat.event["step"],
        gpus.get(host) if utilization is None else utilization,
        figures.get("gpu_utilization_min"),
        figures.get("gpu_memory_used_max"),
        figures.get("gpu_temperature_max"),
        figures.get("data_wait_share_max"),
        figures.get("straggler_ratio"),
        _sum(efa[0], figures.get(network[0])),
        _sum(efa[1], figures.get(network[1])),
    )


def _sum(*values: float | None) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def _number(host: str) -> tuple[int, str]:
    number = host.rpartition("-")[2]
    return (int(number) if number.isdigit() else 0, host)


def stragglers(live: LiveState) -> list[Straggler]:
    """The ranks that keep others waiting, the slowest first, by each machine's newest figures."""
    steps: dict[int, tuple[float, str]] = {
        int(one["rank"]): (float(one["p50"]), host)
        for host, said in live.figures.items()
        for one in _ranks(said.event)
        if one.get("p50") and one.get("rank") is not None
    }
    if len(steps) < 2:
        return []
    usual = median(seconds for seconds, _ in steps.values())
    found = [
        Straggler(rank, host, seconds, seconds / usual)
        for rank, (seconds, host) in steps.items()
        if seconds > STRAGGLES * usual
    ]
    return sorted(found, key=lambda one: (-one.ratio, one.rank))


def _ranks(event: Event) -> list[dict[str, Any]]:
    ranks = event.get("ranks")
    return ranks if isinstance(ranks, list) else []


def notices(live: LiveState) -> list[Notice]:
    """Warnings and errors, the newest last; what a machine says again and again is one."""
    found: dict[tuple[str, str, str], Notice] = {}
    for said in live.notices:
        level, code = said.event["kind"], str(said.event["code"])
        key = (said.host, level, code)
        count = found.pop(key).count + 1 if key in found else 1
        message = " ".join(str(said.event["message"]).split())
        found[key] = Notice(said.time, level, said.host, code, message, count)
    return list(found.values())
