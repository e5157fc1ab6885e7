"""The batches of one rank's partition: which indices each one takes, in which shape.

If all images have the same shape, a batch is ``batch_size`` consecutive indices. With several
shapes a batch has one of them: a sample waits until a batch of its shape is full, and the batch is
due when its last sample is read. Batches that stay short at the end of the partition are padded
with samples of the same shape from its start. All of this is computed from the partition alone, so
reading can start at any batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray
from sm_train.entrypoints.common.rng import Ints
from sm_train.entrypoints.data.partition import RankPartition, StreamPartition
from sm_train.entrypoints.data.sample_ranges import SampleRanges


@dataclass(frozen=True, eq=False)
class BatchSchedule:
    """The batches of a partition, in order.

    ``shapes`` is the number of the batch shape for each index, int16 (num_samples,); None if all
    batches have the same shape.
    """

    partition: RankPartition
    batch_size: int
    shapes: NDArray[np.int16] | None = None

    @property
    def num_steps(self) -> int:
        """Batches needed to read every sample of the partition."""
        if self.shapes is None:
            return -(-self.partition.num_samples // self.batch_size)
        return len(self._table)

    def indices(self, step: int) -> Ints:
        """Return the indices of a batch, int64 (batch_size,).

        Padding comes last: indices of earlier batches, or repeated within this one.
        """
        if self.shapes is None:
            first = step * self.batch_size
            return np.arange(first, first + self.batch_size) % self.partition.num_samples
        indices: Ints = self._table[step]
        return indices

    def num_new(self, step: int) -> int:
        """Return how many samples of the batch no earlier one had; they come first."""
        if self.shapes is None:
            return min(self.batch_size, self.partition.num_samples - step * self.batch_size)
        return int(self._num_new[step])

    def shape(self, step: int) -> int:
        """Return the number of the batch's shape."""
        return 0 if self.shapes is None else int(self.shapes[self._table[step, 0]])

    def high_water_mark(self, steps: int) -> int:
        """Return the index after the furthest one that the first ``steps`` batches take."""
        if self.shapes is None:
            return min(steps * self.batch_size, self.partition.num_samples)
        return int(self._table[:steps].max(initial=-1)) + 1

    def pending(self, step: int) -> Ints:
        """Return the indices that no batch before ``step`` takes, ascending."""
        samples = self.partition.num_samples
        if self.shapes is None:
            return np.arange(min(step * self.batch_size, samples), samples)
        is_pending = np.ones(samples, np.bool_)
        is_pending[self._table[:step]] = False
        return np.flatnonzero(is_pending)

    def remaining(self, steps: int) -> SampleRanges:
        """Return the samples that are in none of the first ``steps`` batches."""
        if self.shapes is None:
            read = min(steps * self.batch_size, self.partition.num_samples)
            return self.partition.remaining_from(read)
        return self.partition.take(self.pending(min(steps, self.num_steps)))

    @cached_property
    def _table(self) -> Ints:
        """The indices of all batches, int64 (num_steps, batch_size)."""
        return self._table_and_num_new[0]

    @cached_property
    def _num_new(self) -> Ints:
        """The new samples of all batches, int64 (num_steps,)."""
        return self._table_and_num_new[1]

    @cached_property
    def _table_and_num_new(self) -> tuple[Ints, Ints]:
        assert self.shapes is not None
        tables, num_new, due = [], [], []
        for shape in np.unique(self.shapes):
            # The indices of this shape, in reading order, cut into rows of batch_size. Wrapping
            # around (%) fills the last row with the shape's first samples.
            indices = np.flatnonzero(self.shapes == shape)
            steps = -(-len(indices) // self.batch_size)
            cells = np.arange(steps * self.batch_size)
            tables.append(indices[cells % len(indices)].reshape(steps, self.batch_size))
            num_new.append(np.minimum(self.batch_size, len(indices) - cells[:: self.batch_size]))
            # A full batch is due when the sample in its last column is read. A padded batch comes
            # after all full ones: beyond the last index, in the order of the shapes.
            last = tables[-1][:, -1].copy()
            last[num_new[-1] < self.batch_size] = len(self.shapes) + int(shape)
            due.append(last)
        if not tables:
            return np.zeros((0, self.batch_size), np.int64), np.zeros(0, np.int64)
        order = np.argsort(np.concatenate(due), kind="stable")
        return np.concatenate(tables)[order], np.concatenate(num_new)[order]


@dataclass(frozen=True, eq=False)
class StreamSchedule:
    """The batches of a rank in a global order: the same calls as :class:`BatchSchedule`.

    All ranks have the same number of batches. All images have the same shape.
    """

    partition: StreamPartition
    batch_size: int

    @property
    def num_steps(self) -> int:
        """Batches of the rank, a whole number of optimizer steps."""
        return self.partition.num_samples // self.batch_size

    def indices(self, step: int) -> Ints:
        """Return the indices of a batch, int64 (batch_size,); repeated samples come last."""
        return np.arange(step * self.batch_size, (step + 1) * self.batch_size)

    def num_new(self, step: int) -> int:
        """Return how many samples of the batch no earlier one had; they come first."""
        return min(self.batch_size, max(0, self.partition.num_new - step * self.batch_size))

    def shape(self, step: int) -> int:
        """Return the number of the batch's shape."""
        return 0

    def high_water_mark(self, steps: int) -> int:
        """Return the index after the furthest one that the first ``steps`` batches take."""
        return min(steps * self.batch_size, self.partition.num_samples)

    def remaining(self, steps: int) -> SampleRanges:
        """Return the samples that are in none of the first ``steps`` batches."""
        return self.partition.remaining_from(self.high_water_mark(steps))


def longest_schedule_steps(samples: int, batch_size: int, num_shapes: int) -> int:
    """Return the steps in which a partition of ``samples`` in any mix of shapes is read.

    Exact for one shape. For several it is an upper bound, reached when all shapes but one leave a
    single sample for a last batch. Ranks need not communicate their shapes to agree on it.
    """
    return (samples + max(1, num_shapes) * (batch_size - 1)) // batch_size
