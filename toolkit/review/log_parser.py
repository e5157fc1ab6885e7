"""Reads a job's lines into what a review makes use of, in one pass over them."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from operator import attrgetter
from typing import Any

import msgspec
import numpy as np
from sm_train.entrypoints.common.events import FIELDS, PREFIX
from sm_train.entrypoints.doctor.nccl_log import parse_nccl_log
from sm_train.toolkit.jobs.events import UNREADABLE, Event, parse_event
from sm_train.toolkit.review.job_log import OF_THE_JOB, Column, JobLog, Table, WarningCount

_STEP = (
    "time",
    "step",
    "loss",
    "gradient_norm",
    "steps_per_second",
    "images_per_second",
    "data_wait_share",
    "mfu",
)
_NODE = (
    "time",
    "gpu_utilization_mean",
    "gpu_utilization_min",
    "gpu_temperature_max",
    "gpu_clock_min",
    "gpu_ecc_uncorrected",
    "network_receive_bytes_per_second",
    "efa_receive_bytes_per_second",
    "efa_drops",
    "efa_retransmits",
    "read_bytes_per_second",
    "data_wait_share_max",
)
_RANK = ("rank", "p50", "data_wait_share")
_GPU = ("gpu", "sm_clock")

_RARE = frozenset({"start", "epoch", "checkpoint", "eval", "doctor", "error", "end"})

_EXAMPLES = 20
_NCCL = b"NCCL"
"""Every line of NCCL's, and of a plugin's, which speaks through it, has this in its prefix."""
_OF_THE_NETWORK = re.compile(rb"NCCL version|NET/|Using network ", re.IGNORECASE)
_NCCL_LINES = 2000
_EVENT = f"{PREFIX}{{".encode()
_BLOCK = 1 << 10
"""So many values are kept as objects before they become an array."""


# ------------------------------------------------------------------ the frequent kinds
#
# Only what a review uses of a line becomes objects: half the time of the whole line as a
# dictionary. Whatever else the contract asks of it has to be there, and is not looked at.

_Figure = float | None
_Rank = msgspec.defstruct("_Rank", [(name, _Figure, None) for name in _RANK], gc=False)
_Gpu = msgspec.defstruct("_Gpu", [(name, _Figure, None) for name in _GPU], gc=False)


def _line(kind: str, figures: Sequence[str], **others: Any) -> type[msgspec.Struct]:
    """Of one kind: ``figures`` first, then ``others`` by name and type."""
    wanted = dict.fromkeys(figures, _Figure) | others
    unused = dict.fromkeys(sorted(FIELDS[kind] - wanted.keys()), Any)
    fields = list((wanted | unused).items())
    return msgspec.defstruct(kind, fields, tag_field="kind", tag=kind, gc=False)


_Step = _line("step", _STEP)
_Node = _line("node", _NODE, node=int, ranks=list[_Rank], gpus=list[_Gpu])  # type: ignore[valid-type]
_Heartbeat = msgspec.defstruct("heartbeat", [], tag_field="kind", tag="heartbeat")
_FREQUENT = msgspec.json.Decoder[Any](_Step | _Node | _Heartbeat)


class _Rows:
    """A table that grows by rows of numbers, kept one after another."""

    def __init__(self, names: Sequence[str], row: Callable[[Any], tuple[Any, ...]]) -> None:
        """``row`` takes the values of ``names`` from what is added."""
        self._names, self._row = names, row
        self._waiting: list[float | None] = []
        self._blocks: list[Column] = []

    def add(self, said: Iterable[Any]) -> None:
        waiting, row = self._waiting, self._row
        for one in said:
            waiting.extend(row(one))
        if len(waiting) >= _BLOCK:
            self._pack()

    def _pack(self) -> None:
        # numpy makes NaN of None.
        self._blocks.append(np.fromiter(self._waiting, np.float64, len(self._waiting)))
        self._waiting.clear()

    def table(self) -> Table:
        """All rows, once: by time, where there is one; those of one time stay in their order."""
        self._pack()
        values = np.concatenate(self._blocks).reshape(-1, len(self._names))
        self._blocks.clear()
        if "time" in self._names:
            order = np.argsort(values[:, self._names.index("time")], kind="stable")
            values = values[order]
        return {name: values[:, place] for place, name in enumerate(self._names)}


_steps = partial(_Rows, _STEP, attrgetter(*_STEP))
_nodes = partial(_Rows, _NODE, attrgetter(*_NODE))
_ranks = partial(_Rows, _RANK, msgspec.structs.astuple)
_gpus = partial(_Rows, _GPU, msgspec.structs.astuple)


@dataclass
class _LogParser:
    steps: _Rows = field(default_factory=_steps)
    nodes: dict[int, _Rows] = field(default_factory=lambda: defaultdict(_nodes))
    ranks: dict[int, _Rows] = field(default_factory=lambda: defaultdict(_ranks))
    gpus: dict[int, _Rows] = field(default_factory=lambda: defaultdict(_gpus))
    events: dict[str, list[Event]] = field(default_factory=lambda: {kind: [] for kind in _RARE})
    warned: Counter[str] = field(default_factory=Counter)
    examples: dict[str, list[Event]] = field(default_factory=lambda: defaultdict(list))
    stalls: list[Event] = field(default_factory=list)
    nccl: dict[str | None, list[str]] = field(default_factory=lambda: defaultdict(list))

    def hear(self, text: memoryview) -> None:
        """Make something of an event's JSON, if it is a whole one."""
        try:
            said = _FREQUENT.decode(text)
        except UNREADABLE:
            self._rare(parse_event(PREFIX + str(text, "utf-8", "replace")))
            return
        if isinstance(said, _Step):
            self.steps.add((said,))
        elif isinstance(said, _Node):
            self._node(said)

    def _node(self, said: Any) -> None:
        self.nodes[said.node].add((said,))
        self.ranks[said.node].add(said.ranks)
        self.gpus[said.node].add(said.gpus)

    def _rare(self, event: Event | None) -> None:
        if event is None:
            return
        kind = event["kind"]
        if kind == "warning":
            self._warning(event)
        elif kind in _RARE and (event["rank"] == 0 or kind not in OF_THE_JOB):
            self.events[kind].append(event)

    def _warning(self, event: Event) -> None:
        code = str(event["code"])
        self.warned[code] += 1
        if len(self.examples[code]) < _EXAMPLES:
            self.examples[code].append(event)
        if code == "stall":
            self.stalls.append(event)

    def overhear(self, node: str | None, lines: bytes) -> None:
        """Keep the first lines that NCCL says of the network."""
        said = (
            line.decode("utf-8", "replace")
            for line in lines.split(b"\n")
            if _NCCL in line and _OF_THE_NETWORK.search(line)
        )
        self.nccl[node] += islice(said, _NCCL_LINES - len(self.nccl[node]))

    def told(self) -> JobLog:
        def tables(growing: Mapping[int, _Rows]) -> dict[int, Table]:
            return {node: growing[node].table() for node in sorted(growing)}

        def by_time(events: Iterable[Event]) -> list[Event]:
            return sorted(events, key=lambda event: float(event["time"]))

        return JobLog(
            steps=self.steps.table(),
            nodes=tables(self.nodes),
            ranks=tables(self.ranks),
            gpus=tables(self.gpus),
            events={kind: by_time(events) for kind, events in self.events.items()},
            warnings={
                code: WarningCount(count, tuple(by_time(self.examples[code])))
                for code, count in self.warned.most_common()
            },
            stalls=by_time(self.stalls),
            nccl={node: parse_nccl_log(lines) for node, lines in self.nccl.items() if lines},
        )


def parse_log(blocks: Iterable[tuple[str | None, bytes]]) -> JobLog:
    """Read (name of the node's log, whole lines) in any order.

    What is no event and not NCCL's is passed over without being taken apart.
    """
    listener = _LogParser()
    for node, block in blocks:
        view, done = memoryview(block), 0
        while (start := block.find(_EVENT, done)) >= 0:
            if block.find(_NCCL, done, start) >= 0:
                listener.overhear(node, block[done : block.rfind(b"\n", done, start) + 1])
            done = block.find(b"\n", start) + 1 or len(block)
            listener.hear(view[start + len(PREFIX) : done])
        listener.overhear(node, block[done:])
    return listener.told()
