"""One process's way through the data, from any position on, and the record that tells it.

A position is two integers, the same for all processes. The record that a checkpoint keeps adds
who reads which shard, now and before in this epoch, so that a job with other instances reads what
is left, and that alone.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from sm_train.entrypoints.common.rng import Ints, random_below
from sm_train.entrypoints.data.batch_schedule import BatchSchedule
from sm_train.entrypoints.data.epoch import (
    BatchShapes,
    Epoch,
    EpochSegment,
    EpochSize,
    epoch_size,
    single_shape,
    uninterrupted_epoch_size,
)
from sm_train.entrypoints.data.partition import (
    REPLICATED,
    DataTopology,
    RankPartition,
    padding_partition,
)
from sm_train.entrypoints.data.sample_ranges import SampleRanges

NEARBY_REPLACEMENTS = 16

_SUBSTITUTE = 4  # what a key is for, as in sharding


@dataclass(frozen=True, order=True)
class DataPosition:
    """``step`` steps were made of ``epoch`` since its start or since the world last changed."""

    epoch: int = 0
    step: int = 0


@dataclass(frozen=True, eq=False)
class SamplerState:
    """Where a run is in its data; :attr:`before` are the segments of this epoch that are over.

    ``digest`` names the data set, ``chunk`` is samples.
    """

    digest: str
    seed: int
    chunk: int
    position: DataPosition
    world: DataTopology
    before: tuple[EpochSegment, ...] = ()

    def to_bytes(self) -> bytes:
        """The record as a file of a checkpoint (NumPy's npz)."""
        segments = [*self.before, EpochSegment(self.world, self.position.step)]
        numbers = {
            "digest": self.digest,
            "seed": self.seed,
            "chunk": self.chunk,
            "epoch": self.position.epoch,
            "segments": [
                {
                    "instances": segment.world.instances,
                    "processes": segment.world.processes,
                    "batch": segment.world.batch,
                    "window": segment.world.window,
                    "shapes": segment.world.shapes,
                    "steps": segment.steps,
                }
                for segment in segments
            ],
        }
        content = io.BytesIO()
        np.savez_compressed(
            content,
            owners=np.stack([segment.world.owner for segment in segments]),
            numbers=np.frombuffer(json.dumps(numbers).encode(), np.uint8),
        )
        return content.getvalue()

    @classmethod
    def from_bytes(cls, content: bytes) -> SamplerState:
        with np.load(io.BytesIO(content), allow_pickle=False) as arrays:
            numbers: dict[str, Any] = json.loads(arrays["numbers"].tobytes())
            owners = arrays["owners"]
        segments = []
        for owner, one in zip(owners, numbers["segments"], strict=True):
            steps, shapes = one.pop("steps"), tuple(map(tuple, one.pop("shapes")))
            segments.append(EpochSegment(DataTopology(owner=owner, shapes=shapes, **one), steps))
        *before, now = segments
        return cls(
            digest=numbers["digest"],
            seed=numbers["seed"],
            chunk=numbers["chunk"],
            position=DataPosition(numbers["epoch"], now.steps),
            world=now.world,
            before=tuple(before),
        )

    def go_on(
        self, digest: str, seed: int, chunk: int, world: DataTopology
    ) -> tuple[SamplerState, str | None]:
        """The record to start from in ``world``, and what a person should know of it."""
        epoch = self.position.epoch
        if (digest, seed) != (self.digest, self.seed):
            record = SamplerState(digest, seed, chunk, DataPosition(epoch), world)
            return record, f"the shards or the seed changed: epoch {epoch} begins anew"
        if world.same_as(self.world):
            return self, None
        before = (*self.before, EpochSegment(self.world, self.position.step))
        record = SamplerState(digest, seed, self.chunk, DataPosition(epoch), world, before)
        old, new = self.world, world
        return record, (
            f"{old.instances} instances × {old.processes} processes × {old.batch} became "
            f"{new.instances} × {new.processes} × {new.batch}, or see other shards: what is left "
            f"of epoch {epoch} is dealt out anew"
        )


@dataclass(frozen=True, eq=False)
class EpochPass:
    """The batches ``first`` to ``stop`` - 1 of a schedule, within one epoch.

    Batch 0 of the schedule is step ``base`` of the epoch. ``fresh`` tells the lap in which this
    process reads its part from those that only keep up with processes that have more.
    """

    epoch: int
    schedule: BatchSchedule
    first: int
    stop: int
    base: int
    fresh: bool

    def position(self, step: int) -> DataPosition:
        """Where the run is after batch ``step`` of the schedule."""
        return DataPosition(self.epoch, self.base + step + 1)

    def repeated(self, step: int) -> int:
        """How many samples of the batch were read before."""
        return self.schedule.batch - (self.schedule.fresh(step) if self.fresh else 0)

    def substitute(self, slot: int, attempt: int) -> tuple[int, int]:
        """Shard and number of a sample for ``slot``, whose own is bad.

        From its window at first, whose samples lie near in the tar, then from the whole part.
        """
        part = self.schedule.part
        near = part.slots_of(slot // part.window)
        slots = near if attempt < NEARBY_REPLACEMENTS else np.arange(part.samples)
        chosen = slots[random_below(len(slots), *part.key, _SUBSTITUTE, slot, attempt)]
        shard, sample = part.locate(np.array([chosen]))
        return int(shard[0]), int(sample[0])


@dataclass(frozen=True, eq=False)
class Sampler:
    """The way of one process on from ``record``."""

    samples: Ints
    record: SamplerState
    instance: int
    process: int
    shapes: BatchShapes = single_shape

    def balance(self, epoch: int) -> EpochSize:
        """How an epoch, or what is left of the record's, comes out in this world."""
        if self._is_rest(epoch):
            return epoch_size(self._rest, self.record.world)
        return uninterrupted_epoch_size(self.samples, self.record.world)

    def laps(self) -> Iterator[EpochPass]:
        """Everything that this process reads from the record's position on; it never ends."""
        epoch, step = self.record.position.epoch, self.record.position.step
        while True:
            yield from self._epoch(epoch, step)
            epoch, step = epoch + 1, 0

    def after(self, position: DataPosition) -> SamplerState:
        """The record at ``position``."""
        record = self.record
        before = record.before if position.epoch == record.position.epoch else ()
        return SamplerState(
            record.digest, record.seed, record.chunk, position, record.world, before
        )

    def _epoch(self, number: int, step: int) -> Iterator[EpochPass]:
        steps = self.balance(number).steps
        if step >= steps:
            return
        part, own = self._part(number)
        world = self.record.world
        schedule = BatchSchedule(part, world.batch, self.shapes(world, part))
        while step < steps:
            base = step - step % schedule.steps
            stop = min(base + schedule.steps, steps)
            yield EpochPass(number, schedule, step - base, stop - base, base, own and base == 0)
            step = stop

    def _part(self, number: int) -> tuple[RankPartition, bool]:
        """What this process reads in an epoch, and whether that is a part of its own."""
        world, epoch = self.record.world, self._numbered(number)
        rest = self._is_rest(number)
        segment = len(self.record.before) if rest else 0
        pieces = self._rest if rest else self._whole(epoch)
        part = epoch.line(pieces, world, segment, self.instance).part(self.process, world)
        if part.samples:
            return part, True
        key = (epoch.seed, number, segment, self.instance)
        return padding_partition(self._whole(epoch), world, self.process, *key), False

    def _is_rest(self, epoch: int) -> bool:
        return epoch == self.record.position.epoch and bool(self.record.before)

    def _numbered(self, number: int) -> Epoch:
        return Epoch(self.samples, self.record.chunk, self.record.seed, number)

    def _whole(self, epoch: Epoch) -> SampleRanges:
        """Every chunk that this instance may read."""
        owner = self.record.world.owner
        return epoch.whole(np.flatnonzero((owner == self.instance) | (owner == REPLICATED)))

    @cached_property
    def _rest(self) -> SampleRanges:
        return self._numbered(self.record.position.epoch).left(self.record.before, self.shapes)
