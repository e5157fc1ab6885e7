"""The shards that an index describes, as a reader numbers them: sorted by name.

An index has its shards in the order of packing. Nothing else depends on that order. The shards of a
data set that `sm-train remove` has changed since are described by two indexes: the present one, and
that of replaced shards.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray
from sm_train.entrypoints.base.rng import Ints
from sm_train.entrypoints.data_loading.partition import DataTopology
from sm_train.entrypoints.data_loading.sample_ranges import SampleShapes, nearest_shape
from sm_train.entrypoints.shards.removed_samples import ShardNames
from sm_train.entrypoints.shards.selection import Selection, select_samples
from sm_train.entrypoints.shards.shard_format import DataError
from sm_train.entrypoints.shards.shard_index import ShardIndex

_DIGEST_BATCH = 2**14
"""Names that are converted and hashed at a time."""


class SampleOffsets(Protocol):
    """Finds the samples of a shard; sent to the loader's process."""

    def __call__(self, shard: int) -> tuple[Ints, Ints]:
        """Return the samples' first bytes and those after their last, int64 (num_samples,)."""


def shards_digest(
    names: ShardNames, sizes: Ints, content: pa.Array | None, selection: str | None
) -> str:
    """Return a digest of the names and sample counts of all shards, and of their bytes if an index
    has their hashes: without one, the shards are not read for it. ``selection`` identifies the
    samples that are read.
    """
    digest = hashlib.sha256()
    for first in range(0, len(names), _DIGEST_BATCH):
        batch = names[first : first + _DIGEST_BATCH]
        texts = batch if isinstance(batch, list) else batch.to_pylist()
        digest.update("\0".join(["", *texts]).encode("utf-8", "surrogateescape"))
    digest.update(sizes.astype("<i8").tobytes())
    if content is not None:
        for first in range(0, len(content), _DIGEST_BATCH):
            digest.update(b"".join(content[first : first + _DIGEST_BATCH].to_pylist()))
    if selection is not None:
        digest.update(selection.encode())
    return digest.hexdigest()[:16]


@dataclass(frozen=True)
class SelectedIndex:
    """An index, and which samples of its shards are read: all without a ``selection``."""

    index: ShardIndex
    selection: Selection | None

    @property
    def samples(self) -> Ints:
        """The samples that are read of each shard, int64 (num_shards,)."""
        return self.index.samples if self.selection is None else self.selection.counts

    @property
    def bytes(self) -> Ints:
        """The size of shards of these samples alone, int64 (num_shards,)."""
        left_out = 0 if self.selection is None else self.selection.left_out
        return np.asarray(self.index.bytes - left_out)


@dataclass(frozen=True, eq=False)
class IndexedShards:
    """Shards that one or more indexes describe, sorted by name, as a reader numbers them.

    ``names`` are an Arrow array. ``rows`` are the shards' rows in all ``sources``, one after the
    other, int64 (num_shards,).
    """

    sources: tuple[SelectedIndex, ...]
    names: pa.Array
    rows: Ints

    @cached_property
    def sizes(self) -> Ints:
        """The samples that are read of each shard, int64 (num_shards,)."""
        return self._gathered([source.samples for source in self.sources])

    @property
    def total_bytes(self) -> int:
        """The size of shards of the samples that are read."""
        return int(self._gathered([source.bytes for source in self.sources]).sum())

    @property
    def content(self) -> pa.Array:
        """The BLAKE3 hashes of the shards."""
        hashes = [source.index.content_hashes() for source in self.sources]
        return pa.concat_arrays(hashes).take(pa.array(self.rows))

    @property
    def selection_digest(self) -> str | None:
        """What identifies the samples that are read; None for all."""
        if all(source.selection is None for source in self.sources):
            return None
        digest = hashlib.sha256()
        for number in range(len(self.rows)):
            source, row = self.place(number)
            assert source.selection is not None  # one condition selects from all
            digest.update(source.selection.masks[row].tobytes())
        return digest.hexdigest()

    @property
    def digest(self) -> str:
        """What identifies a data set of these shards; see :func:`shards_digest`."""
        return shards_digest(self.names, self.sizes, self.content, self.selection_digest)

    @cached_property
    def first_rows(self) -> Ints:
        """The first row of each source, and the number of all, int64 (num_sources + 1,)."""
        return np.cumsum([0, *(len(source.index) for source in self.sources)])

    def place(self, number: int) -> tuple[SelectedIndex, int]:
        """Return the index that describes a shard, and its row there."""
        row = int(self.rows[number])
        source = int(np.searchsorted(self.first_rows, row, side="right")) - 1
        return self.sources[source], row - int(self.first_rows[source])

    def selected(self, number: int) -> NDArray[np.bool_] | None:
        """Return which samples of a shard are read; None for all."""
        source, row = self.place(number)
        return None if source.selection is None else source.selection.is_selected(row)

    def _gathered(self, values: Sequence[Ints]) -> Ints:
        gathered: Ints = np.concatenate(values)[self.rows]
        return gathered


def read_indexed_shards(index_file: Path, where: str | None) -> IndexedShards:
    """Return the shards of an index, and their samples that fulfil ``where``.

    Raises:
        OSError: it cannot be read.
        ShardError: it is damaged.
        ConditionError: the condition is invalid, or selects nothing.
    """
    source = select_from(ShardIndex(index_file), where)
    names = source.index.name_column()
    order = pc.sort_indices(names)
    return IndexedShards((source,), names.take(order), order.to_numpy().astype(np.int64))


def select_from(
    index: ShardIndex, where: str | None, *, may_be_empty: bool = False
) -> SelectedIndex:
    """Return the samples of an index that fulfil ``where``; see :func:`select_samples`."""
    if where is None:
        return SelectedIndex(index, None)
    return SelectedIndex(index, select_samples(index, where, may_be_empty=may_be_empty))


def named_shards(sources: Sequence[SelectedIndex], names: ShardNames) -> IndexedShards | None:
    """Return the shards of these names, from the first of ``sources`` that has each.

    None if none of them has one.
    """
    known = pa.concat_arrays([source.index.name_column() for source in sources])
    wanted = pa.array(names, pa.string())
    wanted = wanted.take(pc.sort_indices(wanted))
    rows = pc.index_in(wanted, value_set=known)
    if rows.null_count:
        return None
    return IndexedShards(tuple(sources), wanted, rows.to_numpy().astype(np.int64))


@dataclass(frozen=True)
class IndexedOffsets:
    """Looks samples up in the index; of selected ones, if there is a selection."""

    shards: IndexedShards

    def __call__(self, shard: int) -> tuple[Ints, Ints]:
        source, row = self.shards.place(shard)
        offsets = source.index.offsets(row)
        return _selected(offsets[:-1], offsets[1:], self.shards.selected(shard))


@dataclass(frozen=True)
class RewrittenOffsets:
    """Looks samples up in the shards that exist, for shards as they were before removals.

    ``shards`` are described by the present index, or by that of replaced shards.
    ``successors`` has the present shard of each of the latter by number, None if nothing is left of
    it. A removed sample lies nowhere: at -1.
    """

    shards: IndexedShards
    successors: dict[int, int | None]

    def __call__(self, shard: int) -> tuple[Ints, Ints]:
        if shard not in self.successors:
            return IndexedOffsets(self.shards)(shard)
        row, present = self.successors[shard], self.shards.sources[0].index
        source, old = self.shards.place(shard)
        starts, stops = _rewritten(source.index, old, present, row)
        return _selected(starts, stops, self.shards.selected(shard))


@lru_cache(maxsize=256)  # a range of a shard is read at a time
def _rewritten(
    index: ShardIndex, old: int, present: ShardIndex, row: int | None
) -> tuple[Ints, Ints]:
    keys = index.keys(old)
    starts, stops = np.full(len(keys), -1), np.full(len(keys), -1)
    if row is not None:
        found = pc.index_in(
            pa.array(keys, pa.string()), value_set=pa.array(present.keys(row), pa.string())
        )
        numbers = found.fill_null(-1).to_numpy()
        offsets, exists = present.offsets(row), numbers >= 0
        starts[exists] = offsets[:-1][numbers[exists]]
        stops[exists] = offsets[1:][numbers[exists]]
    return starts, stops


def _selected(
    starts: Ints, stops: Ints, is_selected: NDArray[np.bool_] | None
) -> tuple[Ints, Ints]:
    return (starts, stops) if is_selected is None else (starts[is_selected], stops[is_selected])


@dataclass(frozen=True)
class IndexedShapes:
    """Chooses each image's batch shape by its size in the index."""

    shards: IndexedShards

    def __call__(self, topology: DataTopology, shards: Ints) -> SampleShapes | None:
        """Return the shapes of the samples of ``shards``.

        Raises:
            DataError: the index does not have the sizes of its images.
        """
        if not topology.shapes:
            return None
        first = np.full(len(self.shards.rows), -1)
        shards = shards[np.argsort(self.shards.rows[shards])]  # in the order of the indexes
        bounds = np.searchsorted(self.shards.rows[shards], self.shards.first_rows)
        numbers, end = [np.zeros(0, np.int16)], 0
        for source, (begin, stop) in enumerate(pairwise(bounds.tolist())):
            for group, lengths, shapes in self._by_group(topology, source, shards[begin:stop]):
                first[group] = end + np.cumsum(lengths) - lengths
                numbers.append(shapes)
                end += len(shapes)
        return SampleShapes(first, np.concatenate(numbers), len(topology.shapes))

    def _by_group(
        self, topology: DataTopology, source: int, shards: Ints
    ) -> Iterator[tuple[Ints, Ints, NDArray[np.int16]]]:
        """Yield the next shards of a source, their samples, and the shapes of all of these."""
        index, selection = self.shards.sources[source].index, self.shards.sources[source].selection
        rows, done = self.shards.rows[shards] - self.shards.first_rows[source], 0
        for lengths, widths, heights in index.image_sizes_by_group(rows):
            here = rows[done : done + len(lengths)]
            _require_sizes(index, here, lengths)
            if selection is not None:
                is_selected = np.concatenate([selection.is_selected(row) for row in here.tolist()])
                widths, heights = widths[is_selected], heights[is_selected]
                lengths = selection.counts[here]
            shapes = nearest_shape(topology.shapes, heights, widths)
            yield shards[done : done + len(here)], lengths, shapes
            done += len(here)


def _require_sizes(index: ShardIndex, rows: Ints, lengths: Ints) -> None:
    """Raise unless the index has an image's size for each sample of these rows."""
    missing = rows[lengths != index.samples[rows]]
    if len(missing):
        raise DataError(
            f"data.aspect_buckets: the index has no image sizes of {index.names[missing[0]]}; run "
            "`sm-train index` again"
        )
