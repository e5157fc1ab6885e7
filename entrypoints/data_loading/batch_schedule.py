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
from sm_train.entrypoints.base.rng import Ints
from sm_train.entrypoints.data_loading.partition import RankPartition, StreamPartition
from sm_train.entrypoints.data_loading.sample_ranges import SampleRanges, SampleShapes, merge


@dataclass(frozen=True, eq=False)
class BatchSchedule:
    """The batches of a partition, in order.

    ``shapes`` are the batch shapes of its samples; None if all batches have the same shape.
    """

    partition: RankPartition
    batch_size: int
    shapes: SampleShapes | None = None

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

    def steps_of(self, indices: Ints) -> list[int]:
        """Return the batches that take any of ``indices``, also as padding."""
        if self.shapes is not None:
            table = np.isin(self._table, indices).any(axis=1)
            return [int(step) for step in np.flatnonzero(table)]
        # The last batch continues with the first indices of the partition.
        padded = np.concatenate([indices, indices + self.partition.num_samples])
        steps = np.unique(padded // self.batch_size)
        return [int(step) for step in steps[steps < self.num_steps]]

    def num_new(self, step: int) -> int:
        """Return how many samples of the batch no earlier one had; they come first."""
        if self.shapes is None:
            return min(self.batch_size, self.partition.num_samples - step * self.batch_size)
        return int(self._num_new[step])

    def shape(self, step: int) -> int:
        """Return the number of the batch's shape."""
        return 0 if self.shapes is None else int(self._shape_numbers[self._table[step, 0]])

    def high_water_mark(self, steps: int) -> int:
        """Return the index after the furthest one that the first ``steps`` batches take."""
        if self.shapes is None:
            return min(steps * self.batch_size, self.partition.num_samples)
        return int(self._table[:steps].max(initial=-1)) + 1

    def remaining(self, steps: int) -> SampleRanges:
        """Return the samples that are in none of the first ``steps`` batches."""
        if self.shapes is None:
            read = min(steps * self.batch_size, self.partition.num_samples)
            return self.partition.remaining_from(read)
        return _unread_with_shapes(self.partition, self.batch_size, self.shapes, steps)

    @cached_property
    def _shape_numbers(self) -> NDArray[np.int16]:
        """The number of the shape for each index, int16 (num_samples,)."""
        assert self.shapes is not None
        numbers: NDArray[np.int16] = self.shapes.of(self.partition.ranges)[
            self.partition.all_positions()
        ]
        return numbers

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
        numbers = self._shape_numbers
        tables, num_new, due = [], [], []
        for shape in np.unique(numbers):
            # The indices of this shape, in reading order, cut into rows of batch_size. Wrapping
            # around (%) fills the last row with the shape's first samples.
            indices = np.flatnonzero(numbers == shape)
            steps = -(-len(indices) // self.batch_size)
            cells = np.arange(steps * self.batch_size)
            tables.append(indices[cells % len(indices)].reshape(steps, self.batch_size))
            num_new.append(np.minimum(self.batch_size, len(indices) - cells[:: self.batch_size]))
            # A full batch is due when the sample in its last column is read. A padded batch comes
            # after all full ones: beyond the last index, in the order of the shapes.
            last = tables[-1][:, -1].copy()
            last[num_new[-1] < self.batch_size] = len(numbers) + int(shape)
            due.append(last)
        if not tables:
            return np.zeros((0, self.batch_size), np.int64), np.zeros(0, np.int64)
        order = np.argsort(np.concatenate(due), kind="stable")
        return np.concatenate(tables)[order], np.concatenate(num_new)[order]


def _unread_with_shapes(
    partition: RankPartition, batch_size: int, shapes: SampleShapes, steps: int
) -> SampleRanges:
    """Return the samples that are in none of the first ``steps`` batches of several shapes.

    A restart in another topology computes this for every rank of the previous one, so it does not
    permute all shuffle blocks. The samples of a block are counted by shape; only the block in
    which batch ``steps - 1`` is due, and for each shape the block with the first sample that waits
    for its batch, are permuted.
    """
    samples, block_size = partition.num_samples, partition.shuffle_block_size
    # At most batch_size - 1 samples of each shape wait for their batch.
    bound = min(samples, steps * batch_size + shapes.num_shapes * (batch_size - 1))
    blocks = -(-bound // block_size)
    if not (steps and blocks):
        return partition.remaining_from(0)
    numbers = shapes.of(partition.ranges.slice(0, min(samples, blocks * block_size)))
    cells = np.arange(len(numbers)) // block_size * shapes.num_shapes + numbers
    counts = np.bincount(cells, minlength=blocks * shapes.num_shapes)
    # Row b: the samples of each shape, and the full batches, before block b.
    before = np.zeros((blocks + 1, shapes.num_shapes), np.int64)
    np.cumsum(counts.reshape(blocks, -1), axis=0, out=before[1:])
    full = (before // batch_size).sum(axis=1)
    block = int(np.searchsorted(full, steps)) - 1
    missing = steps - int(full[block])
    if block < blocks:
        order = partition.block_positions(block)
        due = _samples_until_due(numbers[order], before[block], batch_size, missing)
        order = order[:due]
        read = before[block] + np.bincount(numbers[order], minlength=shapes.num_shapes)
        waiting = read % batch_size
        rest = partition.remaining_from(block * block_size + due)
    else:
        # All full batches are read, and of those that are padded the first, in order of shapes.
        order, rest = np.zeros(0, np.int64), partition.remaining_from(samples)
        waiting = before[blocks] % batch_size
        waiting[np.flatnonzero(waiting)[:missing]] = 0
    positions = [np.zeros(0, np.int64)]
    for shape in np.flatnonzero(waiting).tolist():
        here = order[numbers[order] == shape][-int(waiting[shape]) :]
        earlier = int(waiting[shape]) - len(here)
        positions.append(here)
        if earlier:
            totals = before[: block + 1, shape]
            positions += _last_of_shape(partition, numbers, totals, shape, earlier)
    return merge([partition.ranges.take(np.sort(np.concatenate(positions))), rest])


def _samples_until_due(
    numbers: NDArray[np.int16], before: Ints, batch_size: int, batches: int
) -> int:
    """Return after how many samples of a block ``batches`` more batches are full.

    ``numbers`` are the shapes of its samples in reading order, ``before`` the samples of each shape
    in earlier blocks, int64 (num_shapes,).
    """
    completes = np.zeros(len(numbers), np.bool_)
    for shape in np.unique(numbers).tolist():
        indices = np.flatnonzero(numbers == shape)
        completes[indices] = (before[shape] + np.arange(1, len(indices) + 1)) % batch_size == 0
    return int(np.flatnonzero(completes)[batches - 1]) + 1


def _last_of_shape(
    partition: RankPartition, numbers: NDArray[np.int16], before: Ints, shape: int, count: int
) -> list[Ints]:
    """Return the positions of the last ``count`` samples of a shape in the first blocks.

    ``before`` are the samples of the shape before each of these blocks, and before the next one,
    int64 (num_blocks + 1,).
    """
    size = partition.shuffle_block_size
    # The block of the first of them is taken in part, those after it whole.
    first_block = int(np.searchsorted(before, before[-1] - count, side="right")) - 1
    order = partition.block_positions(first_block)
    in_part = order[numbers[order] == shape][int(before[-1] - count - before[first_block]) :]
    begin, stop = (first_block + 1) * size, (len(before) - 1) * size
    return [in_part, begin + np.flatnonzero(numbers[begin:stop] == shape)]


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

    def steps_of(self, indices: Ints) -> list[int]:
        """Return the batches that take any of ``indices``."""
        return [int(step) for step in np.unique(indices // self.batch_size)]

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
