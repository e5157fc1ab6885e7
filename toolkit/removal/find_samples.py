"""Finds the samples that a user wants to remove: by key, by the image's name, or by a condition."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate
from typing import ClassVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray
from sm_train.entrypoints.data.selection import select_samples
from sm_train.entrypoints.data.shard_index import SampleGroup, ShardIndex
from sm_train.entrypoints.packing.plan import sample_key
from sm_train.entrypoints.packing.plan_files import (
    INPUTS,
    PARTITION_ROWS,
    STREAMED,
    PlanFiles,
    decode,
    encode,
)
from sm_train.entrypoints.packing.stored_plan import read_packed_inputs
from sm_train.entrypoints.removal.removal_list import RemovalList
from sm_train.entrypoints.sample_metadata.column_types import SOURCE
from sm_train.entrypoints.sample_metadata.row_filter import ConditionError
from sm_train.entrypoints.streaming.stream_state import shard_of_key
from sm_train.toolkit.errors import UserError
from sm_train.toolkit.packing.shard_set import ShardSet


@dataclass(frozen=True)
class FoundSample:
    """A sample: its shard, its number there, its key, and its image's name if that is known."""

    shard: str
    number: int
    key: str
    source: str | None = None


def find_samples(
    shards: ShardSet,
    index: ShardIndex,
    names: Sequence[str],
    where: str | None,
    removed: RemovalList,
) -> list[FoundSample]:
    """Return the samples with these keys or sources, or those that fulfil ``where``.

    Names of samples that were ``removed`` are left out, and after a removal the condition may be
    that of its samples, and select nothing.

    Raises:
        UserError: one of the names is no sample, or the condition is invalid or selects nothing.
    """
    sources = PackedSources.of(shards, index)
    if where is not None:
        samples = _by_condition(index, where, may_be_empty=len(removed.samples) > 0)
        return list(_with_sources([*samples], sources))
    found = find_by_name(index, names, sources)
    gone = {*removed.samples["key"].to_pylist(), *removed.sources}
    require_found([name for name in names if name not in gone], found, index.header.prefix)
    return found


def find_by_name(
    index: ShardIndex, names: Collection[str], sources: PackedSources | None
) -> list[FoundSample]:
    """Return the samples with these keys, or whose images have these names."""
    return list(_with_sources([*_by_name(index, names, sources)], sources))


def require_found(names: Collection[str], found: Iterable[FoundSample], prefix: str) -> None:
    """Require that each of ``names`` is the key or the image of a sample.

    Raises:
        UserError: one is not.
    """
    known = {name for sample in found for name in (sample.key, sample.source)}
    if missing := [name for name in names if name not in known]:
        more = f" and {len(missing) - 1:,} others" if len(missing) > 1 else ""
        raise UserError(f"{missing[0]}{more}: neither a key nor an image of {prefix}")


def _by_condition(index: ShardIndex, where: str, *, may_be_empty: bool) -> Iterator[FoundSample]:
    try:
        selection = select_samples(index, where, option="--where", may_be_empty=may_be_empty)
    except ConditionError as error:
        raise UserError(str(error)) from None
    kept = [SOURCE] if SOURCE in index.header.columns else []
    for group in index.samples_by_group(kept, keys=True):
        rows = range(group.first, group.first + len(group.counts))
        mask = np.concatenate([selection.is_selected(row) for row in rows])
        yield from _samples(index, group, mask)


def _by_name(
    index: ShardIndex, names: Collection[str], sources: PackedSources | None
) -> Iterator[FoundSample]:
    """Yield the samples with these keys, or whose images have these names."""
    wanted = set(names)
    keys = dict[str, str]()
    if sources is not None:
        keys = {key: name for name, found in sources.keys_of(wanted).items() for key in found}
    values = pa.array(sorted({*wanted, *keys}), pa.string())
    kept = [SOURCE] if SOURCE in index.header.columns else []
    for group in index.samples_by_group(kept, keys=True):
        mask = pc.is_in(group.keys, value_set=values).to_numpy(zero_copy_only=False)
        if kept:
            by_source = pc.is_in(group.columns[SOURCE], value_set=values)
            mask = mask | by_source.fill_null(False).to_numpy()
        for sample in _samples(index, group, mask):
            yield replace(sample, source=sample.source or keys.get(sample.key))


def _samples(
    index: ShardIndex, group: SampleGroup, mask: NDArray[np.bool_]
) -> Iterator[FoundSample]:
    """Yield the samples of a group for which ``mask``, bool (num_samples,), is true."""
    numbers = np.flatnonzero(mask)
    if not len(numbers):
        return
    ends = np.cumsum(group.counts)
    shards = np.searchsorted(ends, numbers, side="right") + group.first
    assert group.keys is not None
    keys = group.keys.take(pa.array(numbers)).to_pylist()
    sources: Iterable[str | None] = [None] * len(keys)
    if group.columns.num_columns:
        sources = group.columns[SOURCE].take(pa.array(numbers)).to_pylist()
    firsts = np.concatenate([[0], ends])
    for shard, number, key, source in zip(
        shards.tolist(), numbers.tolist(), keys, sources, strict=True
    ):
        first = int(firsts[shard - group.first])
        yield FoundSample(index.names[shard], number - first, key, source)


def _with_sources(
    found: Sequence[FoundSample], sources: PackedSources | None
) -> Iterator[FoundSample]:
    """Yield the samples with the names of their images, as far as the pack has them."""
    unknown = [sample.key for sample in found if sample.source is None]
    names = {} if sources is None else sources.of_keys(unknown)
    for sample in found:
        yield replace(sample, source=sample.source or names.get(sample.key))


@dataclass(frozen=True)
class _PackedPart:
    """The inputs of a pack, or of an append to one; the first has the number ``first``."""

    files: PlanFiles
    first: int
    rows: int
    kind: ClassVar[str] = INPUTS

    def key(self, row: int) -> str:
        """Return the key of the sample in a row."""
        return sample_key(self.first + row)

    def row_of_key(self, key: str) -> int | None:
        """Return the row of a sample; None if it is not in this part."""
        row = int(key) - self.first if key.isdecimal() else -1
        return row if 0 <= row < self.rows else None


@dataclass(frozen=True, eq=False)
class _StreamedPart:
    """Images that were packed as they arrived, in streamed ``shards``."""

    files: PlanFiles
    rows: int
    shards: frozenset[int]
    kind: ClassVar[str] = STREAMED

    @cached_property
    def _keys(self) -> pa.Array:
        batches = list(self.files.read(STREAMED, ["key"], 0, self.rows))
        return pa.Table.from_batches(batches)["key"].combine_chunks()

    def key(self, row: int) -> str | None:
        """Return the key of the sample in a row; None for an image that was rejected."""
        key = self._keys[row].as_py()
        return None if key is None else decode(key)

    def row_of_key(self, key: str) -> int | None:
        """Return the row of a sample; None if it is not in this part."""
        if shard_of_key(key) not in self.shards:
            return None
        row = pc.index(self._keys, pa.scalar(encode(key), pa.binary())).as_py()
        return None if row < 0 else row


_Part = _PackedPart | _StreamedPart


@dataclass(frozen=True, eq=False)
class PackedSources:
    """The names of the images of a pack, by the keys of their samples.

    They are sorted within each part, so a name is found by bisection: 12 files are read for one of
    100 million images.
    """

    parts: tuple[_Part, ...]
    _cache: dict[tuple[_Part, int], pa.Array] = field(default_factory=dict)

    @classmethod
    def of(cls, shards: ShardSet, index: ShardIndex) -> PackedSources | None:
        """Return those of a pack; None if its list of images is missing."""
        if index.header.inputs is None:
            return None
        fingerprints = index.header.fingerprints
        try:
            packed = read_packed_inputs(shards.storage, shards.access, fingerprints)
        except FileNotFoundError:
            return None
        counts = [len(part) for part in packed.inputs]
        firsts = [0, *accumulate(counts)]
        inputs = zip(packed.inputs, firsts, counts, strict=False)
        return cls(
            (
                *(_PackedPart(part.files, first, rows) for part, first, rows in inputs),
                *(_StreamedPart(part.files, part.count, part.shards) for part in packed.streamed),
            )
        )

    def of_keys(self, keys: Iterable[str]) -> dict[str, str]:
        """Return the names of the images with these keys."""
        found = {}
        for key in sorted(keys):
            for part in self.parts:
                if (row := part.row_of_key(key)) is not None:
                    partition, row = divmod(row, PARTITION_ROWS)
                    found[key] = decode(self._sources(part, partition)[row].as_py())
                    break
        return found

    def keys_of(self, names: Iterable[str]) -> dict[str, list[str]]:
        """Return the keys of all images with these names."""
        found: dict[str, list[str]] = {name: [] for name in names}
        for part in self.parts:
            for name in sorted(found):
                keys = (part.key(row) for row in self._rows(part, encode(name)))
                found[name] += [key for key in keys if key is not None]
        return found

    def _rows(self, part: _Part, name: bytes) -> Iterator[int]:
        """Yield the rows of the inputs with a source, in the partition that it is in or after.

        An image that a table lists several times may fill more than one partition.
        """
        partitions = range(-(-part.rows // PARTITION_ROWS))
        low, high = 0, len(partitions)
        while low < high:  # the first partition whose last source is not before the name
            middle = (low + high) // 2
            if self._sources(part, middle)[-1].as_py() < name:
                low = middle + 1
            else:
                high = middle
        for partition in partitions[low:]:
            sources = self._sources(part, partition)
            if sources[0].as_py() > name:
                return
            rows = pc.indices_nonzero(pc.equal(sources, pa.scalar(name, pa.binary())))
            for row in rows.to_pylist():
                yield partition * PARTITION_ROWS + row

    def _sources(self, part: _Part, partition: int) -> pa.Array:
        key = (part, partition)
        if key not in self._cache:
            if len(self._cache) >= _CACHED_PARTITIONS:
                self._cache.pop(next(iter(self._cache)))
            first = partition * PARTITION_ROWS
            count = min(PARTITION_ROWS, part.rows - first)
            batches = list(part.files.read(part.kind, ["source"], first, count))
            self._cache[key] = pa.Table.from_batches(batches)["source"].combine_chunks()
        return self._cache[key]


_CACHED_PARTITIONS = 64
"""Partitions in memory, a few megabytes each."""
