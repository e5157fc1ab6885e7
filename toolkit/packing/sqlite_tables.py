"""A SQLite database in a temporary folder: tables that are larger than the memory.

Texts are stored as bytes: a file name need not be UTF-8. The order of UTF-8 bytes is that of
Python's strings.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
from sm_train.entrypoints.packing.plan_files import record_batch

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


def read(connection: sqlite3.Connection, query: str, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    """Yield the rows of a query, some thousand at a time."""
    cursor = connection.execute(query)
    while rows := cursor.fetchmany(_ROWS):
        yield record_batch(rows, schema)


class Table:
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
