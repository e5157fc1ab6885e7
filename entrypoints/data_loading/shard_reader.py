"""Reads the raw bytes of samples from a node's shards in large requests, ahead of their use.

Neighbouring samples that are requested together are read at once, which suits FastFile. A read
that fails costs the samples that it touches and nothing else: they become :class:`BadSample`.

The schedule of a pass determines what it needs, so :class:`PrefetchBuffer` reads whole blocks in
order. Single samples are read in two cases: those of the first batches of a job, which would
otherwise wait for a whole block, and after a resume those of earlier blocks that still wait for
their batch.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from sm_train.entrypoints.base.rng import Ints
from sm_train.entrypoints.data_loading.indexed_shards import SampleOffsets
from sm_train.entrypoints.data_loading.sample_ranges import Mixture
from sm_train.entrypoints.data_loading.sampler import EpochPass

MAX_GAP = 128 * 1024
"""Bytes that are not wanted between two samples that are read at once: a request of FastFile."""

Submit = Callable[..., Future[Any]]
"""Has the signature of ``Executor.submit``."""


@dataclass(frozen=True)
class BadSample:
    """A sample that was skipped: its shard and key, a fixed ``reason`` code and the detail."""

    shard: str
    key: str
    reason: str
    detail: str


@dataclass(frozen=True)
class Removed(BadSample):
    """A sample that a user has removed: it is replaced like a bad one, and no fault."""

    reason: str = "sample-removed"
    detail: str = "it was removed from the data set"


SampleBytes = memoryview | BadSample
"""A sample's part of its tar, or why it could not be read."""


@dataclass(frozen=True, eq=False)
class _ReadRange:
    """Consecutive samples of one shard, which are read at once.

    ``starts`` and ``stops`` are their byte offsets and ``request_rows`` their rows in the
    request; all are int64 (num_samples,).
    """

    shard: int
    starts: Ints
    stops: Ints
    request_rows: Ints


@dataclass(frozen=True)
class ShardReader:
    """Reads samples of the shards of this node; ``paths`` are by shard number.

    The names of shards of a ``mixture`` include their channel.
    """

    paths: dict[int, Path]
    offsets: SampleOffsets
    mixture: Mixture | None = None

    def read(self, shard: int, sample: int) -> SampleBytes:
        """Read one sample."""
        [content] = self.read_async(np.array([shard]), np.array([sample]), run_inline)()
        return content

    def read_async(
        self, shards: Ints, samples: Ints, submit: Submit
    ) -> Callable[[], list[SampleBytes]]:
        """Start to read samples; return a call that waits and gives them in the order requested.

        ``shards`` and ``samples`` are int64 (num_samples,).
        """
        reads = [
            (read_range, submit(self._read, read_range))
            for read_range in self._read_ranges(shards, samples)
        ]

        def result() -> list[SampleBytes]:
            # What is not read was removed.
            contents: list[SampleBytes] = [
                Removed(self.shard_name(shard), "") for shard in shards.tolist()
            ]
            for read_range, read in reads:
                for row, content in zip(
                    read_range.request_rows.tolist(), read.result(), strict=True
                ):
                    contents[row] = content
            return contents

        return result

    def shard_name(self, shard: int) -> str:
        """Return a shard's file name."""
        name = self.paths[shard].name
        return name if self.mixture is None else f"{self.mixture.channel(shard)}/{name}"

    def _read_ranges(self, shards: Ints, samples: Ints) -> Iterator[_ReadRange]:
        """Group a request into ranges of consecutive samples."""
        order = np.lexsort((samples, shards))  # by shard, then by sample
        shard, sample = shards[order], samples[order]
        breaks = np.flatnonzero((np.diff(shard) != 0) | (np.diff(sample) != 1)) + 1
        for request_rows in np.split(order, breaks):
            number = int(shards[request_rows[0]])
            starts, stops = self.offsets(number)
            in_range = samples[request_rows]
            exists = starts[in_range] >= 0  # removed samples lie nowhere
            in_range, request_rows = in_range[exists], request_rows[exists]
            if not len(in_range):
                continue
            first, last = starts[in_range], stops[in_range]
            # Between selected samples there may be others, of any number of bytes.
            gaps = np.flatnonzero(first[1:] - last[:-1] > MAX_GAP) + 1
            parts = (np.split(values, gaps) for values in (first, last, request_rows))
            for begin, end, rows in zip(*parts, strict=True):
                yield _ReadRange(number, begin, end, rows)

    def _read(self, read_range: _ReadRange) -> list[SampleBytes]:
        path = self.paths[read_range.shard]
        first = int(read_range.starts[0])
        try:
            with path.open("rb", buffering=0) as file:
                content = _read_fully(file.fileno(), first, int(read_range.stops[-1]) - first)
        except OSError as error:
            if len(read_range.request_rows) == 1:
                return [self._unreadable(read_range.shard, error)]
            # A bad sector or a failed request should not lose the other samples: read one by one.
            return [self._read(single)[0] for single in _single_samples(read_range)]
        samples: list[SampleBytes] = []
        for start, stop in zip(
            (read_range.starts - first).tolist(), (read_range.stops - first).tolist(), strict=True
        ):
            if stop <= len(content):
                samples.append(content[start:stop])
            else:
                samples.append(self._cut_short(read_range.shard, first + len(content)))
        return samples

    def _unreadable(self, shard: int, error: OSError) -> BadSample:
        reason = "shard-missing" if isinstance(error, FileNotFoundError) else "read-error"
        return BadSample(self.shard_name(shard), "", reason, error.strerror or str(error))

    def _cut_short(self, shard: int, end: int) -> BadSample:
        detail = f"the shard ends at byte {end}"
        return BadSample(self.shard_name(shard), "", "tar-truncated", detail)


def run_inline(call: Callable[..., Any], *arguments: Any) -> Future[Any]:
    """Run a call at once, in the caller's thread: :data:`Submit` without an executor."""
    future: Future[Any] = Future()
    try:
        future.set_result(call(*arguments))
    except BaseException as error:
        future.set_exception(error)
    return future


def _single_samples(read_range: _ReadRange) -> Iterator[_ReadRange]:
    for number in range(len(read_range.request_rows)):
        only = slice(number, number + 1)
        yield _ReadRange(
            read_range.shard,
            read_range.starts[only],
            read_range.stops[only],
            read_range.request_rows[only],
        )


def _read_fully(descriptor: int, start: int, size: int) -> memoryview:
    """Read ``size`` bytes, or fewer if the file ends before; a single call may return less."""
    view = np.empty(size, np.uint8).data
    done = 0
    while done < size and (count := os.preadv(descriptor, [view[done:]], start + done)):
        done += count
    return view[:done]


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
