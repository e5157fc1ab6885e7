"""The exact reader: plans every epoch from the shards' sample counts and offsets.

Each sample is read once an epoch, a killed run continues with the very next sample, and, where all
nodes see all shards, any number of ranks trains on the same samples in the same order.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import numpy as np
from sm_train.entrypoints.data_loading.batches import RawBatch, RawSample
from sm_train.entrypoints.data_loading.partition import REPLICATED, UNASSIGNED, DataTopology
from sm_train.entrypoints.data_loading.sampler import (
    DataPosition,
    EpochPass,
    EpochSize,
    Sampler,
    SamplerState,
)
from sm_train.entrypoints.data_loading.shard_catalog import DataRank, ShardCatalog
from sm_train.entrypoints.data_loading.shard_reader import (
    PrefetchBuffer,
    SampleBytes,
    ShardReader,
    Submit,
)

READ_BYTES = 8 * 2**20
"""Size of a read range: that of the requests at which S3 is fastest (8-16 MB by AWS's guide,
"Performance Design Patterns for Amazon S3")."""

SHUFFLE_BLOCK_BYTES = 256 * 2**20
"""Bytes that each rank shuffles at a time; another block is read meanwhile."""

MIN_STREAM_BLOCK = 8
"""Samples that are shuffled within a stream of a global order, if the memory allows no more."""

EARLY_BATCHES = 4
"""Batches whose samples are read singly when a job starts, while the first block is read.

Reading a block of 256 MiB takes half a minute at 30 ms for each request of 128 KB.
"""


class IndexedReader:
    """Reads the samples of a catalog of shards."""

    def __init__(
        self,
        catalog: ShardCatalog,
        rank: DataRank,
        *,
        batch_size: int,
        shapes: tuple[tuple[int, int], ...],
        seed: int,
        gradient_accumulation_steps: int | None,
        state: bytes | None,
    ) -> None:
        """Plan the reading; nothing is read yet.

        ``shapes`` are those of aspect buckets, none without them. With
        ``gradient_accumulation_steps`` the order is global if all nodes see all shards. ``state``
        is what :meth:`state_at` returned.
        """
        sample_bytes = max(1.0, catalog.total_bytes / max(1, int(catalog.shard_sizes.sum())))
        topology = DataTopology(
            catalog.owner,
            rank.num_nodes,
            rank.local_world_size,
            batch_size,
            shuffle_block_size=max(1, round(SHUFFLE_BLOCK_BYTES / sample_bytes)),
            shapes=shapes,
        )
        range_size = max(1, round(READ_BYTES / sample_bytes))
        self.order_note: str | None = None
        if gradient_accumulation_steps is not None:
            self.order_note = _why_not_global(topology)
            if self.order_note is None:
                topology = _in_global_order(topology, gradient_accumulation_steps, range_size)
        self.resume_warning, self.resume_code = catalog.resume_note, "samples-removed"
        start = SamplerState(catalog.digest, seed, range_size, DataPosition(), topology)
        if state is not None:
            saved = SamplerState.from_bytes(state)
            start, warning = saved.resume(catalog.digest, seed, range_size, topology)
            if warning is not None:
                self.resume_warning, self.resume_code = warning, "data-resharded"
        self.sampler = Sampler(
            catalog.shard_sizes,
            start,
            rank.node_rank,
            rank.local_rank,
            catalog.shapes,
            catalog.mixture,
        )
        self.position = start.position
        self._shards = ShardReader(catalog.paths, catalog.offsets, catalog.mixture)

    def batches(self, read: Submit) -> Iterator[RawBatch]:
        """Yield the raw samples of each batch of all passes, from the first one.

        Once a pass has requested everything that it needs, the next pass starts to read, so that
        reading does not pause at the end of an epoch.
        """
        passes = self.sampler.passes()
        current = next(passes)
        prefetch = PrefetchBuffer(current, self._shards, read, EARLY_BATCHES)
        while True:
            following: tuple[EpochPass, PrefetchBuffer] | None = None
            for step in range(current.first, current.stop):
                contents = prefetch.take(current.schedule.indices(step))
                if following is None and prefetch.all_requested:
                    upcoming = next(passes)
                    following = upcoming, PrefetchBuffer(upcoming, self._shards, read)
                yield self._batch(current, step, contents)
            assert following is not None  # the last batch of a pass has requested everything
            current, prefetch = following

    def _batch(self, epoch_pass: EpochPass, step: int, contents: list[SampleBytes]) -> RawBatch:
        schedule = epoch_pass.schedule
        shards, samples = schedule.partition.locate(schedule.indices(step))
        located = zip(shards.tolist(), samples.tolist(), contents, strict=True)
        return RawBatch(
            epoch_pass.epoch,
            [RawSample(*location) for location in located],
            schedule.shape(step),
            epoch_pass.position(step),
            epoch_pass.num_repeated(step),
            partial(self._replacement, epoch_pass, step),
        )

    def _replacement(self, epoch_pass: EpochPass, step: int, row: int, attempt: int) -> RawSample:
        index = int(epoch_pass.schedule.indices(step)[row])
        shard, sample = epoch_pass.replacement(index, attempt)
        return RawSample(shard, sample, self._shards.read(shard, sample))

    def shard_name(self, shard: int) -> str:
        """Return a shard's file name."""
        return self._shards.shard_name(shard)

    def epoch_size(self, epoch: int) -> EpochSize:
        """Return the size of an epoch, or of its remainder after the topology changed."""
        return self.sampler.epoch_size(epoch)

    def state_at(self, position: DataPosition) -> bytes:
        """Return the run's position in its data for a checkpoint; equal on all ranks."""
        return self.sampler.state_at(position).to_bytes()


def _why_not_global(topology: DataTopology) -> str | None:
    """Return why the order depends on the number of ranks; None if it need not."""
    if topology.shapes:
        return "data.aspect_buckets groups samples by shape on each rank"
    shared = {REPLICATED, UNASSIGNED} if topology.num_nodes > 1 else {0, UNASSIGNED}
    if not shared.issuperset(np.unique(topology.owner).tolist()):
        return "each node sees a part of the shards (ShardedByS3Key); set data.sharded: false"
    return None


def _in_global_order(topology: DataTopology, accumulation: int, range_size: int) -> DataTopology:
    """Return ``topology`` with the streams of a global order.

    ``shuffle_block_size`` becomes the number of samples that a rank reads at a time; it does not
    change the order.
    """
    count = topology.batch_size * accumulation
    streams = count * topology.world_size
    memory = topology.shuffle_block_size
    # At least a few samples, so that neighbors in the tars do not follow each other in every epoch.
    block = max(memory // streams, min(MIN_STREAM_BLOCK, range_size))
    return replace(
        topology,
        # With one node, too: a job may resume on several.
        owner=np.where(topology.owner == UNASSIGNED, UNASSIGNED, REPLICATED).astype(np.int16),
        shuffle_block_size=count * block * max(1, memory // (count * block)),
        streams=streams,
        stream_block=block,
    )
