"""Finds the samples that a user wants to remove: by key, by the image's name, or by a condition."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray
from sm_train.entrypoints.data_prep.packing.packed_sources import PackedSources
from sm_train.entrypoints.sample_metadata.column_types import SOURCE
from sm_train.entrypoints.sample_metadata.row_filter import ConditionError
from sm_train.entrypoints.shards.removal_list import RemovalList
from sm_train.entrypoints.shards.selection import select_samples
from sm_train.entrypoints.shards.shard_index import SampleGroup, ShardIndex
from sm_train.toolkit.base.errors import UserError
from sm_train.toolkit.data_prep.packing.shard_set import ShardSet


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
    sources = packed_sources(shards, index)
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


def packed_sources(shards: ShardSet, index: ShardIndex) -> PackedSources | None:
    """Return the names of the images of a pack; None if its list of images is missing."""
    if index.header.inputs is None:
        return None
    return PackedSources.read(shards.storage, shards.access, index.header.fingerprints)
