"""Sorts the images of a source by path, in bounded memory: SQLite keeps them in a file.

Texts are stored as bytes: a file name need not be UTF-8. The order of UTF-8 bytes is that of
Python's strings.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

import pyarrow as pa
from sm_train.entrypoints.data_prep.packing.embedded_images import file_of
from sm_train.entrypoints.data_prep.packing.plan import CAPTION_SUFFIXES, next_to
from sm_train.entrypoints.data_prep.packing.plan_files import (
    REJECTED_SCHEMA,
    decode,
    encode,
    record_batch,
)
from sm_train.entrypoints.shards.shard_index import RejectedInput
from sm_train.toolkit.data_prep.packing.file_kinds import HEIC_SUFFIXES
from sm_train.toolkit.data_prep.packing.source_image import SourceImage

REMOVED = "image-removed"
"""The reason with which an image is rejected that `sm-train remove` removed."""

CACHE_BYTES = 64 * 2**20
"""Memory for pages, and for rows that are being sorted, before SQLite writes to its files."""

_ROWS = 2**14
"""Rows that are inserted at once, and rows of a batch of results."""


def connect(folder: Path) -> sqlite3.Connection:
    """Create a database in ``folder``; it is for this process alone and does not survive it."""
    # One transaction that never ends: a database that is removed needs no journal.
    connection = sqlite3.connect(folder / "inputs.sqlite", isolation_level=None)
    for setting in (
        "journal_mode = OFF",
        "synchronous = OFF",
        "locking_mode = EXCLUSIVE",
        "temp_store = FILE",
        f"cache_size = -{CACHE_BYTES // 1024}",
    ):
        connection.execute(f"PRAGMA {setting}")
    connection.execute("BEGIN EXCLUSIVE")
    return connection


def _read(
    connection: sqlite3.Connection, query: str, schema: pa.Schema, values: dict[str, Any]
) -> Iterator[pa.RecordBatch]:
    """Yield the rows of a query, some thousand at a time."""
    cursor = connection.execute(query, values)
    while rows := cursor.fetchmany(_ROWS):
        yield record_batch(rows, schema)


class _Table:
    """A table that is filled row by row."""

    def __init__(self, connection: sqlite3.Connection, name: str, columns: str) -> None:
        self._connection = connection
        self._rows: list[tuple[Any, ...]] = []
        connection.execute(f"CREATE TABLE {name} ({columns})")
        self._insert = f"INSERT INTO {name} VALUES ({', '.join('?' * len(columns.split(',')))})"

    def add(self, row: tuple[Any, ...]) -> None:
        """Add a row; it is in the table after :meth:`flush`."""
        self._rows.append(row)
        if len(self._rows) >= _ROWS:
            self.flush()

    def flush(self) -> None:
        """Insert the rows that were added."""
        self._connection.executemany(self._insert, self._rows)
        self._rows.clear()


_HEIC = tuple(HEIC_SUFFIXES)

_IMAGES = (
    "number, source, address, bytes, caption, caption_address, caption_bytes, stem, table_fields"
)
_TEXTS = "name, stem, suffix, bytes, modified_ns"
_INDEXES = (
    "CREATE INDEX described ON images (stem) WHERE stem IS NOT NULL",
    "CREATE INDEX other ON others (stem)",
    "CREATE INDEX named ON texts (stem, suffix)",
)
_SORTED = """
    SELECT source, address, images.bytes, caption,
        coalesce(
            caption_address,
            CASE WHEN first.stem IS NULL AND second.stem IS NOT NULL
                THEN CAST(:root || second.stem || second.suffix AS BLOB) END
        ),
        coalesce(caption_bytes, first.bytes, second.bytes), table_fields
    FROM images
    LEFT JOIN texts first ON images.stem = first.stem AND first.suffix = :first
    LEFT JOIN texts second ON images.stem = second.stem AND second.suffix = :second
    ORDER BY source, number
"""
_SUFFIXES = dict(zip(("first", "second"), CAPTION_SUFFIXES, strict=True))
_SORTED_SCHEMA = pa.schema(
    [
        pa.field("source", pa.binary()),
        pa.field("address", pa.binary()),
        pa.field("bytes", pa.int64()),
        pa.field("caption", pa.binary()),
        pa.field("caption_address", pa.binary()),
        pa.field("caption_bytes", pa.int64()),
        pa.field("table_fields", pa.binary()),
    ]
)
_DESCRIBED = "EXISTS (SELECT 1 FROM images WHERE images.stem = texts.stem)"
_STRAY = f"""
    FROM texts
    WHERE suffix = :suffix AND (
        NOT {_DESCRIBED} AND NOT EXISTS (SELECT 1 FROM others WHERE others.stem = texts.stem)
        OR suffix = :second AND EXISTS (
            SELECT 1 FROM texts first WHERE first.stem = texts.stem AND first.suffix = :first
        )
    )
"""


class InputSorter:
    """Takes images and rejected inputs in any order, and returns them sorted; a context manager.

    ``root`` precedes a source in most addresses, which are then not stored. Images with equal
    sources keep the order in which they were added. ``newest_ns`` is the latest modification of
    any of them, ``local`` the address of one that is a local file, and ``filtered`` the number of
    rows of a table that do not fulfil its condition. Images with a source in ``removed`` are
    rejected.
    """

    def __init__(self, folder: Path, root: str, removed: frozenset[str] = frozenset()) -> None:
        self.root, self._removed = root, removed
        self.images = self.rejected = self.filtered = self.newest_ns = 0
        self.local: str | None = None
        self.has_heic = False
        self.connection = connect(folder)
        self._images = _Table(self.connection, "images", _IMAGES)
        self._texts = _Table(self.connection, "texts", _TEXTS)
        self._others = _Table(self.connection, "others", "stem")
        self._rejected = _Table(self.connection, "rejected", "source, reason, detail")

    def __enter__(self) -> InputSorter:
        return self

    def __exit__(self, *_: object) -> None:
        self.connection.close()

    def add(self, image: SourceImage, stem: str | None = None) -> None:
        """Add an image; ``stem`` is the name of its captions, if these are added as well."""
        if image.source in self._removed:
            self.reject(RejectedInput(image.source, REMOVED, "see `sm-train remove`"))
            if stem is not None:
                self.add_other(stem)
            return
        address, caption_address = image.address, image.caption_address
        caption = None if image.caption is None else encode(image.caption)
        self._images.add(
            (
                self.images,
                encode(image.source),
                None if address == self.root + image.source else encode(address),
                image.bytes,
                caption,
                None if caption_address in (None, next_to(address)) else encode(caption_address),
                image.caption_bytes if caption is None else len(caption),
                None if stem is None else encode(stem),
                None if image.table_fields is None else encode(image.table_fields),
            )
        )
        self.images += 1
        self.newest_ns = max(self.newest_ns, image.modified_ns)
        if self.local is None and not (file := file_of(address)).startswith("s3://"):
            self.local = file
        self.has_heic = self.has_heic or image.source.lower().endswith(_HEIC)

    def add_text(self, name: str, size: int, modified_ns: int) -> None:
        """Add a file that may be the caption of an image, by its extension."""
        suffix = PurePosixPath(name).suffix
        # One in capitals is of no image, and counted with the others.
        stem = encode(name.removesuffix(suffix)) if suffix in CAPTION_SUFFIXES else None
        self._texts.add((encode(name), stem, suffix.lower(), size, modified_ns))

    def add_other(self, stem: str) -> None:
        """Add a file of another kind, by its name without extension."""
        self._others.add((encode(stem),))

    def reject(self, item: RejectedInput) -> None:
        """Add a rejected input."""
        self._rejected.add(tuple(map(encode, (item.source, item.reason, item.detail))))
        self.rejected += 1

    def sorted_images(self) -> Iterator[pa.RecordBatch]:
        """Yield all images, sorted by source."""
        values = {"root": encode(self.root), **_SUFFIXES}
        yield from _read(self.connection, _SORTED, _SORTED_SCHEMA, values)

    def flush(self) -> None:
        """Complete the tables: nothing is added after it."""
        for table in (self._images, self._texts, self._others, self._rejected):
            table.flush()
        for statement in _INDEXES:
            self.connection.execute(statement)
        query = f"SELECT max(modified_ns) FROM texts WHERE {_DESCRIBED}"
        [(newest_text,)] = self.connection.execute(query)
        self.newest_ns = max(self.newest_ns, newest_text or 0)

    def stray_texts(self, most: int) -> Iterator[tuple[str, int, list[str]]]:
        """Yield how many texts of each extension describe no file, and ``most`` of their names.

        A second caption of an image is one of them.
        """
        for suffix in CAPTION_SUFFIXES:
            values = {**_SUFFIXES, "suffix": suffix}
            [(count,)] = self.connection.execute(f"SELECT count(*) {_STRAY}", values)
            query = f"SELECT name {_STRAY} ORDER BY name LIMIT {most}"
            names = self.connection.execute(query, values)
            yield suffix, count, [decode(name) for (name,) in names]

    def sorted_rejected(self) -> Iterator[pa.RecordBatch]:
        """Yield all rejected inputs, sorted by source, reason and detail."""
        query = "SELECT source, reason, detail FROM rejected ORDER BY 1, 2, 3"
        yield from _read(self.connection, query, REJECTED_SCHEMA, {})
