"""Builds the catalog of shards: which exist, which node reads each, where their samples lie.

All ranks agree on one numbering of the shards, by name, before the first step. With an index that
takes a listing of the channel. Without one, the ranks of each node scan its shards once and report
how long it took. Memory grows with the node's own shards, plus a few bytes for each shard of the
data set.

How ``ShardedByS3Key`` assigns shards to nodes is undocumented, so the catalog assumes nothing:
every node reports what it sees.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray
from sm_train.entrypoints.base.rng import Ints
from sm_train.entrypoints.data_loading.indexed_shards import (
    IndexedOffsets,
    IndexedShapes,
    IndexedShards,
    RewrittenOffsets,
    SampleOffsets,
    read_indexed_shards,
    shards_digest,
)
from sm_train.entrypoints.data_loading.partition import REPLICATED, UNASSIGNED, DataTopology
from sm_train.entrypoints.data_loading.sample_ranges import Mixture, SampleShapes
from sm_train.entrypoints.data_loading.sampler import BatchShapes
from sm_train.entrypoints.job_interface.index_location import is_streamed
from sm_train.entrypoints.job_interface.job_config import DataSource
from sm_train.entrypoints.sample_metadata.row_filter import ConditionError
from sm_train.entrypoints.shards.removal_list import RemovalListError
from sm_train.entrypoints.shards.removed_samples import (
    ChannelRemovals,
    ShardNames,
    mix_removals,
    without_replaced,
)
from sm_train.entrypoints.shards.shard_format import DataError, ShardError, find_shards
from sm_train.entrypoints.shards.tar_reader import scan_tar

AllGather = Callable[[Any], list[Any]]
"""Gathers an object from every rank, in rank order, on all ranks."""


@dataclass(frozen=True)
class DataRank:
    """Which share of the data this process reads; ``hosts`` are the nodes' names, by node rank."""

    hosts: tuple[str, ...]
    node_rank: int
    local_rank: int
    local_world_size: int

    @property
    def num_nodes(self) -> int:
        """Number of nodes that share the data."""
        return len(self.hosts)


@dataclass(frozen=True, eq=False)
class ListedShards:
    """The shards of a channel as they were listed.

    ``index`` is the path or URI of their index, None without one, and ``digest`` identifies what
    ``covers`` says. ``names`` are by number, and ``sizes`` the samples to read of each, int64
    (num_shards,), or None for a reader that does not know them. ``where`` is their condition.
    """

    channel: str
    index: str | None
    digest: str
    covers: str
    names: ShardNames
    sizes: Ints | None
    where: str | None


@dataclass(frozen=True, eq=False)
class ShardCatalog:
    """All shards by number, and what is needed to read those of this node.

    ``shard_sizes`` are the samples of each shard, int64 (num_shards,), and ``owner``, int16
    (num_shards,), the nodes that read them (:mod:`~sm_train.entrypoints.data_loading.partition`).
    ``paths`` has the shards that this node reads. ``damage`` is what this rank's scan found: a
    shard's name and a line. ``seconds`` is the time that building took. ``digest`` identifies the
    data set; ``options`` are those that it was packed with. The shards of several sources are a
    ``mixture`` with the catalogs ``parts``. ``names`` are those of all shards of one source by
    number; ``listed`` has those of each source. ``removals`` say where the removed samples of each
    are listed. ``resume_note`` is set if the shards are those of before a removal.
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
    mixture: Mixture | None = None
    names: ShardNames = field(default_factory=list)
    removals: tuple[ChannelRemovals, ...] = ()
    listed: tuple[ListedShards, ...] = ()
    resume_note: str | None = None
    parts: tuple[ShardCatalog, ...] = ()

    @property
    def digest_covers(self) -> str:
        """What two data sets with equal digests have in common."""
        return "content" if self.indexed else "names and sample counts of the shards"


def build_catalog(
    channel: Path,
    index: Path | None,
    rank: DataRank,
    all_gather: AllGather,
    scan_folder: Path,
    where: str | None = None,
) -> ShardCatalog:
    """Build the catalog of ``channel`` on all ranks; a collective call.

    ``scan_folder`` receives the results of this node's scans if there is no ``index``. ``where`` is
    the condition of the samples to read, on columns of the index.

    Raises:
        DataError: a node sees no shard or no sample, or the index is damaged or does not match
            the shards, or the condition is invalid. Raised on all ranks if on any.
    """
    started = time.monotonic()
    visible = find_shards(channel)
    if where is not None:
        raise_on_all_ranks(all_gather, missing_index(index))
    if index:
        listing = _list_by_index(index, visible, where, all_gather)
    else:
        listing = _list_by_scanning(visible, rank, all_gather, scan_folder)
    visibility = _gather_visibility(listing, rank, all_gather)
    owner = _assign_shards(visibility)
    _require_samples(listing, visibility, owner, rank)
    is_read_here = (owner == rank.node_rank) | (owner == REPLICATED)
    return ShardCatalog(
        shard_sizes=listing.shard_sizes,
        owner=owner,
        total_bytes=listing.total_bytes,
        digest=shards_digest(
            listing.names, listing.shard_sizes, listing.content, listing.selection
        ),
        paths={
            number: visible[name]
            for name, number in listing.visible.items()
            if is_read_here[number]
        },
        offsets=listing.offsets,
        shapes=listing.shapes,
        damage=listing.damage,
        seconds=time.monotonic() - started,
        indexed=index is not None,
        options=listing.options,
        names=listing.names,
    )


def names_of(catalog: ShardCatalog) -> list[str]:
    """Return the names of the shards of one source, by number."""
    names = catalog.names
    return names if isinstance(names, list) else names.to_pylist()


def catalog_before_removals(
    catalog: ShardCatalog, shards: IndexedShards, successors: Mapping[str, str], channel: Path
) -> ShardCatalog:
    """Return the catalog of ``shards`` of before removals, which reads the present ones.

    ``shards`` are described by the present index, or by that of replaced shards. ``successors`` are
    the names of the shards that have replaced others, empty if nothing is left of one.
    """
    present = {name: number for number, name in enumerate(names_of(catalog))}
    numbers: list[int | None] = []
    names: list[str] = shards.names.to_pylist()
    for name in names:
        while name and name not in present:
            name = successors.get(name, "")
        numbers.append(present[name] if name else None)
    # Nothing is read of a shard of which nothing is left, so any node may own it.
    anyone = next((owner for owner in catalog.owner.tolist() if owner != UNASSIGNED), 0)
    owner = [anyone if number is None else int(catalog.owner[number]) for number in numbers]
    paths = {
        old: channel / names[old] if number is None else catalog.paths[number]
        for old, number in enumerate(numbers)
        if number is None or number in catalog.paths
    }
    is_replaced = shards.rows >= int(shards.first_rows[1])
    rows = {name: row for row, name in enumerate(shards.sources[0].index.names)}
    present_names = names_of(catalog)
    return replace(
        catalog,
        shard_sizes=shards.sizes,
        owner=np.array(owner, np.int16),
        total_bytes=shards.total_bytes,
        digest=shards.digest,
        paths=paths,
        offsets=RewrittenOffsets(
            shards,
            {
                old: None if number is None else rows[present_names[number]]
                for old, number in enumerate(numbers)
                if is_replaced[old]
            },
        ),
        shapes=IndexedShapes(shards),
        names=shards.names,
    )


def mixed_digest(digests: Sequence[str], weights: Sequence[float]) -> str:
    """Return what identifies a mixture of data sets with these digests."""
    return ", ".join(
        f"{digest} × {weight!r}" for digest, weight in zip(digests, weights, strict=True)
    )


def digests_of_parts(digest: str) -> list[str]:
    """Return the digests that :func:`mixed_digest` joined; of one data set, its own."""
    return [part.partition(" × ")[0] for part in digest.split(", ")]


def mix_catalogs(catalogs: Sequence[ShardCatalog], sources: Sequence[DataSource]) -> ShardCatalog:
    """Return the catalog of a mixture of ``sources``, which have these catalogs.

    Without ``sources`` it is the only one of ``catalogs``.
    """
    if not sources:
        [only] = catalogs
        return only
    mixture = Mixture(
        tuple(source.channel for source in sources),
        tuple(source.weight for source in sources),
        tuple(catalog.shard_sizes for catalog in catalogs),
    )
    each = [
        _Part(catalog, copies, first)
        for catalog, copies, first in zip(
            catalogs, mixture.copies, mixture.first_shards.tolist(), strict=True
        )
    ]
    notes = filter(None, (catalog.resume_note for catalog in catalogs))
    return ShardCatalog(
        shard_sizes=np.concatenate([part.tiled(part.catalog.shard_sizes) for part in each]),
        owner=np.concatenate([part.tiled(part.catalog.owner) for part in each]),
        total_bytes=sum(part.catalog.total_bytes * part.copies for part in each),
        digest=mixed_digest(
            [catalog.digest for catalog in catalogs], [source.weight for source in sources]
        ),
        paths={number: path for part in each for number, path in part.paths()},
        offsets=_MixedOffsets(mixture, tuple(catalog.offsets for catalog in catalogs)),
        shapes=MixedShapes(mixture, tuple(catalog.shapes for catalog in catalogs)),
        damage=tuple(line for catalog in catalogs for line in catalog.damage),
        seconds=sum(catalog.seconds for catalog in catalogs),
        indexed=all(catalog.indexed for catalog in catalogs),
        options={"latents": _common_latents(catalogs)},
        mixture=mixture,
        parts=tuple(catalogs),
        resume_note="; ".join(notes) or None,
        listed=tuple(listed for catalog in catalogs for listed in catalog.listed),
        removals=tuple(
            removals
            for part in each
            for removals in mix_removals(part.catalog.removals, part.first_shards())
        ),
    )


@dataclass(frozen=True, eq=False)
class _Part:
    """A source of a mixture, whose shards are numbered from ``first`` on, copy after copy."""

    catalog: ShardCatalog
    copies: int
    first: int

    def tiled(self, values: NDArray[Any]) -> NDArray[Any]:
        """Return the values of the source's shards, one copy after the other."""
        return np.tile(values, self.copies)

    def first_shards(self) -> tuple[int, ...]:
        """Return the number of the first shard of each copy."""
        size = len(self.catalog.shard_sizes)
        return tuple(self.first + copy * size for copy in range(self.copies))

    def paths(self) -> Iterator[tuple[int, Path]]:
        """Yield number and path of each shard that this node reads, in every copy."""
        for begin in self.first_shards():
            for number, path in self.catalog.paths.items():
                yield begin + number, path


def _common_latents(catalogs: Sequence[ShardCatalog]) -> Any:
    """Return the latents that all sources have: images and latents do not mix."""
    first, *others = [catalog.options.get("latents") for catalog in catalogs]
    return first if all(latents == first for latents in others) else None


@dataclass(frozen=True, eq=False)
class _MixedOffsets:
    """Finds the samples of a mixture's shards by the ``offsets`` of its sources."""

    mixture: Mixture
    offsets: tuple[SampleOffsets, ...]

    def __call__(self, shard: int) -> tuple[Ints, Ints]:
        source = int(self.mixture.source[shard])
        return self.offsets[source](int(self.mixture.original[shard]))


@dataclass(frozen=True, eq=False)
class MixedShapes:
    """Chooses the batch shapes of a mixture's samples by the ``shapes`` of its sources."""

    mixture: Mixture
    shapes: tuple[BatchShapes, ...]

    def __call__(self, topology: DataTopology, shards: Ints) -> SampleShapes | None:
        if not topology.shapes:
            return None
        first = np.full(len(self.mixture.source), -1)
        numbers, end = [np.zeros(0, np.int16)], 0
        for number, shapes in enumerate(self.shapes):
            copies = shards[self.mixture.source[shards] == number]
            originals = self.mixture.original[copies]
            found = shapes(topology, np.unique(originals))
            assert found is not None
            first[copies] = found.first[originals] + end
            numbers.append(found.numbers)
            end += len(found.numbers)
        return SampleShapes(first, np.concatenate(numbers), len(topology.shapes))


@dataclass(frozen=True, eq=False)
class _ShardListing:
    """All shards, sorted by name; ``visible`` are the numbers of this node's shards by name.

    ``content`` are the BLAKE3 hashes of the shards, None if there is no index. ``selection``
    identifies the samples that are read, None for all.
    """

    names: ShardNames
    shard_sizes: Ints
    total_bytes: int
    visible: dict[str, int]
    offsets: SampleOffsets
    shapes: BatchShapes
    options: dict[str, Any]
    damage: tuple[tuple[str, str], ...] = ()
    content: pa.Array | None = None
    selection: str | None = None


# ------------------------------------------------------------------ with an index


def missing_index(index: Path | None) -> str | None:
    """Return why samples cannot be selected without an index; None with one."""
    if index is not None:
        return None
    return "data.where: selects samples by columns of the index, and the shards have none"


def _list_by_index(
    index_file: Path, visible: dict[str, Path], where: str | None, all_gather: AllGather
) -> _ShardListing:
    problem = None
    try:
        shards = read_indexed_shards(index_file, where)
        visible = without_replaced(visible, index_file, lambda: shards.names.to_pylist())
    except RemovalListError as error:
        problem = str(error)
    except (OSError, ShardError) as error:
        problem = f"{error}; run `sm-train index` again, or set data.index to false"
    except ConditionError as error:
        problem = str(error)
    raise_on_all_ranks(all_gather, problem)
    # Compared as bytes: a file name may be any bytes, an Arrow string is UTF-8.
    visible_names = pa.array([os.fsencode(name) for name in visible], pa.binary())
    numbers = pc.index_in(visible_names, value_set=shards.names.cast(pa.binary())).to_pylist()
    found = dict(zip(visible, numbers, strict=True))
    # The next index has a shard that was sealed from images that arrived; this epoch does without.
    found = {name: row for name, row in found.items() if row is not None or not is_streamed(name)}
    unknown = [name for name, number in found.items() if number is None]
    if unknown:
        problem = (
            f"{len(unknown)} shards of the train channel are not in the index, {unknown[0]} among "
            "them; if `sm-train pack` writes them, start again after it, otherwise run "
            "`sm-train index`"
        )
    raise_on_all_ranks(all_gather, problem)
    return _ShardListing(
        names=shards.names,
        shard_sizes=shards.sizes,
        total_bytes=shards.total_bytes,
        visible=found,
        offsets=IndexedOffsets(shards),
        shapes=IndexedShapes(shards),
        options=shards.sources[0].index.header.options,
        content=shards.content,
        selection=shards.selection_digest,
    )


def raise_on_all_ranks(all_gather: AllGather, problem: str | None) -> None:
    """Raise on every rank what any rank found, so that none waits for the others."""
    for message in all_gather(problem):
        if message:
            raise DataError(message)


# ------------------------------------------------------------------ without an index


@dataclass(frozen=True)
class _ScannedShard:
    """One shard's scan; its offsets are ``samples`` columns of the local rank's scan file."""

    name: str
    local_rank: int
    first_column: int
    samples: int
    bytes: int


@dataclass(frozen=True)
class _ScannedOffsets:
    """Reads the sample offsets that the node's ranks have written to ``scan_folder``."""

    scan_folder: Path
    shards: dict[int, _ScannedShard]

    def __call__(self, shard: int) -> tuple[Ints, Ints]:
        scan = self.shards[shard]
        offsets = np.load(_scan_file(self.scan_folder, scan.local_rank), mmap_mode="r")
        starts, stops = offsets[:, scan.first_column : scan.first_column + scan.samples]
        return np.array(starts), np.array(stops)


def _scan_file(scan_folder: Path, local_rank: int) -> Path:
    """Return a rank's file of starts and stops, int64 (2, samples of its shards)."""
    return scan_folder / f"scan-{local_rank:03d}.npy"


def _list_by_scanning(
    visible: dict[str, Path], rank: DataRank, all_gather: AllGather, scan_folder: Path
) -> _ShardListing:
    """Scan this rank's share of the node's shards and gather the scans of all ranks."""
    scans: list[_ScannedShard] = []
    damage: list[tuple[str, str]] = []
    offsets = [np.zeros((2, 0), np.int64)]
    column = 0
    for name in list(visible)[rank.local_rank :: rank.local_world_size]:
        try:
            scan = scan_tar(visible[name])
        except OSError as error:
            damage.append((name, f"cannot be read: {error.strerror}"))
            scans.append(_ScannedShard(name, rank.local_rank, column, 0, 0))
            continue
        damage += [(name, line) for line in scan.damage]
        samples = len(scan.starts)
        scans.append(_ScannedShard(name, rank.local_rank, column, samples, scan.bytes))
        offsets.append(np.stack([scan.starts, scan.stops]))
        column += samples
    scan_folder.mkdir(parents=True, exist_ok=True)
    np.save(_scan_file(scan_folder, rank.local_rank), np.concatenate(offsets, axis=1))
    gathered: list[tuple[int, list[_ScannedShard]]] = all_gather((rank.node_rank, scans))
    return _merge_scans(gathered, visible, rank, scan_folder, tuple(damage))


def _merge_scans(
    gathered: Iterable[tuple[int, list[_ScannedShard]]],
    visible: dict[str, Path],
    rank: DataRank,
    scan_folder: Path,
    damage: tuple[tuple[str, str], ...],
) -> _ShardListing:
    by_name: dict[str, _ScannedShard] = {}
    on_this_node: dict[str, _ScannedShard] = {}
    problem = None
    for node_rank, scans in gathered:
        for shard in scans:
            other = by_name.setdefault(shard.name, shard)
            if (other.samples, other.bytes) != (shard.samples, shard.bytes):
                problem = f"{shard.name} is not the same on all nodes"
            if node_rank == rank.node_rank:
                on_this_node[shard.name] = shard
    if problem:  # all ranks have gathered the same scans, so all raise
        raise DataError(problem)
    names = sorted(by_name)
    numbers = {name: number for number, name in enumerate(names)}
    visible_numbers = {name: numbers[name] for name in visible}
    scans_by_number = {number: on_this_node[name] for name, number in visible_numbers.items()}
    return _ShardListing(
        names=names,
        shard_sizes=np.array([by_name[name].samples for name in names], np.int64),
        total_bytes=sum(shard.bytes for shard in by_name.values()),
        visible=visible_numbers,
        offsets=_ScannedOffsets(scan_folder, scans_by_number),
        shapes=_unknown_shapes,
        options={},
        damage=damage,
    )


def _unknown_shapes(topology: DataTopology, _shards: Ints) -> None:
    """Return :data:`BatchShapes` without an index: scanning reads headers, not images."""
    if topology.shapes:
        raise DataError(
            "data.aspect_buckets: needs the sizes of all images; run `sm-train index` and set "
            "data.index to true"
        )


# ------------------------------------------------------------------ assignment to nodes


def _gather_visibility(
    listing: _ShardListing, rank: DataRank, all_gather: AllGather
) -> NDArray[np.bool_]:
    """Return which node sees which shard, bool (num_nodes, num_shards).

    Local rank 0 sends its node's row as packed bits, an eighth of a byte for each shard.
    """
    row = np.zeros(len(listing.shard_sizes), np.bool_)
    row[list(listing.visible.values())] = True
    packed = np.packbits(row) if rank.local_rank == 0 else None
    gathered: list[Any] = all_gather((rank.node_rank, packed, len(row)))
    if len({num_shards for *_, num_shards in gathered}) > 1:
        raise DataError("the nodes have different indexes; start the job again")
    visibility = np.zeros((rank.num_nodes, len(row)), np.bool_)
    for node_rank, bits, _ in gathered:
        if bits is not None:
            visibility[node_rank] = np.unpackbits(bits, count=len(row)).astype(np.bool_)
    return visibility


def _require_samples(
    listing: _ShardListing, visibility: NDArray[np.bool_], owner: NDArray[np.int16], rank: DataRank
) -> None:
    """Check that every node has samples to read; ``visibility`` is (num_nodes, num_shards)."""
    empty = [host for host, row in zip(rank.hosts, visibility, strict=True) if not row.any()]
    if empty:
        raise DataError(
            f"{', '.join(empty)}: no .tar in the train channel; ShardedByS3Key assigns whole "
            f"objects, so {rank.num_nodes} instances need at least as many shards"
        )
    for node_rank, host in enumerate(rank.hosts):
        shards = (owner == node_rank) | (owner == REPLICATED)
        if not listing.shard_sizes[shards].any():
            seen = np.flatnonzero(visibility[node_rank])[:3].tolist()
            names = ", ".join(str(listing.names[number]) for number in seen)
            raise DataError(f"{host}: no readable sample in {names} …; pack these shards again")


def _assign_shards(visibility: NDArray[np.bool_]) -> NDArray[np.int16]:
    """Return the owner of each shard, int16 (num_shards,); ``visibility`` is (nodes, shards).

    A shard that all nodes see is replicated. If several nodes see it, they take turns by shard
    number, so that none gets all of the shared ones.
    """
    times_seen = visibility.sum(axis=0, dtype=np.int16)
    # Of the nodes that see shard i, the owner is number i % times_seen[i].
    turn = np.arange(visibility.shape[1]) % np.maximum(times_seen, 1)
    owner = np.full(visibility.shape[1], UNASSIGNED, np.int16)
    seen_before = np.zeros_like(times_seen)  # by nodes of lower rank
    for node_rank, row in enumerate(visibility):
        owner[row & (seen_before == turn)] = node_rank
        seen_before += row
    if len(visibility) > 1:
        owner[times_seen == len(visibility)] = REPLICATED
    return owner
