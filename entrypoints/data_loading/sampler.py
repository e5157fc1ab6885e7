"""The order in which one rank reads the data, from any position, and the state that resumes it.

A position is two integers, which are equal on all ranks. The state saved in a checkpoint adds
which node owned which shard, in the current segment of the epoch and in the finished ones.
A job with another number of nodes can therefore read exactly the samples that are left.

A restarted job may have another number of nodes, or other shards on them. The steps taken until
then form an :class:`EpochSegment`; the ranges that are left after all segments are partitioned
again. That is all that has to be saved for each sample to be read once an epoch.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TypedDict

import numpy as np
from numpy.typing import NDArray
from sm_train.entrypoints.base.rng import Ints
from sm_train.entrypoints.data_loading.batch_schedule import (
    BatchSchedule,
    StreamSchedule,
    longest_schedule_steps,
)
from sm_train.entrypoints.data_loading.partition import (
    REPLICATED,
    UNASSIGNED,
    DataTopology,
    NodePartition,
    RankPartition,
    StreamPartition,
    node_partition,
    padding_partition,
    stream_partition,
)
from sm_train.entrypoints.data_loading.sample_ranges import (
    Mixture,
    SampleRanges,
    SampleShapes,
    merge,
    split_shards,
)

BatchShapes = Callable[[DataTopology, Ints], SampleShapes | None]
"""Returns the batch shapes of the samples of shards, which are given by their numbers.

None in a topology whose batches all have the same shape.
"""


def single_batch_shape(_topology: DataTopology, _shards: Ints) -> None:
    """Return :data:`BatchShapes` of a topology whose batches all have the same shape."""


@dataclass(frozen=True, eq=False)
class EpochSegment:
    """The first ``steps`` steps of an epoch, or of the rest of one, under one topology."""

    topology: DataTopology
    steps: int


@dataclass(frozen=True)
class Epoch:
    """Epoch ``number`` of a data set.

    ``shard_sizes`` are the samples of each shard, int64 (num_shards,). Shards are read in ranges
    of ``range_size`` samples. A ``mixture`` chooses the samples of each epoch.
    """

    shard_sizes: Ints
    range_size: int
    seed: int
    number: int
    mixture: Mixture | None = None

    def all_ranges(self, shards: Ints) -> SampleRanges:
        """Return the epoch's read ranges in ``shards``."""
        if self.mixture is None:
            return self.whole_ranges(shards)
        ranges = self.mixture.ranges(self.range_size, self.seed, self.number)
        return ranges.select(np.isin(ranges.shard, shards))

    def whole_ranges(self, shards: Ints) -> SampleRanges:
        """Return the read ranges of ``shards``, whichever of them the epoch has."""
        return split_shards(self.shard_sizes, self.range_size, shards)

    @property
    def _sources(self) -> Ints | None:
        """The source of each shard, int64 (num_shards,); None if there is only one."""
        return None if self.mixture is None else self.mixture.source

    def remaining(
        self, segments: Iterable[EpochSegment], shapes: BatchShapes = single_batch_shape
    ) -> SampleRanges:
        """Return the ranges that no rank has read in ``segments``."""
        ranges = self.all_ranges(np.arange(len(self.shard_sizes)))
        # Each segment partitions what the one before it left, so they are replayed in order.
        for number, segment in enumerate(segments):
            topology = segment.topology
            unread = [ranges.select(topology.owner[ranges.shard] == UNASSIGNED)]
            if topology.streams:
                unread += [
                    schedule.remaining(segment.steps)
                    for schedule in self.stream_schedules(ranges, topology, number)
                ]
                ranges = merge(unread)
                continue
            sample_shapes = shapes(topology, np.unique(ranges.shard))
            for node_rank in range(topology.num_nodes):
                node = self.node_partition(ranges, topology, number, node_rank)
                for local_rank in range(topology.local_world_size):
                    partition = node.rank_partition(local_rank, topology)
                    schedule = BatchSchedule(partition, topology.batch_size, sample_shapes)
                    unread.append(schedule.remaining(segment.steps))
            ranges = merge(unread)
        return ranges

    def stream_schedules(
        self, ranges: SampleRanges, topology: DataTopology, segment: int
    ) -> Iterator[StreamSchedule]:
        """Yield the schedules of all ranks of a topology with a global order."""
        for rank in range(topology.world_size):
            partition = self.stream_partition(ranges, topology, segment, rank)
            yield StreamSchedule(partition, topology.batch_size)

    def stream_partition(
        self, ranges: SampleRanges, topology: DataTopology, segment: int, rank: int
    ) -> StreamPartition:
        """Return what ``rank`` of all nodes reads of ``ranges`` in the global order."""
        seen = ranges.select(topology.owner[ranges.shard] != UNASSIGNED)
        key = (self.seed, self.number, segment)
        return stream_partition(seen, topology, rank, *key, sources=self._sources)

    def node_partition(
        self, ranges: SampleRanges, topology: DataTopology, segment: int, node_rank: int
    ) -> NodePartition:
        """Return the part of ``ranges`` that one node reads in the segment of this number."""
        key = (self.seed, self.number, segment)
        return node_partition(ranges, topology, node_rank, *key, sources=self._sources)


@dataclass(frozen=True)
class EpochSize:
    """The size of an epoch, or of the rest of one; equal on all ranks.

    ``samples`` are read in ``steps`` steps. Ranks with fewer samples than others pad their
    batches with samples that they have read before: ``repeated`` over all ranks. ``unseen``
    samples lie in shards that no node sees. Both are None if samples are drawn at random.
    """

    samples: int
    steps: int
    repeated: int | None
    unseen: int | None


def epoch_size(ranges: SampleRanges, topology: DataTopology) -> EpochSize:
    """Return the size of ``ranges`` under ``topology``; no communication is needed."""
    return _size(topology.owner[ranges.shard], ranges.stop - ranges.start, topology)


def uninterrupted_epoch_size(shard_sizes: Ints, topology: DataTopology) -> EpochSize:
    """Return :func:`epoch_size` of a whole epoch, from the shard sizes alone."""
    return _size(topology.owner, shard_sizes, topology)


def _size(owner: NDArray[np.int16], lengths: Ints, topology: DataTopology) -> EpochSize:
    """Return the size of parts with ``lengths`` samples and these owners, both (num_parts,)."""
    if topology.streams:
        seen = int(lengths[owner != UNASSIGNED].sum())
        read = -(-seen // topology.streams) * topology.streams
        steps = read // (topology.world_size * topology.batch_size)
        return EpochSize(seen, steps, read - seen, int(lengths.sum()) - seen)
    owned = owner >= 0
    node_samples = np.bincount(
        owner[owned], weights=lengths[owned], minlength=topology.num_nodes
    )  # (num_nodes,)
    replicated = int(lengths[owner == REPLICATED].sum())
    for node_rank in range(topology.num_nodes):
        first, stop = topology.replicated_slice(replicated, node_rank)
        node_samples[node_rank] += stop - first
    # All ranks take as many steps as the longest partition of the largest node needs.
    longest = -(-int(node_samples.max()) // topology.local_world_size)
    steps = (
        longest_schedule_steps(longest, topology.batch_size, len(topology.shapes)) if longest else 0
    )
    samples = int(node_samples.sum())
    read = steps * topology.batch_size * topology.local_world_size * topology.num_nodes
    return EpochSize(samples, steps, read - samples, int(lengths.sum()) - samples)


@dataclass(frozen=True, order=True)
class DataPosition:
    """Steps taken in ``epoch`` since the epoch started or the topology last changed."""

    epoch: int = 0
    step: int = 0


class _SegmentDocument(TypedDict):
    """One epoch segment as JSON; the shard owners are stored separately, as an array."""

    num_nodes: int
    local_world_size: int
    batch_size: int
    shuffle_block_size: int
    shapes: list[list[int]]
    streams: int
    stream_block: int
    steps: int


class _StateDocument(TypedDict):
    """The sampler state as JSON; the last segment is the current one."""

    digest: str
    seed: int
    range_size: int
    epoch: int
    segments: list[_SegmentDocument]


@dataclass(frozen=True, eq=False)
class SamplerState:
    """Position of a run in its data, equal on all ranks.

    ``digest`` identifies the data set. ``range_size`` is the maximum number of samples in a read
    range. ``finished_segments`` are the earlier segments of this epoch, in order: one for each
    change of the topology.
    """

    digest: str
    seed: int
    range_size: int
    position: DataPosition
    topology: DataTopology
    finished_segments: tuple[EpochSegment, ...] = ()

    def to_bytes(self) -> bytes:
        """Serialize the state as a checkpoint file (NumPy npz).

        The file holds ``owners``, int16 (num_segments, num_shards), and the rest as JSON.
        """
        segments = [*self.finished_segments, EpochSegment(self.topology, self.position.step)]
        document: _StateDocument = {
            "digest": self.digest,
            "seed": self.seed,
            "range_size": self.range_size,
            "epoch": self.position.epoch,
            "segments": [_segment_document(segment) for segment in segments],
        }
        content = io.BytesIO()
        np.savez_compressed(
            content,
            owners=np.stack([segment.topology.owner for segment in segments]),
            document=np.frombuffer(json.dumps(document).encode(), np.uint8),
        )
        return content.getvalue()

    @classmethod
    def from_bytes(cls, content: bytes) -> SamplerState:
        """Parse what :meth:`to_bytes` wrote."""
        with np.load(io.BytesIO(content), allow_pickle=False) as arrays:
            document: _StateDocument = json.loads(arrays["document"].tobytes())
            owners = arrays["owners"]
        *finished, current = [
            EpochSegment(
                DataTopology(
                    owner=owner,
                    num_nodes=segment["num_nodes"],
                    local_world_size=segment["local_world_size"],
                    batch_size=segment["batch_size"],
                    shuffle_block_size=segment["shuffle_block_size"],
                    shapes=tuple((height, width) for height, width in segment["shapes"]),
                    streams=segment["streams"],
                    stream_block=segment["stream_block"],
                ),
                segment["steps"],
            )
            for owner, segment in zip(owners, document["segments"], strict=True)
        ]
        return cls(
            digest=document["digest"],
            seed=document["seed"],
            range_size=document["range_size"],
            position=DataPosition(document["epoch"], current.steps),
            topology=current.topology,
            finished_segments=tuple(finished),
        )

    def resume(
        self, digest: str, seed: int, range_size: int, topology: DataTopology
    ) -> tuple[SamplerState, str | None]:
        """Return the state to resume from in ``topology``, and a warning for the user, if any.

        The read ranges of an epoch must not change within it, so ``range_size`` applies only if
        the epoch restarts.
        """
        epoch = self.position.epoch
        if (digest, seed) != (self.digest, self.seed):
            restarted = SamplerState(digest, seed, range_size, DataPosition(epoch), topology)
            return (
                restarted,
                f"the shards, their weights or the seed changed: epoch {epoch} restarts",
            )
        if topology.equals(self.topology):
            return self, None
        read = self.position.step * self.topology.world_size * self.topology.batch_size
        if topology.has_order_of(self.topology) and read % topology.streams == 0:
            # The same global batches, on another number of ranks.
            position = DataPosition(epoch, read // (topology.world_size * topology.batch_size))
            return replace(self, position=position, topology=topology), None
        finished = (*self.finished_segments, EpochSegment(self.topology, self.position.step))
        resharded = SamplerState(
            digest, seed, self.range_size, DataPosition(epoch), topology, finished
        )
        old, new = self.topology, topology
        return resharded, (
            f"the data topology changed from {old.num_nodes} nodes × {old.local_world_size} "
            f"ranks × batch {old.batch_size} to {new.num_nodes} × {new.local_world_size} × "
            f"{new.batch_size}, or the nodes see other shards: the rest of epoch {epoch} is "
            "resharded"
        )


def _segment_document(segment: EpochSegment) -> _SegmentDocument:
    topology = segment.topology
    return {
        "num_nodes": topology.num_nodes,
        "local_world_size": topology.local_world_size,
        "batch_size": topology.batch_size,
        "shuffle_block_size": topology.shuffle_block_size,
        "shapes": [list(shape) for shape in topology.shapes],
        "streams": topology.streams,
        "stream_block": topology.stream_block,
        "steps": segment.steps,
    }


@dataclass(frozen=True, eq=False)
class EpochPass:
    """Batches ``first`` to ``stop`` - 1 of a schedule, within one epoch.

    Batch 0 of the schedule is step ``base`` of the epoch. ``is_new`` is true for the first pass
    over the rank's own partition. Later passes, and those over a padding partition, only keep the
    rank in step with ranks that have more to read: all their samples count as repeated.
    """

    epoch: int
    schedule: BatchSchedule | StreamSchedule
    first: int
    stop: int
    base: int
    is_new: bool

    def position(self, step: int) -> DataPosition:
        """Return the run's position after batch ``step`` of the schedule."""
        return DataPosition(self.epoch, self.base + step + 1)

    def num_repeated(self, step: int) -> int:
        """Return how many samples of the batch were read before; they come last in it."""
        return self.schedule.batch_size - (self.schedule.num_new(step) if self.is_new else 0)

    def replacement(self, index: int, attempt: int) -> tuple[int, int]:
        """Return shard and sample to read instead of the bad sample at ``index``."""
        return self.schedule.partition.replacement(index, attempt)


@dataclass(frozen=True, eq=False)
class Sampler:
    """Yields everything that one rank reads, starting at ``state``.

    ``shard_sizes`` are the samples of each shard, int64 (num_shards,). A ``mixture`` chooses the
    samples of each epoch.
    """

    shard_sizes: Ints
    state: SamplerState
    node_rank: int
    local_rank: int
    shapes: BatchShapes = single_batch_shape
    mixture: Mixture | None = None

    def epoch_size(self, epoch: int) -> EpochSize:
        """Return the size of an epoch, or of the rest of the epoch that the state is in."""
        if self._is_resharded(epoch):
            return epoch_size(self._resharded_ranges, self.state.topology)
        if self.mixture is not None:
            return epoch_size(self._all_ranges(self._epoch(epoch)), self.state.topology)
        return uninterrupted_epoch_size(self.shard_sizes, self.state.topology)

    def passes(self) -> Iterator[EpochPass]:
        """Yield this rank's passes from the state's position on, without end."""
        epoch, step = self.state.position.epoch, self.state.position.step
        while True:
            yield from self._epoch_passes(epoch, step)
            epoch, step = epoch + 1, 0

    def batches_of(self, shards: Sequence[int], sample: int, batches: int) -> Iterator[int]:
        """Yield which of this rank's next ``batches`` batches have a sample by the order alone.

        ``shards`` are the numbers of its shard: several in a mixture, which has copies of it.
        Samples that are read instead of bad ones are not known here.
        """
        done = 0
        for epoch_pass in self.passes():
            if done >= batches:
                return
            schedule = epoch_pass.schedule
            found = [schedule.partition.indices_of(shard, sample) for shard in shards]
            for step in schedule.steps_of(np.concatenate(found)):
                number = done + step - epoch_pass.first
                if epoch_pass.first <= step < epoch_pass.stop and number < batches:
                    yield number
            done += epoch_pass.stop - epoch_pass.first

    def state_at(self, position: DataPosition) -> SamplerState:
        """Return the state to save when the run is at ``position``."""
        state = self.state
        same_epoch = position.epoch == state.position.epoch
        return SamplerState(
            state.digest,
            state.seed,
            state.range_size,
            position,
            state.topology,
            state.finished_segments if same_epoch else (),
        )

    def _epoch_passes(self, number: int, step: int) -> Iterator[EpochPass]:
        steps = self.epoch_size(number).steps
        if step >= steps:
            return
        topology = self.state.topology
        if topology.streams:
            yield EpochPass(number, self._stream_schedule(number), step, steps, 0, is_new=True)
            return
        partition, is_own = self._partition(number)
        shapes = self.shapes(topology, np.unique(partition.ranges.shard))
        schedule = BatchSchedule(partition, topology.batch_size, shapes)
        # All ranks take the same number of steps. A rank whose schedule is shorter repeats it:
        # pass k covers the steps k * num_steps to (k + 1) * num_steps - 1 of the epoch, and the
        # last pass is cut where the epoch ends.
        while step < steps:
            base = step - step % schedule.num_steps
            stop = min(base + schedule.num_steps, steps)
            yield EpochPass(number, schedule, step - base, stop - base, base, is_own and base == 0)
            step = stop

    def _stream_schedule(self, number: int) -> StreamSchedule:
        """Return what this rank reads in an epoch whose order is global."""
        topology, epoch = self.state.topology, self._epoch(number)
        segment, ranges = 0, self._all_ranges(epoch)
        if self._is_resharded(number):
            segment, ranges = len(self.state.finished_segments), self._resharded_ranges
        rank = self.node_rank * topology.local_world_size + self.local_rank
        partition = epoch.stream_partition(ranges, topology, segment, rank)
        return StreamSchedule(partition, topology.batch_size)

    def _partition(self, number: int) -> tuple[RankPartition, bool]:
        """Return what this rank reads in an epoch, and whether that is its own share of it.

        A rank without a share (a node with fewer samples than ranks) reads a shuffled copy of
        the node's samples, so that it can take part in every step.
        """
        topology, epoch = self.state.topology, self._epoch(number)
        resharded = self._is_resharded(number)
        segment = len(self.state.finished_segments) if resharded else 0
        ranges = self._resharded_ranges if resharded else epoch.all_ranges(self._node_shards)
        node = epoch.node_partition(ranges, topology, segment, self.node_rank)
        partition = node.rank_partition(self.local_rank, topology)
        if partition.num_samples:
            return partition, True
        key = (epoch.seed, number, segment, self.node_rank)
        whole = epoch.whole_ranges(self._node_shards)
        return padding_partition(whole, topology, self.local_rank, *key), False

    def _is_resharded(self, epoch: int) -> bool:
        """Return whether only a part of ``epoch`` is left, because the topology changed in it."""
        return epoch == self.state.position.epoch and bool(self.state.finished_segments)

    def _epoch(self, number: int) -> Epoch:
        state = self.state
        return Epoch(self.shard_sizes, state.range_size, state.seed, number, self.mixture)

    def _all_ranges(self, epoch: Epoch) -> SampleRanges:
        return epoch.all_ranges(np.arange(len(self.shard_sizes)))

    @cached_property
    def _node_shards(self) -> Ints:
        """The shards that this node may read, int64 (n,)."""
        owner = self.state.topology.owner
        return np.flatnonzero((owner == self.node_rank) | (owner == REPLICATED))

    @cached_property
    def _resharded_ranges(self) -> SampleRanges:
        """The ranges of the state's epoch that its finished segments leave, on all nodes."""
        epoch = self._epoch(self.state.position.epoch)
        return epoch.remaining(self.state.finished_segments, self.shapes)
