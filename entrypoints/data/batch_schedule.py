"""The batches of one process's part of an epoch: which slots each takes, in which shape.

Where all images have one shape, batches are neighbouring slots. With several shapes a batch has
one of them: each slot waits until a batch of its own shape is full, and the batch comes when its
last slot does. What is left at the end of a part is filled up with samples of the same shape from
its start. Everything is computed from the part alone, so any batch can be the first.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray
from sm_train.entrypoints.common.rng import Ints
from sm_train.entrypoints.data.partition import RankPartition
from sm_train.entrypoints.data.sample_ranges import SampleRanges


@dataclass(frozen=True, eq=False)
class BatchSchedule:
    """``shapes[i]`` is the number of the shape of slot ``i``; None where all have one."""

    part: RankPartition
    batch: int
    shapes: NDArray[np.int16] | None = None

    @property
    def steps(self) -> int:
        """Batches until every sample of the part was in one."""
        if self.shapes is None:
            return -(-self.part.samples // self.batch)
        return len(self._table)

    def slots(self, step: int) -> Ints:
        """The slots of a batch; those that only fill it up were in one before, or stand twice."""
        if self.shapes is None:
            first = step * self.batch
            return np.arange(first, first + self.batch) % self.part.samples
        slots: Ints = self._table[step]
        return slots

    def fresh(self, step: int) -> int:
        """How many samples of the batch were in none before it; they come first."""
        if self.shapes is None:
            return min(self.batch, self.part.samples - step * self.batch)
        return int(self._fresh[step])

    def shape(self, step: int) -> int:
        """The number of the batch's shape."""
        return 0 if self.shapes is None else int(self.shapes[self._table[step, 0]])

    def reach(self, steps: int) -> int:
        """The slot behind the furthest one that the first ``steps`` batches take."""
        if self.shapes is None:
            return min(steps * self.batch, self.part.samples)
        return int(self._table[:steps].max(initial=-1)) + 1

    def waiting(self, step: int) -> Ints:
        """The slots that no batch before ``step`` took, in order."""
        if self.shapes is None:
            return np.arange(min(step * self.batch, self.part.samples), self.part.samples)
        left = np.ones(self.part.samples, np.bool_)
        left[self._table[:step]] = False
        return np.flatnonzero(left)

    def left(self, steps: int) -> SampleRanges:
        """The samples that are in none of the first ``steps`` batches."""
        if self.shapes is None:
            return self.part.behind(min(steps * self.batch, self.part.samples))
        return self.part.at(self.waiting(min(steps, self.steps)))

    @cached_property
    def _table(self) -> Ints:
        return self._batches[0]

    @cached_property
    def _fresh(self) -> Ints:
        return self._batches[1]

    @cached_property
    def _batches(self) -> tuple[Ints, Ints]:
        """Slots by step and place, and for each step the number of fresh ones."""
        assert self.shapes is not None
        tables, fresh, due = [], [], []
        for shape in np.unique(self.shapes):
            slots = np.flatnonzero(self.shapes == shape)
            steps = -(-len(slots) // self.batch)
            places = np.arange(steps * self.batch)
            tables.append(slots[places % len(slots)].reshape(steps, self.batch))
            fresh.append(np.minimum(self.batch, len(slots) - places[:: self.batch]))
            # A batch that is not full comes behind all that are, in the order of the shapes.
            last = tables[-1][:, -1].copy()
            last[fresh[-1] < self.batch] = len(self.shapes) + int(shape)
            due.append(last)
        if not tables:
            return np.zeros((0, self.batch), np.int64), np.zeros(0, np.int64)
        order = np.argsort(np.concatenate(due), kind="stable")
        return np.concatenate(tables)[order], np.concatenate(fresh)[order]


def longest_schedule_steps(samples: int, batch: int, shapes: int) -> int:
    """Steps within which a part of ``samples`` in at most ``shapes`` shapes is read.

    With one shape that is exact. With several it is an upper bound, reached when all but one of
    them leave a single sample over: so no process has to ask the others.
    """
    return (samples + max(1, shapes) * (batch - 1)) // batch
