"""The raw samples that a process holds: read window by window, ahead of use.

What a lap needs is known from its schedule, so the stock reads whole windows while they are new,
and single samples where a resumed run needs some of a window that is over.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import numpy as np
from sm_train.entrypoints.common.rng import Ints
from sm_train.entrypoints.data.sampler import EpochPass
from sm_train.entrypoints.data.shard_reader import SampleBytes, ShardReader, Submit

PREFETCH_BLOCKS = 1
"""Read while another is in use."""


class PrefetchBuffer:
    """The contents of one lap's slots; reading begins at once."""

    def __init__(self, lap: EpochPass, shelf: ShardReader, read: Submit) -> None:
        self._part, self._shelf, self._read = lap.schedule.partition, shelf, read
        self._held: dict[int, SampleBytes] = {}
        self._loads: deque[tuple[Ints, Callable[[], list[SampleBytes]]]] = deque()
        # Samples in front of this that are still waiting for their batch are read when it comes.
        self._reached = self._begun = lap.schedule.high_water_mark(lap.first)
        self._end = lap.schedule.high_water_mark(lap.stop)
        self._begin()

    @property
    def all_requested(self) -> bool:
        """Whether the reading of everything that is needed has begun."""
        return self._begun >= self._end

    def take(self, slots: Ints) -> list[SampleBytes]:
        """The contents of a batch's slots."""
        furthest = int(slots.max())
        while self._reached <= furthest:
            self._load()
        missing = [slot for slot in np.unique(slots).tolist() if slot not in self._held]
        if missing:
            self._held.update(zip(missing, self._fetch(np.array(missing))(), strict=True))
        contents = [self._held[slot] for slot in slots.tolist()]
        for slot in set(slots.tolist()):
            del self._held[slot]
        return contents

    def _begin(self) -> None:
        while len(self._loads) < PREFETCH_BLOCKS and not self.all_requested:
            slots = self._part.block_indices(self._begun // self._part.shuffle_block_size)
            slots = slots[slots >= self._begun]
            self._loads.append((slots, self._fetch(slots)))
            self._begun = int(slots[-1]) + 1

    def _load(self) -> None:
        # A sample that goes on waiting would keep all that was read with it in memory.
        for slot, content in self._held.items():
            if isinstance(content, memoryview):
                self._held[slot] = memoryview(bytes(content))
        slots, contents = self._loads.popleft()
        self._begin()
        self._held.update(zip(slots.tolist(), contents(), strict=True))
        self._reached = int(slots[-1]) + 1

    def _fetch(self, slots: Ints) -> Callable[[], list[SampleBytes]]:
        return self._shelf.read_async(*self._part.locate(slots), self._read)
