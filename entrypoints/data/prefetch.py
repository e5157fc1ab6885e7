"""Holds a rank's raw samples in memory and reads shuffle blocks ahead of their use.

The schedule of a pass determines what it needs, so the buffer reads whole blocks in order. Single
samples are read in two cases: those of the first batches of a job, which would otherwise wait for a
whole block, and after a resume those of earlier blocks that still wait for their batch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import numpy as np
from sm_train.entrypoints.common.rng import Ints
from sm_train.entrypoints.data.sampler import EpochPass
from sm_train.entrypoints.data.shard_reader import SampleBytes, ShardReader, Submit

PREFETCH_BLOCKS = 1
"""Shuffle blocks that are read while another is in use."""


class PrefetchBuffer:
    """The raw samples of one pass, by their index in the rank's order; reading starts at once.

    The samples of the first ``early_batches`` are read before the first block.
    """

    def __init__(
        self,
        epoch_pass: EpochPass,
        reader: ShardReader,
        submit: Submit,
        early_batches: int = 0,
    ) -> None:
        schedule = epoch_pass.schedule
        self._partition, self._reader, self._submit = schedule.partition, reader, submit
        self._held: dict[int, SampleBytes] = {}
        self._reads: deque[tuple[Ints, Callable[[], list[SampleBytes]]]] = deque()
        # Indices below _loaded are in memory or were taken, those below _requested are being
        # read. Both start at the high-water mark of the batches before this pass: indices below
        # it that still wait for a batch are read when that batch comes.
        self._loaded = self._requested = schedule.high_water_mark(epoch_pass.first)
        self._end = schedule.high_water_mark(epoch_pass.stop)
        early_steps = range(
            epoch_pass.first, min(epoch_pass.first + early_batches, epoch_pass.stop)
        )
        self._early = deque(self._read_async(schedule.indices(step)) for step in early_steps)
        self._batches_left = epoch_pass.stop - epoch_pass.first
        # Indices that were taken before their block was loaded.
        self._taken_early: set[int] = set()
        self._request_blocks()

    @property
    def all_requested(self) -> bool:
        """Whether everything that the pass needs was requested.

        Early batches may be all that need the last blocks, which are then never requested.
        """
        return self._requested >= self._end or not self._batches_left

    def take(self, indices: Ints) -> list[SampleBytes]:
        """Return the samples at a batch's ``indices``, int64 (batch_size,), and drop them."""
        if self._early:
            self._batches_left -= 1
            self._taken_early.update(indices.tolist())
            return self._early.popleft()()
        furthest = int(indices.max())
        while self._loaded <= furthest:
            self._load_block()
        missing = [index for index in np.unique(indices).tolist() if index not in self._held]
        if missing:
            self._held.update(zip(missing, self._read_async(np.array(missing))(), strict=True))
        contents = [self._held[index] for index in indices.tolist()]
        self._batches_left -= 1
        for index in set(indices.tolist()):  # padding may repeat an index within a batch
            del self._held[index]
        return contents

    def _request_blocks(self) -> None:
        while len(self._reads) < PREFETCH_BLOCKS and not self.all_requested:
            block = self._requested // self._partition.shuffle_block_size
            indices = self._partition.block_indices(block)
            indices = indices[indices >= self._requested]
            self._reads.append((indices, self._read_async(indices)))
            self._requested = int(indices[-1]) + 1

    def _load_block(self) -> None:
        # A sample is a view of its whole read range. One that still waits for its batch is
        # copied, because it would keep megabytes of samples in memory that were already used.
        for index, content in self._held.items():
            if isinstance(content, memoryview):
                self._held[index] = memoryview(bytes(content))
        indices, contents = self._reads.popleft()
        self._request_blocks()  # the next block is read while this one is waited for and used
        self._held.update(
            (index, content)
            for index, content in zip(indices.tolist(), contents(), strict=True)
            if index not in self._taken_early
        )
        self._loaded = int(indices[-1]) + 1

    def _read_async(self, indices: Ints) -> Callable[[], list[SampleBytes]]:
        return self._reader.read_async(*self._partition.locate(indices), self._submit)
