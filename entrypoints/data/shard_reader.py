"""Raw samples out of an instance's shards: large reads, and every failure a reason.

Neighbouring samples that are wanted together are read at once, which is what FastFile is quick
at. Whatever cannot be read costs the samples that it touches and nothing else.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from sm_train.entrypoints.common.rng import Ints
from sm_train.entrypoints.data.shard_catalog import SampleOffsets

Submit = Callable[..., Future[Any]]
"""As ``Executor.submit``."""


@dataclass(frozen=True)
class BadSample:
    """A sample that was skipped, or a part of a shard: ``reason`` is a fixed code."""

    shard: str
    key: str
    reason: str
    detail: str


SampleBytes = memoryview | BadSample
"""A sample's part of its tar, or why it could not be read."""


@dataclass(frozen=True, eq=False)
class _ReadRange:
    """Neighbouring samples of one shard; ``slots`` are their places in what was asked for."""

    shard: int
    starts: Ints
    stops: Ints
    slots: Ints


@dataclass(frozen=True)
class ShardReader:
    """The shards of this instance by number."""

    paths: dict[int, Path]
    offsets: SampleOffsets

    def read(self, shard: int, sample: int) -> SampleBytes:
        """One sample."""
        [content] = self.read_async(np.array([shard]), np.array([sample]), _at_once)()
        return content

    def read_async(
        self, shards: Ints, samples: Ints, submit: Submit
    ) -> Callable[[], list[SampleBytes]]:
        """Begin to read samples; the result gives them in the order in which they are asked for."""
        reads = [(run, submit(self._read_run, run)) for run in self._runs(shards, samples)]

        def result() -> list[SampleBytes]:
            contents: list[SampleBytes] = [memoryview(b"")] * len(shards)
            for run, read in reads:
                for slot, content in zip(run.slots.tolist(), read.result(), strict=True):
                    contents[slot] = content
            return contents

        return result

    def _runs(self, shards: Ints, samples: Ints) -> Iterator[_ReadRange]:
        order = np.lexsort((samples, shards))
        shard, sample = shards[order], samples[order]
        breaks = np.flatnonzero((np.diff(shard) != 0) | (np.diff(sample) != 1)) + 1
        for slots in np.split(order, breaks):
            number = int(shards[slots[0]])
            starts, stops = self.offsets(number)
            wanted = samples[slots]
            yield _ReadRange(number, starts[wanted], stops[wanted], slots)

    def _read_run(self, run: _ReadRange) -> list[SampleBytes]:
        path = self.paths[run.shard]
        first = int(run.starts[0])
        try:
            with path.open("rb", buffering=0) as file:
                content = _read_fully(file.fileno(), first, int(run.stops[-1]) - first)
        except OSError as error:
            if len(run.slots) == 1:
                return [self._unreadable(run.shard, error)]
            # One bad place on a disk, or one failed request, should not cost its neighbours.
            return [self._read_run(one)[0] for one in _singly(run)]
        parts: list[SampleBytes] = []
        for start, stop in zip(
            (run.starts - first).tolist(), (run.stops - first).tolist(), strict=True
        ):
            if stop <= len(content):
                parts.append(content[start:stop])
            else:
                parts.append(self._cut_short(run.shard, first + len(content)))
        return parts

    def shard_name(self, shard: int) -> str:
        return self.paths[shard].name

    def _unreadable(self, shard: int, error: OSError) -> BadSample:
        reason = "shard-missing" if isinstance(error, FileNotFoundError) else "read-error"
        return BadSample(self.shard_name(shard), "", reason, error.strerror or str(error))

    def _cut_short(self, shard: int, end: int) -> BadSample:
        return BadSample(
            self.shard_name(shard), "", "tar-truncated", f"the shard ends at byte {end}"
        )


def _singly(run: _ReadRange) -> Iterator[_ReadRange]:
    for one in range(len(run.slots)):
        part = slice(one, one + 1)
        yield _ReadRange(run.shard, run.starts[part], run.stops[part], run.slots[part])


def _read_fully(descriptor: int, start: int, size: int) -> memoryview:
    """``size`` bytes, or fewer where the file ends."""
    view = np.empty(size, np.uint8).data
    done = 0
    while done < size and (read := os.preadv(descriptor, [view[done:]], start + done)):
        done += read
    return view[:done]


def _at_once(call: Callable[..., Any], *arguments: Any) -> Future[Any]:
    future: Future[Any] = Future()
    try:
        future.set_result(call(*arguments))
    except BaseException as error:
        future.set_exception(error)
    return future


run_inline: Submit = _at_once
"""Runs a call at once, where there are no threads to run it."""
