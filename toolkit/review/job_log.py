"""What a job's own lines tell, as columns: a million lines fit.

Rows are in order of time. A figure that was not told is NaN.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from sm_train.entrypoints.doctor.nccl_log import NcclLog
from sm_train.toolkit.jobs.events import Event

Column = npt.NDArray[np.float64]
Table = Mapping[str, Column]

OF_THE_JOB = frozenset({"start", "checkpoint", "eval", "end"})
"""What the job does as a whole: its first process speaks for all."""


@dataclass(frozen=True)
class WarningCount:
    """Warnings of one code: how many, and the first of them."""

    count: int
    first: tuple[Event, ...]


@dataclass(frozen=True)
class JobLog:
    """Everything that a review makes use of."""

    steps: Table
    nodes: Mapping[int, Table]
    """By the node's number."""
    ranks: Mapping[int, Table]
    """A row for each rank in each ``node`` event, by the node's number."""
    gpus: Mapping[int, Table]
    events: Mapping[str, Sequence[Event]]
    """The rare kinds: start, epoch, checkpoint, eval, doctor, error and end."""
    warnings: Mapping[str, WarningCount]
    stalls: Sequence[Event]
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
        for kind in OF_THE_JOB:
            yield from self.events[kind]
        wanted = ("time", "step", "steps_per_second", "data_wait_share")
        for row in zip(*(self.steps[name].tolist() for name in wanted), strict=True):
            yield {"kind": "step", **{n: _known(v) for n, v in zip(wanted, row, strict=True)}}


def finite(values: Column) -> Column:
    """Those that were told."""
    return values[np.isfinite(values)]


def _known(value: float) -> float | None:
    return None if value != value else value


def _any(table: Table) -> bool:
    return len(table["time"]) > 0
