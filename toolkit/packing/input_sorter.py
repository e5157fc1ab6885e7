"""Sorts the images of a source by path, in bounded memory: SQLite keeps them in a file."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
from sm_train.entrypoints.data.shard_index import RejectedInput
from sm_train.entrypoints.packing.plan_files import REJECTED_SCHEMA, caption_next_to, decode, encode
from sm_train.toolkit.packing.file_kinds import HEIC_SUFFIXES
from sm_train.toolkit.packing.source_image import SourceImage
from sm_train.toolkit.packing.sqlite_tables import Table, connect, read

_HEIC = tuple(HEIC_SUFFIXES)

_IMAGES = "number, source, address, bytes, caption, caption_address, caption_bytes, text"
_TEXTS = "name, bytes, modified_ns"
_INDEXES = (
    "CREATE INDEX described ON images (text) WHERE text IS NOT NULL",
    "CREATE INDEX other ON others (text)",
    "CREATE INDEX named ON texts (name)",
)
_SORTED = """
    SELECT source, address, images.bytes, caption, caption_address,
        coalesce(caption_bytes, texts.bytes)
    FROM images LEFT JOIN texts ON images.text = texts.name
    ORDER BY source, number
"""
_SORTED_SCHEMA = pa.schema(
    [
        pa.field("source", pa.binary()),
        pa.field("address", pa.binary()),
        pa.field("bytes", pa.int64()),
        pa.field("caption", pa.binary()),
        pa.field("caption_address", pa.binary()),
        pa.field("caption_bytes", pa.int64()),
    ]
)
_DESCRIBED = "EXISTS (SELECT 1 FROM images WHERE text = name)"
_STRAY = f"""
    FROM texts
    WHERE NOT {_DESCRIBED} AND NOT EXISTS (SELECT 1 FROM others WHERE text = name)
"""


class InputSorter:
    """Takes images and rejected inputs in any order, and returns them sorted; a context manager.

    ``root`` precedes a source in most addresses, which are then not stored. Images with equal
    sources keep the order in which they were added. ``newest_ns`` is the latest modification of
    any of them, ``local`` the address of one that is a local file, and ``filtered`` the number of
    rows of a table that do not fulfil its condition.
    """

    def __init__(self, folder: Path, root: str) -> None:
        self.root = root
        self.images = self.rejected = self.filtered = self.newest_ns = 0
        self.local: str | None = None
        self.has_heic = False
        self.connection = connect(folder)
        self._images = Table(self.connection, "images", _IMAGES)
        self._texts = Table(self.connection, "texts", _TEXTS)
        self._others = Table(self.connection, "others", "text")
        self._rejected = Table(self.connection, "rejected", "source, reason, detail")

    def __enter__(self) -> InputSorter:
        return self

    def __exit__(self, *_: object) -> None:
        self.connection.close()

    def add(self, image: SourceImage, text: str | None = None) -> None:
        """Add an image; ``text`` is the name of its caption, if that is added as well."""
        address, caption_address = image.address, image.caption_address
        caption = None if image.caption is None else encode(image.caption)
        self._images.add(
            (
                self.images,
                encode(image.source),
                None if address == self.root + image.source else encode(address),
                image.bytes,
                caption,
                None
                if caption_address in (None, caption_next_to(address))
                else encode(caption_address),
                image.caption_bytes if caption is None else len(caption),
                None if text is None else encode(text),
            )
        )
        self.images += 1
        self.newest_ns = max(self.newest_ns, image.modified_ns)
        if self.local is None and not address.startswith("s3://"):
            self.local = address
        self.has_heic = self.has_heic or image.source.lower().endswith(_HEIC)

    def add_text(self, name: str, size: int, modified_ns: int) -> None:
        """Add a ``.txt`` file, which may be the caption of an image."""
        self._texts.add((encode(name), size, modified_ns))

    def add_other(self, text: str) -> None:
        """Add a file of another kind, of which ``text`` is a description."""
        self._others.add((encode(text),))

    def reject(self, item: RejectedInput) -> None:
        """Add a rejected input."""
        self._rejected.add(tuple(map(encode, (item.source, item.reason, item.detail))))
        self.rejected += 1

    def sorted_images(self) -> Iterator[pa.RecordBatch]:
        """Yield all images, sorted by source."""
        yield from read(self.connection, _SORTED, _SORTED_SCHEMA)

    def flush(self) -> None:
        """Complete the tables: nothing is added after it."""
        for table in (self._images, self._texts, self._others, self._rejected):
            table.flush()
        for statement in _INDEXES:
            self.connection.execute(statement)
        query = f"SELECT max(modified_ns) FROM texts WHERE {_DESCRIBED}"
        [(newest_text,)] = self.connection.execute(query)
        self.newest_ns = max(self.newest_ns, newest_text or 0)

    def stray_texts(self, most: int) -> tuple[int, list[str]]:
        """Return how many texts describe no file, and the names of the first ``most``."""
        [(count,)] = self.connection.execute(f"SELECT count(*) {_STRAY}")
        names = self.connection.execute(f"SELECT name {_STRAY} ORDER BY name LIMIT {most}")
        return count, [decode(name) for (name,) in names]

    def sorted_rejected(self) -> Iterator[pa.RecordBatch]:
        """Yield all rejected inputs, sorted by source, reason and detail."""
        query = "SELECT source, reason, detail FROM rejected ORDER BY 1, 2, 3"
        yield from read(self.connection, query, REJECTED_SCHEMA)
