"""Finds the images of a finished pack by their names, and the names of images by their keys."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from typing import ClassVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray
from sm_train.entrypoints.data_prep.packing.plan import sample_key
from sm_train.entrypoints.data_prep.packing.plan_files import (
    INPUTS,
    PARTITION_ROWS,
    STREAMED,
    PlanFiles,
    decode,
    encode,
)
from sm_train.entrypoints.data_prep.packing.stored_plan import read_packed_inputs
from sm_train.entrypoints.job_interface.index_location import shard_of_key
from sm_train.entrypoints.shards.shard_index import ShardIndex
from sm_train.entrypoints.storage.storage import Storage
from sm_train.entrypoints.storage.store import S3Access


def rows_with_samples(index: ShardIndex, rows: int) -> NDArray[np.bool_]:
    """Return which of the first ``rows`` inputs of a pack are in its shards, bool (rows,)."""
    found = np.zeros(rows, np.bool_)
    for group in index.samples_by_group((), keys=True):
        assert group.keys is not None
        # Keys of images that were packed as they arrived have letters.
        numbers = group.keys.filter(pc.utf8_is_decimal(group.keys)).cast(pa.int64()).to_numpy()
        found[numbers[numbers < rows]] = True
    return found


@dataclass(frozen=True)
class _PackedPart:
    """The inputs of a pack, or of an append to one; the first has the number ``first``.

    ``root`` is what precedes a source in its address, as far as it is recorded.
    """

    files: PlanFiles
    root: str
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
    def read(
        cls, storage: Storage, access: S3Access, fingerprints: Sequence[str]
    ) -> PackedSources | None:
        """Return those of a pack in ``storage``; None if its list of images is missing."""
        try:
            packed = read_packed_inputs(storage, access, fingerprints)
        except FileNotFoundError:
            return None
        counts = [len(part) for part in packed.inputs]
        firsts = [0, *accumulate(counts)]
        inputs = zip(packed.inputs, firsts, counts, strict=False)
        return cls(
            (
                *(_PackedPart(part.files, part.root, first, rows) for part, first, rows in inputs),
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

    def numbers_at(self, address: str) -> list[tuple[int, int]]:
        """Return the inputs that are the image at an address: their parts and their numbers.

        Images that were packed as they arrived are not searched.
        """
        found = []
        for place, part in enumerate(self.parts):
            if isinstance(part, _PackedPart):
                below = address.removeprefix(part.root) if part.root else address
                for name in dict.fromkeys((address, below)):
                    found += [(place, part.first + row) for row in self._rows(part, encode(name))]
        return found

    @property
    def rows(self) -> int:
        """The number of inputs of all parts that were packed at once."""
        return sum(part.rows for part in self.parts if isinstance(part, _PackedPart))

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
