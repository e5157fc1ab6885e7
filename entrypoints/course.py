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
from sm_train.entrypoints.order import Ints, draw
from sm_train.entrypoints.sharding import (
    EVERYBODY,
    Balance,
    Epoch,
    Part,
    Pieces,
    Segment,
    World,
    balance,
    whole_balance,
)

_SUBSTITUTE = 4  # what a key is for, as in sharding


@dataclass(frozen=True, order=True)
class Position:
    """``step`` steps were made of ``epoch`` since its start or since the world last changed."""

    epoch: int = 0
    step: int = 0


@dataclass(frozen=True, eq=False)
class Record:
    """Where a run is in its data; :attr:`before` are the segments of this epoch that are over.

    ``digest`` names the data set, ``chunk`` is samples.
    """

    digest: str
    seed: int
    chunk: int
    position: Position
    world: World
    before: tuple[Segment, ...] = ()

    def to_bytes(self) -> bytes:
        """The record as a file of a checkpoint (NumPy's npz)."""
        segments = [*self.before, Segment(self.world, self.position.step)]
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
    def from_bytes(cls, content: bytes) -> Record:
        with np.load(io.BytesIO(content), allow_pickle=False) as arrays:
            numbers: dict[str, Any] = json.loads(arrays["numbers"].tobytes())
            owners = arrays["owners"]
        segments = []
        for owner, one in zip(owners, numbers["segments"], strict=True):
            steps = one.pop("steps")
            segments.append(Segment(World(owner=owner, **one), steps))
        *before, now = segments
        return cls(
            digest=numbers["digest"],
            seed=numbers["seed"],
            chunk=numbers["chunk"],
            position=Position(numbers["epoch"], now.steps),
            world=now.world,
            before=tuple(before),
        )

    def go_on(self, digest: str, seed: int, chunk: int, world: World) -> tuple[Record, str | None]:
        """The record to start from in ``world``, and what a person should know of it."""
        epoch = self.position.epoch
        if (digest, seed) != (self.digest, self.seed):
            record = Record(digest, seed, chunk, Position(epoch), world)
            return record, f"the shards or the seed changed: epoch {epoch} begins anew"
        if world.same_as(self.world):
            return self, None
        before = (*self.before, Segment(self.world, self.position.step))
        record = Record(digest, seed, self.chunk, Position(epoch), world, before)
        old, new = self.world, world
        return record, (
            f"{old.instances} instances × {old.processes} processes × {old.batch} became "
            f"{new.instances} × {new.processes} × {new.batch}, or see other shards: what is left "
            f"of epoch {epoch} is dealt out anew"
        )


@dataclass(frozen=True, eq=False)
class Stretch:
    """Neighbouring positions of one window, which is read at once.

    ``position`` is the first in the epoch's order; ``fresh`` tells samples of this process's part
    from those with which it fills up to the steps of others.
    """

    epoch: int
    position: int
    part: Part
    window: int
    first: int
    length: int
    fresh: bool

    @cached_property
    def _window(self) -> tuple[Ints, Ints]:
        return self.part.window_at(self.window)

    def places(self) -> tuple[Ints, Ints]:
        """Shards and samples, position by position."""
        shards, samples = self._window
        behind = self.first + self.length
        return shards[self.first : behind], samples[self.first : behind]

    def substitute(self, number: int, attempt: int) -> tuple[int, int]:
        """A sample of the window for the ``number``-th of this stretch, which is bad."""
        shards, samples = self._window
        key = (*self.part.key, _SUBSTITUTE, self.position + number, attempt)
        chosen = draw(len(shards), *key)
        return int(shards[chosen]), int(samples[chosen])


@dataclass(frozen=True, eq=False)
class Course:
    """The way of one process on from ``record``."""

    samples: Ints
    record: Record
    instance: int
    process: int

    def balance(self, epoch: int) -> Balance:
        """How an epoch, or what is left of the record's, comes out in this world."""
        if self._is_rest(epoch):
            return balance(self._rest, self.record.world)
        return whole_balance(self.samples, self.record.world)

    def stretches(self) -> Iterator[Stretch]:
        """Everything that this process reads from the record's position on; it never ends."""
        epoch, step = self.record.position.epoch, self.record.position.step
        while True:
            yield from self._epoch(epoch, step)
            epoch, step = epoch + 1, 0

    def after(self, position: Position) -> Record:
        """The record at ``position``."""
        record = self.record
        before = record.before if position.epoch == record.position.epoch else ()
        return Record(record.digest, record.seed, record.chunk, position, record.world, before)

    def _epoch(self, number: int, step: int) -> Iterator[Stretch]:
        world = self.record.world
        end = self.balance(number).steps * world.batch
        position = step * world.batch
        if position >= end:
            return
        part, filler = self._parts(number)
        while position < end:
            fresh = position < part.samples
            chosen = part if fresh else filler
            place = position if fresh else (position - part.samples) % filler.samples
            window, first = divmod(place, chosen.window)
            length = min(chosen.window - first, chosen.samples - place, end - position)
            yield Stretch(number, position, chosen, window, first, length, fresh)
            position += length

    def _parts(self, number: int) -> tuple[Part, Part]:
        """This process's part of an epoch, and what it fills up with behind its end."""
        world, epoch = self.record.world, self._numbered(number)
        segment = len(self.record.before) if self._is_rest(number) else 0
        pieces = self._rest if self._is_rest(number) else self._whole(epoch)
        part = epoch.line(pieces, world, segment, self.instance).part(self.process, world)
        if part.samples:
            return part, part
        line = epoch.line(self._whole(epoch), world, segment, self.instance)
        return part, line.filler(self.process, world)

    def _is_rest(self, epoch: int) -> bool:
        return epoch == self.record.position.epoch and bool(self.record.before)

    def _numbered(self, number: int) -> Epoch:
        return Epoch(self.samples, self.record.chunk, self.record.seed, number)

    def _whole(self, epoch: Epoch) -> Pieces:
        """Every chunk that this instance may read."""
        owner = self.record.world.owner
        return epoch.whole(np.flatnonzero((owner == self.instance) | (owner == EVERYBODY)))

    @cached_property
    def _rest(self) -> Pieces:
        return self._numbered(self.record.position.epoch).left(self.record.before)
