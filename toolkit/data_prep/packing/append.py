"""Compares the images of a source with those of a finished pack, which ``--append`` extends.

An image is identified by its source: its path below SRC, its URI, or its name in a table. Both
lists are sorted by source, so they are merged in bounded memory.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, chain, groupby, islice
from operator import itemgetter
from typing import Any

import pyarrow as pa
from sm_train.entrypoints.data_prep.packing.plan import packed_bytes
from sm_train.entrypoints.data_prep.packing.plan_files import (
    INPUTS,
    REJECTED,
    REJECTED_SCHEMA,
    STREAMED,
    batch_rows,
    decode,
    encode,
    record_batch,
)
from sm_train.entrypoints.data_prep.packing.stored_plan import PackedInputs
from sm_train.toolkit.data_prep.packing.file_kinds import MAX_NAMED

_BATCH_ROWS = 2**14

_PACKED = ("source", "bytes", "caption", "packed_bytes", "table_fields", "caption_address")
"""Columns of a packed image that identify it; ``packed_bytes`` includes the size of its caption. Of
the address of a caption the extension counts, if it is not the usual one."""

_Row = tuple[Any, ...]


@dataclass
class Comparison:
    """How the images of a source compare with those of a pack.

    ``known`` are packed already. ``changed`` have the source of a packed image, but another size,
    caption or column; ``first_changed`` are the first of them. ``missing`` are packed, but not in
    the source.
    """

    known: int = 0
    changed: int = 0
    missing: int = 0
    first_changed: list[str] = field(default_factory=list)


class NewInputs:
    """Selects the images and the rejected inputs that a pack does not have.

    ``comparison`` is complete when all images have been read. Images with a source in ``removed``
    are not in the pack any more.
    """

    def __init__(
        self, packed: PackedInputs, root: str, removed: frozenset[str] = frozenset()
    ) -> None:
        """Compare a source with ``packed``; ``root`` is what precedes a source in its address."""
        self.comparison = Comparison()
        self._packed, self._root, self._removed = packed, root, removed

    def images(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Yield the new images of ``batches``, which are those of a sorter, sorted by source."""
        firsts = accumulate(map(len, self._packed.inputs), initial=0)
        packed = [
            self._marked(part.files.read(INPUTS, _PACKED, 0, len(part)), first)
            for part, first in zip(self._packed.inputs, firsts, strict=False)
        ]

        def new_rows(rows: Iterator[_Row]) -> Iterator[_Row]:
            merged = heapq.merge(*packed, key=itemgetter(0))
            return self._new_images(self._not_streamed(rows), merged)

        yield from _filter(batches, new_rows)

    def _marked(self, batches: Iterable[pa.RecordBatch], first: int) -> Iterator[_Row]:
        """Yield the rows of a part from row ``first`` of all on, and whether each is in a shard."""
        has_sample = self._packed.has_sample
        for number, row in enumerate(_rows(batches), first):
            yield *row, has_sample is None or bool(has_sample[number])

    def _not_streamed(self, images: Iterator[_Row]) -> Iterator[_Row]:
        """Yield the images that were not packed as they arrived, which are known by address.

        A new version of one of them has a message of its own.
        """
        indexed = _merge(
            part.files.read(STREAMED, ["source"], 0, part.count) for part in self._packed.streamed
        )
        arriving = ((encode(address),) for address in self._packed.arriving)
        streamed = heapq.merge(indexed, arriving, key=itemgetter(0))
        for _, old, new in _join(_below(encode(self._root), streamed), images):
            if old:
                self.comparison.known += len(new)
            else:
                yield from new

    def _new_images(self, images: Iterator[_Row], packed: Iterator[_Row]) -> Iterator[_Row]:
        for source, old, new in _join(packed, images):
            in_shards = [row[:-1] for row in old if row[-1]]
            unmatched, replaced = _unmatched(new, in_shards, _identity)
            # A rejected image is rejected again as it is; once it has changed, it may be packed.
            unmatched, _ = _unmatched(
                unmatched, [row[:-1] for row in old if not row[-1]], _identity
            )
            self.comparison.known += len(new) - len(unmatched)
            # An image with the source of a packed one that is gone is a new version of it.
            if decode(source) in self._removed:
                continue
            changed = min(len(unmatched), replaced)
            self.comparison.changed += changed
            self.comparison.missing += replaced - changed
            if changed and len(self.comparison.first_changed) < MAX_NAMED:
                self.comparison.first_changed.append(decode(source))
            yield from unmatched[changed:]

    def rejected(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Yield the new rejected inputs of ``batches``, which are sorted."""
        columns = REJECTED_SCHEMA.names
        packed = [
            part.files.read(REJECTED, columns, 0, len(part)) for part in self._packed.rejected
        ]

        def new_rows(rows: Iterator[_Row]) -> Iterator[_Row]:
            for _, old, new in _join(_merge(packed), rows):
                yield from _unmatched(new, old, lambda row: row)[0]

        yield from _filter(batches, new_rows)


def _below(root: bytes, streamed: Iterator[_Row]) -> Iterator[_Row]:
    """Yield what follows ``root`` in the addresses of streamed images that begin with it."""
    for (address,) in streamed:
        if address.startswith(root):
            yield (address[len(root) :],)


def _identity(image: _Row) -> _Row:
    """Return what :data:`_PACKED` is for an image of a sorter."""
    source, _, size, caption, address, caption_bytes, fields = image
    sample_bytes = packed_bytes(size or 0, caption_bytes or 0, len(fields or b""))
    return source, size, caption, sample_bytes, fields, _extension(address)


def _extension(address: bytes | None) -> bytes | None:
    return None if address is None else address.rpartition(b".")[2]


def _rows(batches: Iterable[pa.RecordBatch]) -> Iterator[_Row]:
    return chain.from_iterable(map(batch_rows, batches))


def _merge(parts: Iterable[Iterable[pa.RecordBatch]]) -> Iterator[_Row]:
    """Merge rows that are sorted by their first column."""
    return heapq.merge(*map(_rows, parts), key=itemgetter(0))


def _join(
    packed: Iterator[_Row], images: Iterator[_Row]
) -> Iterator[tuple[bytes, list[_Row], list[_Row]]]:
    """Yield each source with its packed rows and its new ones; both are sorted by source."""
    tagged = heapq.merge(
        ((row[0], 0, row) for row in packed),
        ((row[0], 1, row) for row in images),
        key=itemgetter(0),
    )
    for source, group in groupby(tagged, key=itemgetter(0)):
        rows: tuple[list[_Row], list[_Row]] = [], []
        for _, side, row in group:
            rows[side].append(row)
        yield source, *rows


def _unmatched(
    new: Sequence[_Row], old: Sequence[_Row], identity: Callable[[_Row], _Row]
) -> tuple[list[_Row], int]:
    """Return the new rows without an equal old one each, and the number of old rows without one."""
    left = Counter(old)
    unmatched = []
    for row in new:
        key = identity(row)
        if left[key] > 0:
            left[key] -= 1
        else:
            unmatched.append(row)
    return unmatched, left.total()


def _filter(
    batches: Iterable[pa.RecordBatch], select: Callable[[Iterator[_Row]], Iterator[_Row]]
) -> Iterator[pa.RecordBatch]:
    """Yield the rows of ``batches`` that ``select`` selects of all rows."""
    every = iter(batches)
    first = next(every, None)
    selected = select(_rows([] if first is None else chain([first], every)))
    while rows := list(islice(selected, _BATCH_ROWS)):
        assert first is not None
        yield record_batch(rows, first.schema)
