"""Computes in which optimizer steps a stage has read a sample, from the records of its attempts.

The exact reader's order is a function of the recorded state, so it is computed again; nothing is
read of the shards. Samples drawn at random may have been read in any step: that is an upper bound.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
from sm_train.entrypoints.data.epoch import single_batch_shape
from sm_train.entrypoints.data.mixture import Mixture
from sm_train.entrypoints.data.sampler import Sampler, SamplerState
from sm_train.entrypoints.lineage.data_record import Anchor, DataRecord, ShardTable


@dataclass(frozen=True)
class Place:
    """A sample of a channel: the name of its shard and its number there."""

    channel: str
    shard: str
    sample: int


@dataclass(frozen=True)
class SeenSteps:
    """The steps of a stage that trained on a sample, ascending.

    If they are not exact, the sample was read in some of the steps from the first to the last of
    ``steps``, or in none: ``reason`` says why they are not known. ``until`` is the last step that
    is covered, that of the newest checkpoint.
    """

    steps: tuple[int, ...]
    until: int
    reason: str | None = None

    @property
    def exact(self) -> bool:
        """Whether these are the steps, and no others."""
        return self.reason is None


@dataclass(frozen=True, eq=False)
class Attempt:
    """The record of an attempt and the shards that it names."""

    record: DataRecord
    shards: Mapping[str, ShardTable] = field(repr=False)


@dataclass(frozen=True)
class _Segment:
    """Batches ``first`` to ``stop`` - 1 of an attempt; the one before the first ended ``step``.

    Steps after ``limit`` were repeated later, from an earlier checkpoint.
    """

    first: int
    stop: int
    step: int
    limit: int


def seen_steps(
    attempts: Sequence[Attempt], place: Place, until: int, removed: str | None
) -> SeenSteps:
    """Return the steps up to ``until`` of a stage's attempts, oldest first, that read a sample.

    ``removed`` is when the sample was removed, in ISO 8601: epochs whose list was read later
    skipped it.
    """
    if any(attempt.record.accumulation is None for attempt in attempts):
        used = any(place.shard in attempt.shards[place.channel].names for attempt in attempts)
        began = removed is None or attempts[0].record.started < removed
        steps = (1, max(1, until)) if used and began else ()
        return SeenSteps(steps, until, "the steps are those of a script's own loop")
    counted: set[int] = set()
    reason = None
    for attempt, segments in zip(attempts, _segments(attempts, until), strict=True):
        if place.shard not in attempt.shards[place.channel].names:
            continue
        problem = _why_unknown(attempt)
        if problem is not None:
            reason = problem
            if removed is None or attempt.record.started < removed:
                counted |= _all_steps(segments)
            continue
        counted |= set(_exact_steps(attempt, segments, place, removed))
    if reason is not None and counted:
        return SeenSteps((min(counted), max(counted)), until, reason)
    return SeenSteps(tuple(sorted(counted)), until)


def _why_unknown(attempt: Attempt) -> str | None:
    record = attempt.record
    if record.state is None:
        return f"data.reader: {record.reader} draws samples at random"
    if SamplerState.from_bytes(record.state).topology.shapes:
        return "data.aspect_buckets orders samples by the sizes of all images"
    if any(channel.where is not None for channel in record.channels):
        return "data.where selects samples by all columns of the index"
    return None


def _segments(attempts: Sequence[Attempt], until: int) -> list[list[_Segment]]:
    """Return the parts of each attempt between its anchors."""
    # Where any later attempt or rollback begins, what was trained beyond it was dropped.
    limit, all_segments = until, []
    for attempt in reversed(attempts):
        accumulation = attempt.record.accumulation or 1
        segments: list[_Segment] = []
        last = attempt.record.anchors[-1]
        end = last.batches + max(0, limit - last.step) * accumulation
        after = Anchor(end, limit, last.epoch, "")
        for anchor, following in reversed([*pairwise([*attempt.record.anchors, after])]):
            segments.append(_Segment(anchor.batches, following.batches, anchor.step, limit))
            limit = min(limit, anchor.step)
        all_segments.append(segments[::-1])
    return all_segments[::-1]


def _all_steps(segments: Sequence[_Segment]) -> set[int]:
    """Return the first and the last step of an attempt that counts."""
    counted = [segment for segment in segments if segment.step < segment.limit]
    if not counted:
        return set()
    return {counted[0].step + 1, max(segment.limit for segment in counted)}


def _exact_steps(
    attempt: Attempt, segments: Sequence[_Segment], place: Place, removed: str | None
) -> Iterator[int]:
    record = attempt.record
    assert record.accumulation is not None
    read = _lists_read(record, place.channel)
    for batch, epoch in _batches(attempt, place, segments[-1].stop):
        segment = next(part for part in segments if part.first <= batch < part.stop)
        step = segment.step + (batch - segment.first) // record.accumulation + 1
        skipped = removed is not None and epoch in read and read[epoch] > removed
        if step <= segment.limit and not skipped:
            yield step


def _lists_read(record: DataRecord, channel: str) -> dict[int, str]:
    """Return when the list of removed samples was read for each epoch that skips any of them."""
    read: dict[int, str] = {}
    for anchor in record.anchors:
        if channel in anchor.read:
            read.setdefault(anchor.epoch, anchor.read[channel])
    return read


def _batches(attempt: Attempt, place: Place, batches: int) -> Iterator[tuple[int, int]]:
    """Yield the numbers of the batches of an attempt that have a sample, and their epochs."""
    record = attempt.record
    assert record.state is not None
    state = SamplerState.from_bytes(record.state)
    tables = [attempt.shards[channel.channel] for channel in record.channels]
    sizes = []
    for table in tables:
        assert table.sizes is not None  # the exact reader knows them
        sizes.append(table.sizes)
    number = attempt.shards[place.channel].names.index(place.shard)
    mixture, shard_sizes, numbers = None, sizes[0], [number]
    if record.channels[0].weight is not None:
        weights = tuple(channel.weight or 0.0 for channel in record.channels)
        names = tuple(channel.channel for channel in record.channels)
        mixture = Mixture(names, weights, tuple(sizes))
        source = names.index(place.channel)
        first = int(mixture.first_shards[source])
        numbers = [
            first + copy * len(sizes[source]) + number for copy in range(mixture.copies[source])
        ]
        copied = zip(sizes, mixture.copies, strict=True)
        shard_sizes = np.concatenate([np.tile(each, copies) for each, copies in copied])
    topology = state.topology
    for node_rank in range(topology.num_nodes):
        for local_rank in range(topology.local_world_size):
            sampler = Sampler(
                shard_sizes, state, node_rank, local_rank, single_batch_shape, mixture
            )
            yield from sampler.batches_of(numbers, place.sample, batches)
