"""Selects the rows of a table by an SQL condition on its columns, with DuckDB.

The condition is an expression, not a statement, and reaches nothing but the table's columns: access
to files and the network is disabled. It is evaluated in bounded memory, before any row is used.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from difflib import get_close_matches
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pyarrow as pa
from sm_train.toolkit.errors import UserError
from sm_train.toolkit.extras import require_extra
from sm_train.toolkit.packing.condition_check import names_in, quoted, require_reproducible
from sm_train.toolkit.packing.duckdb_tables import ArrowTable, connect, read

NUMBER = "row number"
"""The column with the number of a row, in every batch."""

DOCUMENT_SCHEMA = pa.schema([pa.field(NUMBER, pa.int64()), pa.field("document", pa.string())])


class RowFilter:
    """The condition ``where`` on the columns of the table ``name``; a context manager.

    ``columns`` are the names in the condition, in lower case. One of the ``use_`` methods names the
    rows. The database lies in a temporary folder.

    Raises:
        UserError: DuckDB is not installed.
    """

    def __init__(self, name: str, where: str) -> None:
        require_extra("where", "duckdb", purpose="--where")
        self._name, self._where = name, where
        self._folder = TemporaryDirectory(prefix="sm-train-where-")
        self._connection = connect(Path(self._folder.name))
        self.columns, _ = names_in(self._connection, where)

    def __enter__(self) -> RowFilter:
        return self

    def __exit__(self, *_: object) -> None:
        self._connection.close()
        self._folder.cleanup()

    def use_batches(self, schema: pa.Schema, batches: Iterable[pa.RecordBatch]) -> None:
        """Filter rows with typed columns, which are read once."""
        self._connection.register("rows", pa.RecordBatchReader.from_batches(schema, batches))

    def use_documents(self, rows: Iterable[tuple[int, dict[str, Any]]]) -> None:
        """Filter numbered JSON objects; the type of a column is that of all of its values."""
        table = ArrowTable(self._connection, "documents", DOCUMENT_SCHEMA)
        for number, row in rows:
            used = {name: row[name] for name in row if name.lower() in self.columns}
            table.add((number, _json(used)))
        table.flush()
        query = "SELECT json_group_structure(document::JSON) FROM documents"
        [(structure,)] = self._connection.sql(query).fetchall()
        columns = quoted(NUMBER)
        if structure is not None and isinstance(json.loads(structure), dict):  # uses any column
            # Differences of unsigned integers would overflow.
            signed = structure.replace('"UBIGINT"', '"HUGEINT"').replace("'", "''")
            columns += f", unnest(from_json(document, '{signed}'))"
        self._connection.execute(f"CREATE VIEW rows AS SELECT {columns} FROM documents")

    def use_texts(self, names: Sequence[str], rows: Iterable[tuple[int, dict[str, Any]]]) -> None:
        """Filter numbered rows of texts; a column is numeric if all of its cells are numbers."""
        used = [name for name in names if name.lower() in self.columns]
        fields = [pa.field(name, pa.string()) for name in used]
        table = ArrowTable(
            self._connection, "texts", pa.schema([pa.field(NUMBER, pa.int64()), *fields])
        )
        for number, row in rows:
            table.add((number, *(_text(row[name]) for name in used)))
        table.flush()
        columns = ", ".join([quoted(NUMBER), *map(self._convert, used)])
        self._connection.execute(f"CREATE VIEW rows AS SELECT {columns} FROM texts")

    def _convert(self, name: str) -> str:
        """Return the SQL of a column of texts in the type of all of its cells."""
        cell = quoted(name)
        query = f"""
            SELECT bool_and(regexp_full_match({cell}, '[+-]?[0-9]{{1,18}}')),
                bool_and(try_cast({cell} AS DOUBLE) IS NOT NULL)
            FROM texts WHERE {cell} <> ''
        """
        [(is_integer, is_number)] = self._connection.sql(query).fetchall()
        kind = "BIGINT" if is_integer else "DOUBLE" if is_number else "VARCHAR"
        return f"CAST(nullif({cell}, '') AS {kind}) AS {cell}"

    def matching(self, columns: Sequence[str]) -> Iterator[int]:
        """Yield the numbers of the rows that fulfil the condition, ascending.

        ``columns`` are all columns of the table, for messages.

        Raises:
            UserError: the condition is invalid, or may select other rows later.
        """
        import duckdb

        try:
            view = self._connection.view("rows")
            rows = view.filter(self._where)
            require_reproducible(self._connection, self._where, view)
            numbers = rows.project(quoted(NUMBER)).order(quoted(NUMBER))
            for batch in read(numbers):
                yield from batch.column(0).to_pylist()
        except duckdb.Error as error:
            raise UserError(f"--where: {self._explain(str(error), columns)}") from None

    def _explain(self, message: str, columns: Sequence[str]) -> str:
        if unknown := re.search(r'Referenced column "(.*?)" not found', message):
            similar = get_close_matches(unknown[1].lower(), columns, n=1)
            hint = f" (did you mean {similar[0]}?)" if similar else ""
            return f"{self._name} has no column {unknown[1]}{hint}; it has {', '.join(columns)}"
        return f"{self._where}: {message.splitlines()[0]}"


def _json(row: dict[str, Any]) -> str:
    """Return a row as JSON; NaN, which JSON does not have, and what is not UTF-8 are replaced."""
    try:
        text = json.dumps(row, ensure_ascii=False, allow_nan=False)
    except ValueError:
        text = json.dumps({name: value for name, value in row.items() if value == value})
    return _text(text) or ""


def _text(value: str | None) -> str | None:
    return None if value is None else value.encode(errors="replace").decode()
