"""What a job's own lines tell, in one pass over them and as columns: a million lines fit.

Rows are in order of time. A figure that was not told is NaN.
"""

from __future__ import annotations

import re
from array import array
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
from sm_train.entrypoints.nccl_log import NcclLog, parse_nccl_log
from sm_train.toolkit.event_log import Event, parse_event

Column = npt.NDArray[np.float64]
Table = Mapping[str, Column]

WANTED = re.compile(rb"SMT \{|NCCL version|NET/|Using network ", re.IGNORECASE)
"""The lines that :func:`listen` makes something of."""

_STEP = (
    "time", "step", "loss", "gradient_norm", "iterations_per_second", "images_per_second",
    "data_wait_share", "mfu",
)  # fmt: skip
_NODE = (
    "time", "gpu_utilization_mean", "gpu_utilization_min", "gpu_temperature_max", "gpu_clock_min",
    "gpu_ecc_uncorrected", "network_receive_bytes_per_second", "efa_receive_bytes_per_second",
    "efa_drops", "efa_retransmits", "read_bytes_per_second", "data_wait_share_max",
)  # fmt: skip
_RANK = ("rank", "p50", "data_wait_share")
_GPU = ("gpu", "sm_clock")
_NAN = float("nan")

_RARE = frozenset({"start", "epoch", "checkpoint", "eval", "doctor", "error", "end"})
_OF_ONE = frozenset({"start", "checkpoint", "eval", "end"})
"""What the job does as a whole: the first process speaks for all."""

_EXAMPLES = 20
_NCCL_LINES = 2000


@dataclass(frozen=True)
class Warned:
    """Warnings of one code: how many, and the first of them."""

    count: int
    first: tuple[Event, ...]


@dataclass(frozen=True)
class Told:
    """Everything that a review makes use of."""

    steps: Table
    nodes: Mapping[int, Table]
    """By the node's number."""
    ranks: Mapping[int, Table]
    """A row for each rank in each ``node`` event, by the node's number."""
    gpus: Mapping[int, Table]
    events: Mapping[str, Sequence[Event]]
    """The rare kinds: start, epoch, checkpoint, eval, doctor, error and end."""
    warnings: Mapping[str, Warned]
    stalls: Sequence[Event]
    resolved: Sequence[Event]
    """The ends of stalls that ended by themselves."""
    heartbeats: int
    nccl: Mapping[str | None, NcclLog]
    """What NCCL said on each node, by the name of its log."""

    @property
    def span(self) -> tuple[float, float] | None:
        """The times of the first and the last event, Unix seconds."""
        ends = [(table["time"][0], table["time"][-1]) for table in self._tables() if _any(table)]
        rare = [float(event["time"]) for events in self.events.values() for event in events]
        times = [float(one) for pair in ends for one in pair] + rare
        return (min(times), max(times)) if times else None

    def _tables(self) -> Iterator[Table]:
        yield self.steps
        yield from self.nodes.values()

    def last(self, kind: str) -> Event | None:
        """The newest event of a rare kind."""
        return self.events[kind][-1] if self.events[kind] else None

    def progress(self) -> Iterator[Event]:
        """What an account of the seconds is made from (cost.timeline), in no order."""
        for kind in _OF_ONE:
            yield from self.events[kind]
        wanted = ("time", "step", "iterations_per_second", "data_wait_share")
        for row in zip(*(self.steps[name].tolist() for name in wanted), strict=True):
            yield {"kind": "step", **{n: _known(v) for n, v in zip(wanted, row, strict=True)}}


def _known(value: float) -> float | None:
    return None if value != value else value


def _any(table: Table) -> bool:
    return len(table["time"]) > 0


class _Rows:
    """A table that grows by rows of numbers, kept one after another."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names, self._values = names, array("d")

    def add(self, rows: Iterable[Mapping[str, float | None]]) -> None:
        """What a row does not tell is NaN. One list for all: this is where the time goes."""
        names = self._names
        self._values.extend(
            [_NAN if (v := row.get(name)) is None else v for row in rows for name in names]
        )

    def table(self) -> Table:
        """In order of time, where there is one; rows of one time stay in theirs."""
        values = np.frombuffer(self._values).reshape(-1, len(self._names))
        if "time" in self._names:
            order = np.argsort(values[:, self._names.index("time")], kind="stable")
            values = values[order]
        return {name: values[:, place] for place, name in enumerate(self._names)}


@dataclass
class _Listener:
    steps: _Rows = field(default_factory=lambda: _Rows(_STEP))
    nodes: dict[int, _Rows] = field(default_factory=lambda: defaultdict(lambda: _Rows(_NODE)))
    ranks: dict[int, _Rows] = field(default_factory=lambda: defaultdict(lambda: _Rows(_RANK)))
    gpus: dict[int, _Rows] = field(default_factory=lambda: defaultdict(lambda: _Rows(_GPU)))
    events: dict[str, list[Event]] = field(default_factory=lambda: {kind: [] for kind in _RARE})
    warned: Counter[str] = field(default_factory=Counter)
    examples: dict[str, list[Event]] = field(default_factory=lambda: defaultdict(list))
    stalls: list[Event] = field(default_factory=list)
    resolved: list[Event] = field(default_factory=list)
    heartbeats: int = 0

    def hear(self, event: Event) -> None:
        kind = event["kind"]
        if kind == "step":
            self.steps.add((event,))
        elif kind == "heartbeat":
            self.heartbeats += 1
        elif kind == "node":
            self._node(event)
        elif kind == "warning":
            self._warning(event)
        elif kind in _RARE and (event["rank"] == 0 or kind not in _OF_ONE):
            self.events[kind].append(event)

    def _node(self, event: Event) -> None:
        node = int(event["node"])
        self.nodes[node].add((event,))
        self.ranks[node].add(event["ranks"])
        self.gpus[node].add(event["gpus"])

    def _warning(self, event: Event) -> None:
        code = str(event["code"])
        self.warned[code] += 1
        if len(self.examples[code]) < _EXAMPLES:
            self.examples[code].append(event)
        if code == "stall":
            self.stalls.append(event)
        elif code == "stall-resolved":
            self.resolved.append(event)

    def told(self, nccl: Mapping[str | None, Sequence[str]]) -> Told:
        def tables(growing: Mapping[int, _Rows]) -> dict[int, Table]:
            return {node: growing[node].table() for node in sorted(growing)}

        def by_time(events: Iterable[Event]) -> list[Event]:
            return sorted(events, key=lambda event: float(event["time"]))

        return Told(
            steps=self.steps.table(),
            nodes=tables(self.nodes),
            ranks=tables(self.ranks),
            gpus=tables(self.gpus),
            events={kind: by_time(events) for kind, events in self.events.items()},
            warnings={
                code: Warned(count, tuple(by_time(self.examples[code])))
                for code, count in self.warned.most_common()
            },
            stalls=by_time(self.stalls),
            resolved=by_time(self.resolved),
            heartbeats=self.heartbeats,
            nccl={node: parse_nccl_log(lines) for node, lines in nccl.items()},
        )


def listen(lines: Iterable[tuple[str | None, str]]) -> Told:
    """Read (name of the node's log, line) in any order; what is no event and not NCCL's is left."""
    listener = _Listener()
    nccl: dict[str | None, list[str]] = defaultdict(list)
    for node, line in lines:
        event = parse_event(line)
        if event is not None:
            listener.hear(event)
        elif len(nccl[node]) < _NCCL_LINES and "SMT {" not in line:
            nccl[node].append(line)
    return listener.told({node: said for node, said in nccl.items() if said})
