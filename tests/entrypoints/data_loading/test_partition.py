"""Partitioning: each sample once an epoch, under any topology and any number of changes of it."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sm_train.entrypoints.base.rng import Ints, random_below, seeded_permutation
from sm_train.entrypoints.data_loading.batch_schedule import BatchSchedule, StreamSchedule
from sm_train.entrypoints.data_loading.partition import (
    REPLICATED,
    UNASSIGNED,
    DataTopology,
    RankPartition,
)
from sm_train.entrypoints.data_loading.sample_ranges import (
    SampleRanges,
    SampleShapes,
    merge,
    split_shards,
)
from sm_train.entrypoints.data_loading.sampler import (
    DataPosition,
    Epoch,
    EpochSegment,
    SamplerState,
    epoch_size,
    uninterrupted_epoch_size,
)

MAX_SHARDS, MAX_SAMPLES = 12, 30

Sample = tuple[int, int]
"""Shard and sample number."""


@st.composite
def topologies(draw: st.DrawFn, num_shards: int, unassigned: bool = False) -> DataTopology:
    num_nodes = draw(st.integers(1, 4))
    owners = [REPLICATED, *range(num_nodes)] + [UNASSIGNED] * unassigned
    owner = draw(st.lists(st.sampled_from(owners), min_size=num_shards, max_size=num_shards))
    return DataTopology(
        np.array(owner, np.int16),
        num_nodes,
        local_world_size=draw(st.integers(1, 4)),
        batch_size=draw(st.integers(1, 5)),
        shuffle_block_size=draw(st.integers(1, 20)),
        shapes=tuple((8, 8 + side) for side in range(draw(st.sampled_from([0, 0, 1, 3])))),
    )


@st.composite
def global_topologies(
    draw: st.DrawFn, num_shards: int, streams: int, block: int, unassigned: bool = False
) -> DataTopology:
    """A topology whose global batch has ``streams`` samples, on any number of ranks."""
    world_size = draw(st.sampled_from([n for n in range(1, streams + 1) if streams % n == 0]))
    num_nodes = draw(st.sampled_from([n for n in range(1, world_size + 1) if world_size % n == 0]))
    count = streams // world_size
    owners = [REPLICATED] + [UNASSIGNED] * unassigned
    owner = draw(st.lists(st.sampled_from(owners), min_size=num_shards, max_size=num_shards))
    return DataTopology(
        np.array(owner, np.int16),
        num_nodes,
        local_world_size=world_size // num_nodes,
        batch_size=draw(st.sampled_from([n for n in range(1, count + 1) if count % n == 0])),
        shuffle_block_size=count * block * draw(st.integers(1, 3)),
        streams=streams,
        stream_block=block,
    )


def batch_shapes(topology: DataTopology, shards: Ints) -> SampleShapes | None:
    """Give each sample a shape that depends on the sample alone; some shapes are rare."""
    if not topology.shapes:
        return None
    first = np.full(MAX_SHARDS, -1)
    first[shards] = np.arange(len(shards)) * MAX_SAMPLES
    values = (shards[:, None] * 7 + np.arange(MAX_SAMPLES) ** 2) % 6
    numbers = np.minimum(values, len(topology.shapes) - 1).astype(np.int16)
    return SampleShapes(first, numbers.ravel(), len(topology.shapes))


@st.composite
def epochs(draw: st.DrawFn) -> Epoch:
    samples = st.integers(0, MAX_SAMPLES)
    shard_sizes = draw(st.lists(samples, min_size=1, max_size=MAX_SHARDS))
    return Epoch(
        np.array(shard_sizes, np.int64),
        range_size=draw(st.integers(1, 9)),
        seed=draw(st.integers(0, 2**31)),
        number=draw(st.integers(0, 3)),
    )


def all_samples(epoch: Epoch) -> Counter[Sample]:
    return Counter(
        (shard, sample) for shard, size in enumerate(epoch.shard_sizes) for sample in range(size)
    )


def schedules(epoch: Epoch, segments: list[EpochSegment]) -> list[BatchSchedule | StreamSchedule]:
    """Return the schedules of all ranks in the last segment."""
    *finished, current = segments
    topology = current.topology
    ranges = epoch.remaining(finished, batch_shapes)
    if topology.streams:
        return list(epoch.stream_schedules(ranges, topology, len(finished)))
    partitions = [
        epoch.node_partition(ranges, topology, len(finished), node_rank).rank_partition(
            local_rank, topology
        )
        for node_rank in range(topology.num_nodes)
        for local_rank in range(topology.local_world_size)
    ]
    return [
        BatchSchedule(
            partition,
            topology.batch_size,
            batch_shapes(topology, np.arange(len(epoch.shard_sizes))),
        )
        for partition in partitions
    ]


def samples_read(epoch: Epoch, segments: list[EpochSegment]) -> Counter[Sample]:
    """Return what all ranks read in the last segment, without padding."""
    counts: Counter[Sample] = Counter()
    for schedule in schedules(epoch, segments):
        for step in range(min(segments[-1].steps, schedule.num_steps)):
            indices = schedule.indices(step)
            assert len(indices) == schedule.batch_size
            new = schedule.partition.locate(indices[: schedule.num_new(step)])
            counts.update(zip(*map(np.ndarray.tolist, new), strict=True))
    return counts


def global_batches(epoch: Epoch, topology: DataTopology) -> list[Counter[Sample]]:
    """Return the samples of each optimizer step, with repeated ones, over all ranks."""
    ranges = epoch.remaining([])
    accumulation = topology.streams // (topology.world_size * topology.batch_size)
    steps = epoch_size(ranges, topology).steps
    batches = [Counter[Sample]() for _ in range(steps // accumulation)]
    for schedule in epoch.stream_schedules(ranges, topology, 0):
        assert schedule.num_steps == steps
        for step in range(steps):
            located = schedule.partition.locate(schedule.indices(step))
            batches[step // accumulation].update(zip(*map(np.ndarray.tolist, located), strict=True))
    return batches


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(st.data())
def test_global_batch_is_the_same_for_any_number_of_ranks(data: st.DataObject) -> None:
    epoch = data.draw(epochs())
    streams, block = data.draw(st.integers(1, 24)), data.draw(st.integers(1, 6))
    both = global_topologies(len(epoch.shard_sizes), streams, block)
    first, second = data.draw(both), data.draw(both)
    assert global_batches(epoch, first) == global_batches(epoch, second)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_epoch_continues_in_the_same_order_on_another_number_of_ranks(
    data: st.DataObject,
) -> None:
    epoch = data.draw(epochs())
    streams, block = data.draw(st.integers(1, 24)), data.draw(st.integers(1, 6))
    both = global_topologies(len(epoch.shard_sizes), streams, block)
    first, second = data.draw(both), data.draw(both)
    done = data.draw(st.integers(0, len(global_batches(epoch, first))))

    def state(topology: DataTopology) -> SamplerState:
        steps = done * streams // (topology.world_size * topology.batch_size)
        position = DataPosition(epoch.number, steps)
        return SamplerState("digest", epoch.seed, epoch.range_size, position, topology)

    saved = SamplerState.from_bytes(state(first).to_bytes())
    resumed, warning = saved.resume("digest", epoch.seed, epoch.range_size, second)
    assert warning is None
    assert not resumed.finished_segments
    assert resumed.position == state(second).position


@pytest.mark.slow
@given(st.data())
def test_bad_sample_has_the_same_replacement_on_any_rank(data: st.DataObject) -> None:
    epoch = Epoch(np.array([30, 7, 13]), range_size=4, seed=1, number=0)
    both = global_topologies(3, 12, 3)
    attempt = data.draw(st.integers(0, 40))

    def replacements(topology: DataTopology) -> dict[tuple[int, Sample], Sample]:
        found = {}
        for schedule in epoch.stream_schedules(epoch.remaining([]), topology, 0):
            partition = schedule.partition
            for index in range(partition.num_samples):
                shard, sample = partition.locate(np.array([index]))
                key = index // partition.count, (int(shard[0]), int(sample[0]))
                found[key] = partition.replacement(index, attempt)
        return found

    assert replacements(data.draw(both)) == replacements(data.draw(both))


@pytest.mark.integration
@settings(max_examples=150, deadline=None)
@given(st.data())
def test_every_sample_is_read_once_under_changing_topologies(data: st.DataObject) -> None:
    epoch = data.draw(epochs())
    num_shards = len(epoch.shard_sizes)
    segments: list[EpochSegment] = []
    counts: Counter[Sample] = Counter()

    def any_topology(*, unassigned: bool) -> st.SearchStrategy[DataTopology]:
        streams, block = data.draw(st.integers(1, 24)), data.draw(st.integers(1, 6))
        return topologies(num_shards, unassigned) | global_topologies(
            num_shards, streams, block, unassigned
        )

    for _ in range(data.draw(st.integers(0, 3))):
        topology = data.draw(any_topology(unassigned=True))
        segments.append(EpochSegment(topology, data.draw(st.integers(0, 12))))
        counts += samples_read(epoch, segments)
    last = data.draw(any_topology(unassigned=False))
    left = epoch.remaining(segments, batch_shapes)
    segments.append(EpochSegment(last, epoch_size(left, last).steps))
    counts += samples_read(epoch, segments)
    assert counts == all_samples(epoch)
    assert epoch.remaining(segments, batch_shapes).num_samples == 0


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_read_and_remaining_samples_are_the_whole_epoch(data: st.DataObject) -> None:
    epoch = data.draw(epochs())
    topology = data.draw(topologies(len(epoch.shard_sizes), unassigned=True))
    segment = EpochSegment(topology, data.draw(st.integers(0, 30)))
    left = epoch.remaining([segment], batch_shapes)
    remaining: Counter[Sample] = Counter()
    for shard, start, stop in zip(left.shard, left.start, left.stop, strict=True):
        remaining.update((int(shard), sample) for sample in range(start, stop))
    assert samples_read(epoch, [segment]) + remaining == all_samples(epoch)


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_epoch_size_counts_repeated_and_unseen_samples(data: st.DataObject) -> None:
    epoch = data.draw(epochs())
    topology = data.draw(topologies(len(epoch.shard_sizes), unassigned=True))
    ranges = epoch.all_ranges(np.arange(len(epoch.shard_sizes)))
    size = epoch_size(ranges, topology)
    assert size == uninterrupted_epoch_size(epoch.shard_sizes, topology)
    rank_schedules = schedules(epoch, [EpochSegment(topology, 0)])
    lengths = [schedule.partition.num_samples for schedule in rank_schedules]
    needed = max(schedule.num_steps for schedule in rank_schedules)
    assert size.samples == sum(lengths)
    assert needed <= size.steps <= needed + len(topology.shapes)
    assert size.steps == needed or len(topology.shapes) > 1
    assert size.repeated == sum(size.steps * topology.batch_size - length for length in lengths)
    assert size.unseen == int(epoch.shard_sizes[topology.owner == UNASSIGNED].sum())


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_ranks_of_a_node_share_its_samples_evenly(data: st.DataObject) -> None:
    epoch = data.draw(epochs())
    topology = data.draw(topologies(len(epoch.shard_sizes)))
    ranges = epoch.all_ranges(np.arange(len(epoch.shard_sizes)))
    for node_rank in range(topology.num_nodes):
        node = epoch.node_partition(ranges, topology, 0, node_rank)
        lengths = [
            node.rank_partition(local_rank, topology).num_samples
            for local_rank in range(topology.local_world_size)
        ]
        assert max(lengths) - min(lengths) <= 1


def test_shuffle_block_reads_few_ranges_and_shuffles_many_shards() -> None:
    """Reads are large and sequential; the order within the block is not."""
    epoch = Epoch(np.full(50, 400), range_size=40, seed=1, number=0)
    topology = DataTopology(
        np.zeros(50, np.int16), 1, local_world_size=2, batch_size=8, shuffle_block_size=800
    )
    node = epoch.node_partition(epoch.all_ranges(np.arange(50)), topology, 0, 0)
    partition = node.rank_partition(1, topology)
    shards, samples = partition.locate(partition.block_indices(3))
    assert len(partition.ranges.slice(3 * 800, 4 * 800).shard) <= 800 // 40 + 1
    assert len(set(shards.tolist())) > 10
    assert (shards[:-1] == shards[1:]).mean() < 0.2
    order = list(zip(shards.tolist(), samples.tolist(), strict=True))
    assert sorted(order) != order


def test_order_depends_on_seed_and_epoch_alone() -> None:
    topology = DataTopology(np.zeros(6, np.int16), 1, 1, 4, 16)
    first = Epoch(np.full(6, 20), range_size=5, seed=0, number=0)

    def order(epoch: Epoch) -> list[int]:
        node = epoch.node_partition(epoch.all_ranges(np.arange(6)), topology, 0, 0)
        partition = node.rank_partition(0, topology)
        shard, number = partition.locate(partition.block_indices(0))
        return (shard * 20 + number).tolist()

    assert order(first) == order(replace(first))
    assert order(first) != order(replace(first, seed=1))
    assert order(first) != order(replace(first, number=1))


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_bucketed_batch_has_one_shape_and_is_due_when_full(data: st.DataObject) -> None:
    epoch = data.draw(epochs())
    topology = replace(
        data.draw(topologies(len(epoch.shard_sizes))), shapes=((8, 8), (8, 9), (9, 8))
    )
    batch_size = topology.batch_size
    for schedule in schedules(epoch, [EpochSegment(topology, 0)]):
        assert schedule.shapes is not None
        steps = range(schedule.num_steps)
        full = [step for step in steps if schedule.num_new(step) == batch_size]
        for step in steps:
            shard, sample = schedule.partition.locate(schedule.indices(step))
            shapes = schedule.shapes.of(SampleRanges(shard, sample, sample + 1))
            assert set(shapes.tolist()) == {schedule.shape(step)}
        assert full == list(range(len(full)))
        due = [int(schedule.indices(step).max()) for step in full]
        assert due == sorted(due)
        # Never are more samples waiting than unfilled batches of all shapes can hold.
        for step, index in zip(full, due, strict=True):
            waiting = index + 1 - (step + 1) * batch_size
            assert waiting <= len(topology.shapes) * (batch_size - 1)


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_samples_that_bucketed_batches_leave_are_found_without_the_batches(
    data: st.DataObject,
) -> None:
    """Found by counting shapes; here compared with the batches themselves."""
    num_shapes = data.draw(st.integers(1, 5))
    # Long lists, of which Hypothesis draws too few; some shapes are rare.
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    shares = rng.dirichlet(np.full(num_shapes, 0.3))
    numbers = rng.choice(num_shapes, rng.integers(1, 200), p=shares).astype(np.int16)
    zero, stop = np.zeros(1, np.int64), np.array([len(numbers)])
    partition = RankPartition(
        SampleRanges(zero, zero, stop),
        data.draw(st.integers(1, 30)),
        (data.draw(st.integers(0, 99)),),
    )
    schedule = BatchSchedule(
        partition, data.draw(st.integers(1, 8)), SampleShapes(zero, numbers, num_shapes)
    )
    steps = data.draw(st.integers(0, schedule.num_steps + 1))
    is_left = np.ones(len(numbers), np.int64)
    for step in range(min(steps, schedule.num_steps)):
        is_left[partition.positions(schedule.indices(step))] = 0
    left = schedule.remaining(steps)
    found = np.zeros(len(numbers), np.int64)
    for start, stop in zip(left.start.tolist(), left.stop.tolist(), strict=True):
        found[start:stop] += 1
    assert found.tolist() == is_left.tolist()


@given(st.lists(st.integers(0, 40), min_size=1, max_size=9), st.integers(1, 11))
def test_ranges_cover_the_split_shards(shard_sizes: list[int], range_size: int) -> None:
    every_other = np.arange(0, len(shard_sizes), 2)
    ranges = split_shards(np.array(shard_sizes), range_size, every_other)
    assert ranges.num_samples == sum(shard_sizes[::2])
    assert ((ranges.stop - ranges.start) <= range_size).all()
    assert ((ranges.stop - ranges.start) > 0).all()
    merged = merge([ranges.select(np.arange(len(ranges.shard))[::-1])])
    assert np.array_equal(merged.start, ranges.start)


def test_random_orders_never_change() -> None:
    """Future versions resume the checkpoints of this one, so these values must never change."""
    assert seeded_permutation(8, 1, 2, 3).tolist() == [1, 3, 7, 5, 2, 0, 4, 6]
    assert [random_below(1000, 1, 2, number) for number in range(4)] == [900, 719, 910, 814]


@pytest.mark.parametrize("below", [1, 2, 7, 2**31])
def test_random_below_is_in_range_and_uniform(below: int) -> None:
    values = [random_below(below, 5, number) for number in range(2000)]
    assert min(values) >= 0
    assert max(values) < below
    assert abs(sum(values) / 2000 / below - 0.5 * (below - 1) / below) < 0.03
