"""The parsed log of a job as columns, so that a million lines fit in memory.

Rows are ordered by time. A value that was not logged is NaN.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from sm_train.entrypoints.distributed.nccl_log import NcclLog
from sm_train.toolkit.records.job_logs import Event

Column = npt.NDArray[np.floating[Any]]
"""float64, or float32 in tables without times (num_rows,)"""
Table = Mapping[str, Column]

JOB_LEVEL_KINDS = frozenset({"start", "checkpoint", "eval", "end"})
"""Events that concern the whole job: only those of rank 0 count."""


@dataclass(frozen=True)
class WarningCount:
    """The number of warnings with one code, and the first of them."""

    count: int
    first: tuple[Event, ...]


@dataclass(frozen=True)
class JobLog:
    """Everything that a review uses of a job's log."""

    steps: Table
    nodes: Mapping[int, Table]
    """Node rank → its measurements."""
    ranks: Mapping[int, Table]
    """One row per rank and ``node`` event, by node rank."""
    gpus: Mapping[int, Table]
    """One row per GPU and ``node`` event, by node rank."""
    stragglers: Table
    """One row per named straggler and ``node`` event; ``rank`` is NaN for a whole node."""
    comparisons: int
    """The number of ``node`` events in which the ranks' busy times were compared."""
    events: Mapping[str, Sequence[Event]]
    """The rare kinds: start, epoch, checkpoint, eval, doctor, error and end."""
    warnings: Mapping[str, WarningCount]
    stalls: Sequence[Event]
    nccl: Mapping[str | None, NcclLog]
    """NCCL's messages on each node, by the name of the node's log."""

    @property
    def span(self) -> tuple[float, float] | None:
        """The times of the first and the last event, in Unix seconds."""
        ends = [
            (float(table["time"][0]), float(table["time"][-1]))
            for table in (self.steps, *self.nodes.values())
            if len(table["time"])
        ]
        rare = [float(event["time"]) for events in self.events.values() for event in events]
        times = [time for pair in ends for time in pair] + rare
        return (min(times), max(times)) if times else None

    def last(self, kind: str) -> Event | None:
        """Return the latest event of a rare kind."""
        return self.events[kind][-1] if self.events[kind] else None

    def progress(self) -> Iterator[Event]:
        """Yield the events from which cost.timeline is computed, in no particular order."""
        for kind in JOB_LEVEL_KINDS:
            yield from self.events[kind]
        names = (
            "time",
            "step",
            "steps_per_second",
            "data_wait_share",
            "timed_steps",
            "timed_seconds",
            "waited_seconds",
        )
        for row in zip(*(self.steps[name].tolist() for name in names), strict=True):
            yield {"kind": "step", **{n: _none_if_nan(v) for n, v in zip(names, row, strict=True)}}


def finite(values: Column) -> Column:
    """Return the values that are neither NaN nor infinite."""
    return values[np.isfinite(values)]


def _none_if_nan(value: float) -> float | None:
    return None if value != value else value
