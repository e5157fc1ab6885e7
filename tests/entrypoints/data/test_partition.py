"""Who reads what: once an epoch, whatever the world and however often it changes."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from sm_train.entrypoints.common.rng import random_below, seeded_permutation
from sm_train.entrypoints.data.batch_schedule import BatchSchedule
from sm_train.entrypoints.data.epoch import (
    Epoch,
    EpochSegment,
    epoch_size,
    uninterrupted_epoch_size,
)
from sm_train.entrypoints.data.partition import REPLICATED, UNASSIGNED, DataTopology, RankPartition
from sm_train.entrypoints.data.sample_ranges import merge, split_shards

Sample = tuple[int, int]


@st.composite
def worlds(draw: st.DrawFn, shards: int, unseen: bool = False) -> DataTopology:
    instances = draw(st.integers(1, 4))
    owners = [REPLICATED, *range(instances)] + [UNASSIGNED] * unseen
    owner = draw(st.lists(st.sampled_from(owners), min_size=shards, max_size=shards))
    return DataTopology(
        np.array(owner, np.int16),
        instances,
        local_world_size=draw(st.integers(1, 4)),
        batch_size=draw(st.integers(1, 5)),
        shuffle_block_size=draw(st.integers(1, 20)),
        shapes=tuple((8, 8 + side) for side in range(draw(st.sampled_from([0, 0, 1, 3])))),
    )


def shapes(world: DataTopology, part: RankPartition) -> NDArray[np.int16] | None:
    """A shape for each sample, some rare; it depends on the sample alone."""
    if not world.shapes:
        return None
    shard, sample = part.locate(np.arange(part.num_samples))
    return np.minimum((shard * 7 + sample**2) % 6, len(world.shapes) - 1).astype(np.int16)


@st.composite
def epochs(draw: st.DrawFn) -> Epoch:
    samples = draw(st.lists(st.integers(0, 30), min_size=1, max_size=12))
    return Epoch(
        np.array(samples, np.int64),
        range_size=draw(st.integers(1, 9)),
        seed=draw(st.integers(0, 2**31)),
        number=draw(st.integers(0, 3)),
    )


def all_of(epoch: Epoch) -> Counter[Sample]:
    return Counter(
        (shard, sample) for shard, count in enumerate(epoch.shard_sizes) for sample in range(count)
    )


def schedules(epoch: Epoch, segments: list[EpochSegment]) -> list[BatchSchedule]:
    """Of all processes of the last segment."""
    *before, now = segments
    pieces = epoch.remaining(before, shapes)
    parts = [
        epoch.node_partition(pieces, now.topology, len(before), instance).rank_partition(
            process, now.topology
        )
        for instance in range(now.topology.num_nodes)
        for process in range(now.topology.local_world_size)
    ]
    return [
        BatchSchedule(part, now.topology.batch_size, shapes(now.topology, part)) for part in parts
    ]


def read(epoch: Epoch, segments: list[EpochSegment]) -> Counter[Sample]:
    """What all processes of the last segment read in its steps, without what fills up."""
    seen: Counter[Sample] = Counter()
    for schedule in schedules(epoch, segments):
        for step in range(min(segments[-1].steps, schedule.num_steps)):
            slots = schedule.indices(step)
            assert len(slots) == schedule.batch_size
            fresh = schedule.partition.locate(slots[: schedule.num_new(step)])
            seen.update(zip(*map(np.ndarray.tolist, fresh), strict=True))
    return seen


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_every_sample_is_read_once_however_often_the_world_changes(data: st.DataObject) -> None:
    epoch = data.draw(epochs())
    shards = len(epoch.shard_sizes)
    segments: list[EpochSegment] = []
    seen: Counter[Sample] = Counter()
    for _ in range(data.draw(st.integers(0, 3))):
        world = data.draw(worlds(shards, unseen=True))
        segments.append(EpochSegment(world, data.draw(st.integers(0, 12))))
        seen += read(epoch, segments)
    last = data.draw(worlds(shards))
    left = epoch.remaining(segments, shapes)
    segments.append(EpochSegment(last, epoch_size(left, last).steps))
    seen += read(epoch, segments)
    assert seen == all_of(epoch)
    assert epoch.remaining(segments, shapes).num_samples == 0


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_what_is_left_and_what_was_read_are_the_whole(data: st.DataObject) -> None:
    epoch = data.draw(epochs())
    world = data.draw(worlds(len(epoch.shard_sizes), unseen=True))
    segment = EpochSegment(world, data.draw(st.integers(0, 30)))
    left = epoch.remaining([segment], shapes)
    rest: Counter[Sample] = Counter()
    for shard, start, stop in zip(left.shard, left.start, left.stop, strict=True):
        rest.update((int(shard), number) for number in range(start, stop))
    assert read(epoch, [segment]) + rest == all_of(epoch)


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_the_balance_counts_what_processes_read_again(data: st.DataObject) -> None:
    epoch = data.draw(epochs())
    world = data.draw(worlds(len(epoch.shard_sizes), unseen=True))
    pieces = epoch.all_ranges(np.arange(len(epoch.shard_sizes)))
    found = epoch_size(pieces, world)
    assert found == uninterrupted_epoch_size(epoch.shard_sizes, world)
    found_schedules = schedules(epoch, [EpochSegment(world, 0)])
    lengths = [schedule.partition.num_samples for schedule in found_schedules]
    needed = max(schedule.num_steps for schedule in found_schedules)
    assert found.samples == sum(lengths)
    assert needed <= found.steps <= needed + len(world.shapes)
    assert found.steps == needed or len(world.shapes) > 1
    assert found.repeated == sum(found.steps * world.batch_size - length for length in lengths)
    assert found.unseen == int(epoch.shard_sizes[world.owner == UNASSIGNED].sum())


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_an_instances_processes_share_its_samples_evenly(data: st.DataObject) -> None:
    epoch = data.draw(epochs())
    world = data.draw(worlds(len(epoch.shard_sizes)))
    pieces = epoch.all_ranges(np.arange(len(epoch.shard_sizes)))
    for instance in range(world.num_nodes):
        line = epoch.node_partition(pieces, world, 0, instance)
        lengths = [
            line.rank_partition(process, world).num_samples
            for process in range(world.local_world_size)
        ]
        assert max(lengths) - min(lengths) <= 1


def test_a_chunk_is_read_in_one_go_and_a_window_mixes_many() -> None:
    """Few, large, sequential reads: a window's samples lie in as few runs as it has chunks."""
    epoch = Epoch(np.full(50, 400), range_size=40, seed=1, number=0)
    world = DataTopology(
        np.zeros(50, np.int16), 1, local_world_size=2, batch_size=8, shuffle_block_size=800
    )
    part = epoch.node_partition(epoch.all_ranges(np.arange(50)), world, 0, 0).rank_partition(
        1, world
    )
    shards, samples = part.locate(part.block_indices(3))
    assert len(part.ranges.slice(3 * 800, 4 * 800).shard) <= 800 // 40 + 1
    assert len(set(shards.tolist())) > 10
    assert (shards[:-1] == shards[1:]).mean() < 0.2
    assert sorted(zip(shards.tolist(), samples.tolist(), strict=True)) != list(
        zip(shards.tolist(), samples.tolist(), strict=True)
    )


def test_seed_and_epoch_change_the_order_and_nothing_else_does() -> None:
    world = DataTopology(np.zeros(6, np.int16), 1, 1, 4, 16)
    first = Epoch(np.full(6, 20), range_size=5, seed=0, number=0)

    def order(epoch: Epoch) -> list[int]:
        part = epoch.node_partition(epoch.all_ranges(np.arange(6)), world, 0, 0).rank_partition(
            0, world
        )
        shard, number = part.locate(part.block_indices(0))
        return (shard * 20 + number).tolist()

    assert order(first) == order(replace(first))
    assert order(first) != order(replace(first, seed=1))
    assert order(first) != order(replace(first, number=1))


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_a_batch_has_one_shape_and_comes_as_soon_as_it_is_full(data: st.DataObject) -> None:
    epoch = data.draw(epochs())
    world = replace(data.draw(worlds(len(epoch.shard_sizes))), shapes=((8, 8), (8, 9), (9, 8)))
    for schedule in schedules(epoch, [EpochSegment(world, 0)]):
        assert schedule.shapes is not None
        full = [
            step for step in range(schedule.num_steps) if schedule.num_new(step) == world.batch_size
        ]
        for step in range(schedule.num_steps):
            of_batch = schedule.shapes[schedule.indices(step)]
            assert set(of_batch.tolist()) == {schedule.shape(step)}
        assert full == list(range(len(full)))
        due = [int(schedule.indices(step).max()) for step in full]
        assert due == sorted(due)
        # No more slots are waiting, ever, than batches of all shapes can hold unfilled.
        for step, slot in zip(full, due, strict=True):
            waiting = schedule.pending(step + 1)
            assert (waiting <= slot).sum() <= len(world.shapes) * (world.batch_size - 1)


@given(st.lists(st.integers(0, 40), min_size=1, max_size=9), st.integers(1, 11))
def test_chunks_cover_the_shards_that_are_cut(samples: list[int], chunk: int) -> None:
    chosen = np.arange(0, len(samples), 2)
    pieces = split_shards(np.array(samples), chunk, chosen)
    assert pieces.num_samples == sum(samples[::2])
    assert ((pieces.stop - pieces.start) <= chunk).all()
    assert ((pieces.stop - pieces.start) > 0).all()
    again = merge([pieces.select(np.arange(len(pieces.shard))[::-1])])
    assert np.array_equal(again.start, pieces.start)


def test_orders_are_those_of_every_version_before() -> None:
    """A checkpoint of today is resumed by tomorrow's code: these figures may never change."""
    assert seeded_permutation(8, 1, 2, 3).tolist() == [1, 3, 7, 5, 2, 0, 4, 6]
    assert [random_below(1000, 1, 2, number) for number in range(4)] == [900, 719, 910, 814]


@pytest.mark.parametrize("below", [1, 2, 7, 2**31])
def test_draws_stay_below_and_spread(below: int) -> None:
    drawn = [random_below(below, 5, number) for number in range(2000)]
    assert min(drawn) >= 0
    assert max(drawn) < below
    assert abs(sum(drawn) / 2000 / below - 0.5 * (below - 1) / below) < 0.03
