"""Finds the samples that a user wants to remove: by key, by the image's name, or by a condition."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate

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
    PlanFiles,
    decode,
    encode,
)
from sm_train.entrypoints.packing.stored_plan import read_packed_inputs
from sm_train.entrypoints.sample_metadata.column_types import SOURCE
from sm_train.entrypoints.sample_metadata.row_filter import ConditionError
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
    shards: ShardSet, index: ShardIndex, names: Sequence[str], where: str | None
) -> list[FoundSample]:
    """Return the samples with these keys or sources, or those that fulfil ``where``.

    Raises:
        UserError: one of the names is no sample, or the condition is invalid or selects nothing.
    """
    sources = PackedSources.of(shards, index)
    if where is not None:
        return list(_with_sources([*_by_condition(index, where)], sources))
    found = find_by_name(index, names, sources)
    require_found(names, found, index.header.prefix)
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


def _by_condition(index: ShardIndex, where: str) -> Iterator[FoundSample]:
    try:
        selection = select_samples(index, where, option="--where")
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

    def sources(self, partition: int) -> pa.Array:
        """Return the sources of the inputs in a partition, sorted, as bytes."""
        first = partition * PARTITION_ROWS
        count = min(PARTITION_ROWS, self.rows - first)
        batches = list(self.files.read(INPUTS, ["source"], first, count))
        return pa.Table.from_batches(batches)["source"].combine_chunks()


@dataclass(frozen=True, eq=False)
class PackedSources:
    """The names of the images of a pack, by the keys of their samples.

    They are sorted within each part, so a name is found by bisection: 12 files are read for one of
    100 million images.
    """

    parts: tuple[_PackedPart, ...]
    _cache: dict[tuple[int, int], pa.Array] = field(default_factory=dict)

    @classmethod
    def of(cls, shards: ShardSet, index: ShardIndex) -> PackedSources | None:
        """Return those of a pack; None if its list of images is missing."""
        if index.header.inputs is None:
            return None
        fingerprints = (index.header.inputs, *index.header.appended)
        try:
            packed = read_packed_inputs(shards.storage, shards.access, fingerprints)
        except FileNotFoundError:
            return None
        counts = [len(part) for part in packed.inputs]
        firsts = [0, *accumulate(counts)]
        inputs = zip(packed.inputs, firsts, counts, strict=False)
        return cls(tuple(_PackedPart(part.files, first, rows) for part, first, rows in inputs))

    def of_keys(self, keys: Iterable[str]) -> dict[str, str]:
        """Return the names of the images with these keys."""
        found = {}
        for key in sorted(keys):
            number = int(key) if key.isdecimal() else -1
            part = next((part for part in self.parts if 0 <= number - part.first < part.rows), None)
            if part is None:
                continue
            partition, row = divmod(number - part.first, PARTITION_ROWS)
            found[key] = decode(self._sources(part, partition)[row].as_py())
        return found

    def keys_of(self, names: Iterable[str]) -> dict[str, list[str]]:
        """Return the keys of all images with these names."""
        found: dict[str, list[str]] = {name: [] for name in names}
        for part in self.parts:
            for name in sorted(found):
                found[name] += [sample_key(number) for number in self._numbers(part, encode(name))]
        return found

    def _numbers(self, part: _PackedPart, name: bytes) -> Iterator[int]:
        """Yield the numbers of the inputs with a source, in the partition that it is in or after.

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
                yield part.first + partition * PARTITION_ROWS + row

    def _sources(self, part: _PackedPart, partition: int) -> pa.Array:
        key = (part.first, partition)
        if key not in self._cache:
            if len(self._cache) >= _CACHED_PARTITIONS:
                self._cache.pop(next(iter(self._cache)))
            self._cache[key] = part.sources(partition)
        return self._cache[key]


_CACHED_PARTITIONS = 64
"""Partitions in memory, a few megabytes each."""
