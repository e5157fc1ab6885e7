"""A DuckDB database in a temporary folder, for conditions on tables larger than the memory."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from sm_train.entrypoints.packing.plan_files import record_batch

if TYPE_CHECKING:
    import duckdb

MEMORY_LIMIT = "512MB"
"""What DuckDB may use before it writes to its file."""

THREADS = 2
"""More threads sort little faster and need more memory."""

_ROWS = 2**14
"""Rows that are inserted at once, and rows of a batch of results."""


def connect(folder: Path) -> duckdb.DuckDBPyConnection:
    """Open a database in ``folder``; SQL reaches neither other files nor the network."""
    import duckdb

    connection = duckdb.connect(
        str(folder / "inputs.duckdb"),
        config={
            "memory_limit": MEMORY_LIMIT,
            "threads": THREADS,
            "temp_directory": str(folder / "spilled"),
            "preserve_insertion_order": False,
            "autoinstall_known_extensions": False,
            "autoload_known_extensions": False,
            "python_enable_replacements": False,
        },
    )
    # Conversions of times with a time zone must select the same rows on every machine.
    connection.execute("SET TimeZone = 'UTC'")
    connection.execute("SET enable_external_access = false")
    connection.execute("SET lock_configuration = true")
    return connection


def read(relation: duckdb.DuckDBPyRelation) -> Iterator[pa.RecordBatch]:
    """Yield the rows of a query, some thousand at a time, while they are computed.

    The results of a connection's ``execute`` would all be in memory first.
    """
    yield from relation.to_arrow_reader(_ROWS)


class ArrowTable:
    """A table with typed columns that is filled row by row."""

    def __init__(self, connection: duckdb.DuckDBPyConnection, name: str, schema: pa.Schema) -> None:
        self._connection, self._name, self._schema = connection, name, schema
        self._rows: list[tuple[Any, ...]] = []
        connection.register("new_rows", schema.empty_table())
        connection.execute(f"CREATE TABLE {name} AS SELECT * FROM new_rows")
        connection.unregister("new_rows")

    def add(self, row: tuple[Any, ...]) -> None:
        """Add a row; it is in the table after :meth:`flush`."""
        self._rows.append(row)
        if len(self._rows) >= _ROWS:
            self.flush()

    def flush(self) -> None:
        """Insert the rows that were added."""
        if not self._rows:
            return
        rows = pa.Table.from_batches([record_batch(self._rows, self._schema)])
        self._rows.clear()
        self._connection.register("new_rows", rows)
        self._connection.execute(f"INSERT INTO {self._name} SELECT * FROM new_rows")
        self._connection.unregister("new_rows")
