"""Which shards there are, which of them this instance sees, and where their samples lie.

All processes of a job agree on one numbering of the shards, by name, before the first step. With
an index that takes a listing of the channel; without one, the processes of an instance walk its
shards once and say how long it took. What is kept grows with an instance's own shards only, but
for a few bytes for each shard of all.

Assignment of shards to instances (``ShardedByS3Key``) is undocumented, so nothing is assumed of
it: every instance says what it sees.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray
from sm_train.entrypoints.common.rng import Ints
from sm_train.entrypoints.data.aspect_buckets import nearest_shape
from sm_train.entrypoints.data.epoch import BatchShapes
from sm_train.entrypoints.data.partition import REPLICATED, UNASSIGNED, DataTopology, RankPartition
from sm_train.entrypoints.data.shard_format import ShardError, find_shards
from sm_train.entrypoints.data.shard_index import ShardIndex
from sm_train.entrypoints.data.tar_reader import scan_tar

AllGather = Callable[[Any], list[Any]]
"""Gathers an object of every process, in rank order, on all of them."""


class DataError(RuntimeError):
    """The shards cannot be trained on; the message is one line."""


@dataclass(frozen=True)
class DataRank:
    """This process's place: ``process`` of ``processes`` on the ``instance``-th of ``hosts``."""

    hosts: tuple[str, ...]
    node_rank: int
    local_rank: int
    local_world_size: int


class SampleOffsets(Protocol):
    """Where a shard's samples lie; crosses to the loader's process."""

    def __call__(self, shard: int) -> tuple[Ints, Ints]:
        """For each sample of the shard, its first byte and the one behind its last."""


@dataclass(frozen=True, eq=False)
class ShardCatalog:
    """All shards by number, and what is needed to read those of this instance.

    ``samples`` and ``owner`` (:mod:`~sm_train.entrypoints.data.partition`) cover all shards;
    ``bytes`` is their sum; ``paths`` has those that this instance reads. ``shapes`` tells which
    batch shape each image has; ``damage`` is what a walk of this process found: a shard's name
    and a line. ``digest`` names the data set, ``options`` are those with which it was packed.
    """

    shard_sizes: Ints
    owner: NDArray[np.int16]
    total_bytes: int
    digest: str
    paths: dict[int, Path]
    offsets: SampleOffsets
    shapes: BatchShapes
    damage: tuple[tuple[str, str], ...]
    seconds: float
    indexed: bool
    options: dict[str, Any]


def build_catalog(
    channel: Path, index: Path | None, seat: DataRank, exchange: AllGather, notes: Path
) -> ShardCatalog:
    """Agree with all processes on the shards; ``notes`` is a folder for this instance's walks.

    Raises:
        DataError: an instance sees no shard or no sample, or the index is damaged or not of these
            shards. Raised by all processes, if by one.
    """
    started = time.monotonic()
    here = find_shards(channel)
    table = _by_index(index, here, exchange) if index else _by_scanning(here, seat, exchange, notes)
    seen = _gather_seen(table, seat, exchange)
    owner = _assign_shards(seen)
    _require_samples(table, seen, owner, seat)
    mine = (owner == seat.node_rank) | (owner == REPLICATED)
    return ShardCatalog(
        shard_sizes=table.samples,
        owner=owner,
        total_bytes=table.bytes,
        digest=_digest(table),
        paths={number: here[name] for name, number in table.seen.items() if mine[number]},
        offsets=table.ranges,
        shapes=table.shapes,
        damage=table.damage,
        seconds=time.monotonic() - started,
        indexed=index is not None,
        options=table.options,
    )


Names: TypeAlias = list[str] | pa.Array
"""Arrow's own where there may be hundreds of thousands: a tenth of the memory."""


@dataclass(frozen=True, eq=False)
class _Table:
    """``seen`` are the numbers of this instance's shards by name."""

    names: Names
    samples: Ints
    bytes: int
    seen: dict[str, int]
    ranges: SampleOffsets
    shapes: BatchShapes
    options: dict[str, Any]
    damage: tuple[tuple[str, str], ...] = ()


_DIGESTED = 2**14  # names at a time


def _digest(table: _Table) -> str:
    digest = hashlib.sha256()
    for first in range(0, len(table.names), _DIGESTED):
        chunk = table.names[first : first + _DIGESTED]
        texts = chunk if isinstance(chunk, list) else chunk.to_pylist()
        digest.update("\0".join(["", *texts]).encode("utf-8", "surrogateescape"))
    digest.update(table.samples.astype("<i8").tobytes())
    return digest.hexdigest()[:16]


# ------------------------------------------------------------------ with an index


@dataclass(frozen=True)
class _IndexedOffsets:
    """Looks shards up in the index; ``rows`` are their places in it."""

    index: ShardIndex
    rows: Ints

    def __call__(self, shard: int) -> tuple[Ints, Ints]:
        offsets = self.index.offsets(int(self.rows[shard]))
        return offsets[:-1], offsets[1:]


@dataclass(frozen=True)
class _IndexedShapes:
    """Finds each image's shape by the sides that the index has of it."""

    index: ShardIndex
    rows: Ints

    def __call__(self, world: DataTopology, part: RankPartition) -> NDArray[np.int16] | None:
        """The number of the shape of each slot of ``part``.

        Raises:
            DataError: the index does not have the sides of its images.
        """
        if not world.shapes:
            return None
        runs = part.ranges
        shapes = np.zeros(part.num_samples, np.int16)
        # In the index's order, so that a group of its rows is decoded once.
        for run in np.argsort(self.rows[runs.shard], kind="stable").tolist():
            start, stop = int(runs.start[run]), int(runs.stop[run])
            widths, heights = self._sides(int(self.rows[runs.shard[run]]))
            behind = int(runs.ends[run])
            shapes[behind - (stop - start) : behind] = nearest_shape(
                world.shapes, heights[start:stop], widths[start:stop]
            )
        by_slot: NDArray[np.int16] = shapes[part.positions(np.arange(part.num_samples))]
        return by_slot

    def _sides(self, row: int) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        sides = self.index.image_sizes(row)
        if sides is None:
            raise DataError(
                f"data.aspect_buckets: the index has no image sizes of {self.index.names[row]}; "
                "run `sm-train index` again"
            )
        return sides


def _by_index(path: Path, here: dict[str, Path], exchange: AllGather) -> _Table:
    problem = None
    try:
        index = ShardIndex(path)
        names, samples = index.name_column(), index.samples
    except (OSError, ShardError) as error:
        problem = f"{error}; run `sm-train index` again, or set data.index to false"
    _stop_all(exchange, problem)
    order = pc.sort_indices(names)
    names = names.take(order)
    # As bytes, which any file name is.
    asked = pa.array([os.fsencode(name) for name in here], pa.binary())
    found = pc.index_in(asked, value_set=names.cast(pa.binary())).to_pylist()
    unknown = [name for name, number in zip(here, found, strict=True) if number is None]
    if unknown:
        problem = (
            f"{len(unknown)} shards of the train channel are not in the index, {unknown[0]} among "
            "them; run `sm-train index` again"
        )
    _stop_all(exchange, problem)
    rows = order.to_numpy().astype(np.int64)
    return _Table(
        names=names,
        samples=samples[rows],
        bytes=index.header.bytes,
        seen=dict(zip(here, found, strict=True)),
        ranges=_IndexedOffsets(index, rows),
        shapes=_IndexedShapes(index, rows),
        options=index.header.options,
    )


def _stop_all(exchange: AllGather, problem: str | None) -> None:
    """Let every process raise what one of them found."""
    for said in exchange(problem):
        if said:
            raise DataError(said)


# ------------------------------------------------------------------ without one


@dataclass(frozen=True)
class _ScannedShard:
    """One shard as a process found it: its samples' ranges are columns of that process's notes."""

    name: str
    process: int
    column: int
    samples: int
    bytes: int


@dataclass(frozen=True)
class _ScannedOffsets:
    """Reads the ranges that the instance's processes wrote down."""

    notes: Path
    places: dict[int, _ScannedShard]

    def __call__(self, shard: int) -> tuple[Ints, Ints]:
        place = self.places[shard]
        notes = np.load(_notes_file(self.notes, place.process), mmap_mode="r")
        starts, stops = notes[:, place.column : place.column + place.samples]
        return np.array(starts), np.array(stops)


def _notes_file(notes: Path, process: int) -> Path:
    return notes / f"walk-{process:03d}.npy"


def _by_scanning(here: dict[str, Path], seat: DataRank, exchange: AllGather, notes: Path) -> _Table:
    walked: list[_ScannedShard] = []
    damage: list[tuple[str, str]] = []
    ranges = [np.zeros((2, 0), np.int64)]
    column = 0
    for name in list(here)[seat.local_rank :: seat.local_world_size]:
        try:
            found = scan_tar(here[name])
        except OSError as error:
            damage.append((name, f"cannot be read: {error.strerror}"))
            walked.append(_ScannedShard(name, seat.local_rank, column, 0, 0))
            continue
        damage += [(name, line) for line in found.damage]
        samples = len(found.starts)
        walked.append(_ScannedShard(name, seat.local_rank, column, samples, found.bytes))
        ranges.append(np.stack([found.starts, found.stops]))
        column += samples
    notes.mkdir(parents=True, exist_ok=True)
    np.save(_notes_file(notes, seat.local_rank), np.concatenate(ranges, axis=1))
    everyones: list[tuple[int, list[_ScannedShard]]] = exchange((seat.node_rank, walked))
    return _merge_scans(everyones, here, seat, notes, tuple(damage))


def _merge_scans(
    everyones: Iterable[tuple[int, list[_ScannedShard]]],
    here: dict[str, Path],
    seat: DataRank,
    notes: Path,
    damage: tuple[tuple[str, str], ...],
) -> _Table:
    by_name: dict[str, _ScannedShard] = {}
    own: dict[str, _ScannedShard] = {}
    problem = None
    for instance, walked in everyones:
        for shard in walked:
            other = by_name.setdefault(shard.name, shard)
            if (other.samples, other.bytes) != (shard.samples, shard.bytes):
                problem = f"{shard.name} is not the same on all instances"
            if instance == seat.node_rank:
                own[shard.name] = shard
    if problem:  # all processes have heard the same, so all stop
        raise DataError(problem)
    names = sorted(by_name)
    numbers = {name: number for number, name in enumerate(names)}
    seen = {name: numbers[name] for name in here}
    return _Table(
        names=names,
        samples=np.array([by_name[name].samples for name in names], np.int64),
        bytes=sum(shard.bytes for shard in by_name.values()),
        seen=seen,
        ranges=_ScannedOffsets(notes, {number: own[name] for name, number in seen.items()}),
        shapes=_no_shapes,
        options={},
        damage=damage,
    )


def _no_shapes(world: DataTopology, _part: RankPartition) -> None:
    if world.shapes:
        raise DataError(
            "data.aspect_buckets: needs the sides of all images; run `sm-train index` and set "
            "data.index"
        )


# ------------------------------------------------------------------ who sees what


def _gather_seen(table: _Table, seat: DataRank, exchange: AllGather) -> NDArray[np.bool_]:
    """Instance × shard: whether it is seen; the first process of each instance speaks for it."""
    mask = np.zeros(len(table.samples), np.bool_)
    mask[list(table.seen.values())] = True
    said = np.packbits(mask) if seat.local_rank == 0 else None
    everyones: list[Any] = exchange((seat.node_rank, said, len(mask)))
    if len({shards for *_, shards in everyones}) > 1:
        raise DataError("the instances have different indexes; start the job again")
    seen = np.zeros((len(seat.hosts), len(mask)), np.bool_)
    for instance, bits, _ in everyones:
        if bits is not None:
            seen[instance] = np.unpackbits(bits, count=len(mask)).astype(np.bool_)
    return seen


def _require_samples(
    table: _Table, seen: NDArray[np.bool_], owner: NDArray[np.int16], seat: DataRank
) -> None:
    empty = [host for host, row in zip(seat.hosts, seen, strict=True) if not row.any()]
    if empty:
        raise DataError(
            f"{', '.join(empty)}: no .tar in the train channel; ShardedByS3Key deals whole "
            f"objects, so {len(seat.hosts)} instances need at least as many shards"
        )
    for instance, host in enumerate(seat.hosts):
        shards = (owner == instance) | (owner == REPLICATED)
        if not table.samples[shards].any():
            names = ", ".join(
                str(table.names[number]) for number in np.flatnonzero(seen[instance])[:3].tolist()
            )
            raise DataError(
                f"{host}: no sample that it could read in {names} …; pack these shards again"
            )


def _assign_shards(seen: NDArray[np.bool_]) -> NDArray[np.int16]:
    """One owner for each shard, all instances, or nobody."""
    times = seen.sum(axis=0, dtype=np.int16)
    # Of several that see a shard, the numbers take turns.
    turn = np.arange(seen.shape[1]) % np.maximum(times, 1)
    owner = np.full(seen.shape[1], UNASSIGNED, np.int16)
    before = np.zeros_like(times)
    for instance, row in enumerate(seen):
        owner[row & (before == turn)] = instance
        before += row
    if len(seen) > 1:
        owner[times == len(seen)] = REPLICATED
    return owner
