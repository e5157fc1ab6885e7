"""Parses the log lines of a job into a :class:`JobLog`, in one pass."""

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
from sm_train.entrypoints.distributed.nccl_log import parse_nccl_log
from sm_train.entrypoints.job_interface.events import PREFIX
from sm_train.toolkit.analysis.review.job_log import (
    JOB_LEVEL_KINDS,
    Column,
    JobLog,
    Table,
    WarningCount,
)
from sm_train.toolkit.records.job_logs import (
    UNREADABLE,
    Event,
    GpuEntry,
    RankEntry,
    StragglerEntry,
    field_types,
    optional_types,
    parse_event,
)

_STEP_FIELDS = (
    "time",
    "step",
    "loss",
    "learning_rate",
    "gradient_norm",
    "steps_per_second",
    "images_per_second",
    "data_wait_share",
    "mfu",
    "timed_steps",
    "timed_seconds",
    "waited_seconds",
)
_NODE_FIELDS = (
    "time",
    "gpu_utilization_mean",
    "gpu_utilization_min",
    "gpu_temperature_max",
    "gpu_clock_min",
    "gpu_ecc_uncorrected",
    "gpu_memory_used_max",
    "gpu_power_mean",
    "network_receive_bytes_per_second",
    "network_send_bytes_per_second",
    "efa_receive_bytes_per_second",
    "efa_drops",
    "efa_retransmits",
    "read_bytes_per_second",
    "data_wait_share_max",
)

_RARE_KINDS = frozenset({"start", "epoch", "checkpoint", "eval", "doctor", "error", "end"})

_EXAMPLES_PER_WARNING = 20
_NCCL = b"NCCL"
"""The prefix of every line of NCCL and of its plugins contains it."""
# "NCCL version 2.21.5+cuda12.4", "NET/OFI Selected provider is efa", "[send] via NET/Libfabric/0",
# "Using network Socket"
_NCCL_NETWORK = re.compile(rb"NCCL version|NET/|Using network ", re.IGNORECASE)
_MAX_NCCL_LINES = 2000
_EVENT = f"{PREFIX}{{".encode()
_PENDING_VALUES = 1 << 10
"""Values that a table keeps as Python objects before it converts them to an array."""


# ------------------------------------------------------------------ the frequent kinds
#
# Step and node events make up nearly the whole log. msgspec decodes them into structs, in half the
# time of a dictionary of the whole line.


def _event_struct(kind: str, values: Sequence[str]) -> type[msgspec.Struct]:
    """Return a struct type for events of ``kind``: the required ones of ``values`` first."""
    types = field_types(kind)
    first = [name for name in values if name in types]
    fields: list[Any] = [(name, types[name]) for name in dict.fromkeys([*first, *types])]
    fields += [(name, type_, None) for name, type_ in optional_types(kind).items()]
    return msgspec.defstruct(kind, fields, tag_field="kind", tag=kind, gc=False)


_StepStruct = _event_struct("step", _STEP_FIELDS)
_NodeStruct = _event_struct("node", _NODE_FIELDS)
_HeartbeatStruct = msgspec.defstruct("heartbeat", [], tag_field="kind", tag="heartbeat")
_FREQUENT = msgspec.json.Decoder[Any](_StepStruct | _NodeStruct | _HeartbeatStruct)


class _TableBuilder:
    """Collects rows of numbers into one flat buffer and returns them as columns."""

    def __init__(self, names: Sequence[str], row: Callable[[Any], tuple[Any, ...]]) -> None:
        """Create an empty table; ``row`` maps an entry to the values of the columns ``names``."""
        self._names, self._row = names, row
        # Only times need more than seven digits, and the tables without them are the largest.
        self._type = np.float64 if "time" in names else np.float32
        self._pending: list[float | None] = []
        self._blocks: list[Column] = []

    def add(self, entries: Iterable[Any]) -> None:
        """Append one row per entry."""
        pending, row = self._pending, self._row
        for entry in entries:
            pending.extend(row(entry))
        if len(pending) >= _PENDING_VALUES:
            self._pack()

    def _pack(self) -> None:
        # numpy converts None to NaN, and what float32 cannot hold to infinity.
        with np.errstate(over="ignore"):
            self._blocks.append(np.fromiter(self._pending, self._type, len(self._pending)))
        self._pending.clear()

    def table(self) -> Table:
        """Return all rows as columns, once; they are sorted by time (stably) if there is one."""
        self._pack()
        # (num_rows, num_columns)
        values = np.concatenate(self._blocks).reshape(-1, len(self._names))
        self._blocks.clear()
        if "time" in self._names:
            order = np.argsort(values[:, self._names.index("time")], kind="stable")
            values = values[order]
        return {name: values[:, column] for column, name in enumerate(self._names)}


_step_table = partial(_TableBuilder, _STEP_FIELDS, attrgetter(*_STEP_FIELDS))
_node_table = partial(_TableBuilder, _NODE_FIELDS, attrgetter(*_NODE_FIELDS))
_rank_table = partial(_TableBuilder, RankEntry.__struct_fields__, msgspec.structs.astuple)
_straggler_table = partial(_TableBuilder, StragglerEntry.__struct_fields__, msgspec.structs.astuple)
_gpu_table = partial(_TableBuilder, GpuEntry.__struct_fields__, msgspec.structs.astuple)


@dataclass
class _LogParser:
    steps: _TableBuilder = field(default_factory=_step_table)
    nodes: dict[int, _TableBuilder] = field(default_factory=lambda: defaultdict(_node_table))
    ranks: dict[int, _TableBuilder] = field(default_factory=lambda: defaultdict(_rank_table))
    gpus: dict[int, _TableBuilder] = field(default_factory=lambda: defaultdict(_gpu_table))
    stragglers: _TableBuilder = field(default_factory=_straggler_table)
    comparisons: int = 0
    events: dict[str, list[Event]] = field(
        default_factory=lambda: {kind: [] for kind in _RARE_KINDS}
    )
    warning_counts: Counter[str] = field(default_factory=Counter)
    warning_examples: dict[str, list[Event]] = field(default_factory=lambda: defaultdict(list))
    stalls: list[Event] = field(default_factory=list)
    nccl: dict[str | None, list[str]] = field(default_factory=lambda: defaultdict(list))

    def add_event(self, text: memoryview) -> None:
        """Add an event from its JSON; invalid JSON and unknown kinds are ignored."""
        try:
            event = _FREQUENT.decode(text)
        except UNREADABLE:
            self._add_rare(parse_event(PREFIX + str(text, "utf-8", "replace")))
            return
        if isinstance(event, _StepStruct):
            self.steps.add((event,))
        elif isinstance(event, _NodeStruct):
            self._add_node(event)

    def _add_node(self, event: Any) -> None:
        self.nodes[event.node].add((event,))
        self.ranks[event.node].add(event.ranks)
        self.gpus[event.node].add(event.gpus)
        if event.stragglers is not None:
            self.comparisons += 1
            self.stragglers.add(event.stragglers)

    def _add_rare(self, event: Event | None) -> None:
        if event is None:
            return
        kind = event["kind"]
        if kind == "warning":
            self._add_warning(event)
        elif kind in _RARE_KINDS and (event["rank"] == 0 or kind not in JOB_LEVEL_KINDS):
            self.events[kind].append(event)

    def _add_warning(self, event: Event) -> None:
        code = str(event["code"])
        self.warning_counts[code] += 1
        if len(self.warning_examples[code]) < _EXAMPLES_PER_WARNING:
            self.warning_examples[code].append(event)
        if code == "stall":
            self.stalls.append(event)

    def add_nccl_lines(self, node: str | None, lines: bytes) -> None:
        """Keep the first lines in which NCCL reports its network."""
        network = (
            line.decode("utf-8", "replace")
            for line in lines.split(b"\n")
            if _NCCL in line and _NCCL_NETWORK.search(line)
        )
        self.nccl[node] += islice(network, _MAX_NCCL_LINES - len(self.nccl[node]))

    def job_log(self) -> JobLog:
        def tables(builders: Mapping[int, _TableBuilder]) -> dict[int, Table]:
            return {node: builders[node].table() for node in sorted(builders)}

        def by_time(events: Iterable[Event]) -> list[Event]:
            return sorted(events, key=lambda event: float(event["time"]))

        return JobLog(
            steps=self.steps.table(),
            nodes=tables(self.nodes),
            ranks=tables(self.ranks),
            gpus=tables(self.gpus),
            stragglers=self.stragglers.table(),
            comparisons=self.comparisons,
            events={kind: by_time(events) for kind, events in self.events.items()},
            warnings={
                code: WarningCount(count, tuple(by_time(self.warning_examples[code])))
                for code, count in self.warning_counts.most_common()
            },
            stalls=by_time(self.stalls),
            nccl={node: parse_nccl_log(lines) for node, lines in self.nccl.items() if lines},
        )


def parse_log(blocks: Iterable[tuple[str | None, bytes]]) -> JobLog:
    """Parse blocks of (name of the node's log, whole lines), given in any order.

    Lines that are neither events nor NCCL messages are skipped without splitting the block.
    """
    parser = _LogParser()
    for node, block in blocks:
        view, done = memoryview(block), 0
        while (start := block.find(_EVENT, done)) >= 0:
            # An event's line may have a prefix, so text before it ends at the previous newline.
            if block.find(_NCCL, done, start) >= 0:
                parser.add_nccl_lines(node, block[done : block.rfind(b"\n", done, start) + 1])
            done = block.find(b"\n", start) + 1 or len(block)
            parser.add_event(view[start + len(PREFIX) : done])
        parser.add_nccl_lines(node, block[done:])
    return parser.job_log()
