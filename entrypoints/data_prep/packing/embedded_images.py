"""Images that are bytes in the rows of a Parquet table, each with an address of its own.

Hugging Face's data sets store them so: a column of objects with ``bytes`` and ``path``. The images
of a shard are in neighboring rows, so a row group is read once for all of them, and kept.
"""

from __future__ import annotations

import io
import threading
from bisect import bisect_right
from functools import lru_cache, partial
from itertools import accumulate
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from sm_train.entrypoints.images.image_header import DecodeError
from sm_train.entrypoints.storage.object_file import open_object
from sm_train.entrypoints.storage.store import S3Access, open_store

_SCHEME = "row:"

_KEPT_GROUPS = 3
"""Row groups of a table in memory; those of a data set of images have some hundred megabytes."""


def embedded_address(table: str, column: str, row: int) -> str:
    """Return the address of the image in a row, from 0, of a table; ``column`` may be nested."""
    return f"{_SCHEME}{row}:{quote(column, safe='')}:{table}"


def is_embedded(address: str) -> bool:
    """Return whether an image lies in a table."""
    return address.startswith(_SCHEME)


def file_of(address: str) -> str:
    """Return the path or URI of the file that holds an image: its table, or itself."""
    return address.split(":", 3)[3] if is_embedded(address) else address


def read_embedded(address: str, access: S3Access) -> bytes:
    """Return the content of an image in a table.

    Raises:
        DecodeError: the row has none, or the table is damaged.
        OSError: the table cannot be read.
    """
    _, row, column, table = address.split(":", 3)
    return _open_table(table, access).read(unquote(column), int(row))


@lru_cache(maxsize=8)
def _open_table(location: str, access: S3Access) -> _EmbeddedTable:
    return _EmbeddedTable(location, access)


class _EmbeddedTable:
    """An open table, whose row groups the threads of this process share."""

    def __init__(self, location: str, access: S3Access) -> None:
        source: Any = Path(location)
        if location.startswith("s3://"):
            source = io.BufferedReader(open_object(open_store(access), location), 2**20)
        self._file = pq.ParquetFile(source)
        metadata = self._file.metadata
        counts = [metadata.row_group(group).num_rows for group in range(metadata.num_row_groups)]
        self._ends = list(accumulate(counts))
        self._lock = threading.Lock()
        self._values = lru_cache(maxsize=_KEPT_GROUPS)(partial(nested_column, self._file))

    def read(self, column: str, row: int) -> bytes:
        """Return the bytes in a row."""
        group = bisect_right(self._ends, row)
        first = self._ends[group - 1] if group else 0
        try:
            with self._lock:
                content = self._values(group, column)[row - first].as_py()
        except (pa.ArrowException, IndexError) as error:
            first_line, *_ = str(error).splitlines() or [""]
            raise DecodeError("image-unreadable", f"the table is damaged: {first_line}") from None
        if not isinstance(content, bytes):
            raise DecodeError("image-missing", "the row has no bytes")
        return content


def nested_column(file: pq.ParquetFile, group: int, column: str) -> pa.Array:
    """Return the values of a column in a row group; dots in its name lead into objects."""
    table = file.read_row_group(group, columns=[column], use_threads=False)
    values = table.column(0).combine_chunks()
    for name in column.split(".")[1:]:
        values = pc.struct_field(values, name)
    return values
