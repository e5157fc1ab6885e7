"""Selects the rows of a table, or the samples of an index, by an SQL condition, with DuckDB.

The condition is an expression, not a statement, and reaches nothing but the table's columns: access
to files and the network is disabled. It is evaluated in bounded memory, before any row is used.

A condition that may select other rows of the same table later is refused: a pack that is
interrupted, and a job that resumes, evaluate it again, perhaps on another day.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray
from sm_train.entrypoints.base.pip_install import install_command
from sm_train.entrypoints.sample_metadata.column_types import ColumnType
from sm_train.entrypoints.sample_metadata.text_columns import TextColumn, is_missing

if TYPE_CHECKING:
    import duckdb

NUMBER = "row number"
"""The column with the number of a row, in every batch."""

DOCUMENT_SCHEMA = pa.schema([pa.field(NUMBER, pa.int64()), pa.field("document", pa.string())])


def comparable(cells: pa.Array) -> pa.Array:
    """Return cells of a table as conditions compare them, in every format alike.

    NaN is NULL, also in a struct or a list: a missing score fulfills no condition. Times with a
    zone are those of UTC, and nanoseconds are cut off.
    """
    kind = cells.type
    if pa.types.is_dictionary(kind):
        return comparable(cells.dictionary_decode())
    if pa.types.is_floating(kind):
        wide = cells.cast(pa.float32()) if pa.types.is_float16(kind) else cells
        return pc.if_else(pc.is_nan(wide), pa.scalar(None, wide.type), wide)
    if pa.types.is_timestamp(kind):
        return cells.cast(pa.timestamp("us", kind.tz), safe=False).cast(pa.timestamp("us"))
    if pa.types.is_struct(kind):
        fields = [kind.field(number) for number in range(kind.num_fields)]
        parts = [comparable(pc.struct_field(cells, [number])) for number in range(len(fields))]
        named = [field.with_type(part.type) for field, part in zip(fields, parts, strict=True)]
        return pa.StructArray.from_arrays(parts, fields=named, mask=cells.is_null())
    types = pa.types
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        lengths = np.asarray(pc.list_value_length(cells).fill_null(0).to_numpy(), np.int32)
        offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
        is_null = np.append(np.asarray(cells.is_null()), False)
        starts = pa.array(offsets, pa.int32(), mask=is_null)
        return pa.ListArray.from_arrays(starts, comparable(cells.flatten()))
    return cells


class ConditionError(ValueError):
    """A condition cannot be used; the message is one line that names the option."""


class RowFilter:
    """The condition ``where`` on the columns of the table ``name``; a context manager.

    ``columns`` are the names in the condition, in lower case. One of the ``use_`` methods names the
    rows. The database lies in a temporary folder. ``option`` names the condition in messages, and
    ``fix`` says why it must select the same rows every time.

    Raises:
        ConditionError: DuckDB is not installed.
    """

    def __init__(
        self,
        name: str,
        where: str,
        *,
        option: str = "--where",
        fix: str = "an interrupted pack could not be resumed",
    ) -> None:
        if find_spec("duckdb") is None:
            raise ConditionError(
                f"duckdb: is not installed; {option} needs it: {install_command('where')}"
            )
        self._name, self._where = name, where
        self._option, self._fix = option, fix
        self._is_checked = False
        self._texts: dict[str, TextColumn] = {}
        self._folder = TemporaryDirectory(prefix="sm-train-where-")
        self._connection = _connect(Path(self._folder.name))
        self.columns, _ = _names_in(self._connection, where)

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
        table = _ArrowTable(self._connection, "documents", DOCUMENT_SCHEMA)
        texts: dict[str, TextColumn] = {}
        names: dict[str, str] = {}
        for number, row in rows:
            used = {name: row[name] for name in row if name.lower() in self.columns}
            for name, value in used.items():
                if names.setdefault(name.lower(), name) != name:
                    raise ConditionError(
                        f"{self._option}: {self._name} has the keys {names[name.lower()]} and "
                        f"{name}, which SQL cannot tell apart; rename one"
                    )
                if value is not None:
                    text = value if isinstance(value, str) else "no date"
                    texts.setdefault(name, TextColumn()).add(number, text)
            table.add((number, _json(used)))
        table.flush()
        query = "SELECT json_group_structure(document::JSON) FROM documents"
        [(structure,)] = self._connection.sql(query).fetchall()
        columns = _quoted(NUMBER)
        if structure is not None and isinstance(json.loads(structure), dict):  # uses any column
            # Differences of unsigned integers would overflow.
            # A key with several types holds texts.
            signed = structure.replace('"UBIGINT"', '"HUGEINT"').replace('"JSON"', '"VARCHAR"')
            columns += f", unnest(from_json(document, '{signed.replace(chr(39), chr(39) * 2)}'))"
        casts = [
            _cast(name, column.kind)
            for name, column in texts.items()
            if column.kind in ("date", "timestamp")
        ]
        replaced = f" REPLACE ({', '.join(casts)})" if casts else ""
        self._connection.execute(
            f"CREATE VIEW rows AS SELECT *{replaced} FROM (SELECT {columns} FROM documents)"
        )

    def use_texts(self, names: Sequence[str], rows: Iterable[tuple[int, dict[str, Any]]]) -> None:
        """Filter numbered rows of texts; a column is numeric if all of its cells are numbers."""
        used = [name for name in names if name.lower() in self.columns]
        fields = [pa.field(name, pa.string()) for name in used]
        table = _ArrowTable(
            self._connection, "texts", pa.schema([pa.field(NUMBER, pa.int64()), *fields])
        )
        found = {name: TextColumn() for name in used}
        for number, row in rows:
            for name, column in found.items():
                column.add(number, row[name])
            cells = (None if is_missing(row[name]) else _text(row[name]) for name in used)
            table.add((number, *cells))
        table.flush()
        self._texts = found
        casts = [_cast(name, column.kind) for name, column in found.items()]
        columns = ", ".join([_quoted(NUMBER), *casts])
        self._connection.execute(f"CREATE VIEW rows AS SELECT {columns} FROM texts")

    def matching(self, columns: Sequence[str]) -> Iterator[int]:
        """Yield the numbers of the rows that fulfil the condition, ascending.

        ``columns`` are all columns of the table, for messages.

        Raises:
            ConditionError: the condition is invalid, or may select other rows later.
        """
        with self._explained(columns):
            numbers = self._matching().order(_quoted(NUMBER))
            for batch in _read(numbers):
                yield from batch.column(0).to_pylist()

    def mask(self, rows: pa.Table, columns: Sequence[str]) -> NDArray[np.bool_]:
        """Return whether each of ``rows``, numbered from 0, fulfils the condition.

        ``columns`` are all columns, for messages.

        Raises:
            ConditionError: as in :meth:`matching`.
        """
        with self._explained(columns):
            self._connection.register("rows", rows)
            fulfilled = np.zeros(rows.num_rows, np.bool_)
            for batch in _read(self._matching()):
                fulfilled[batch.column(0).to_numpy()] = True
        return fulfilled

    def _matching(self) -> duckdb.DuckDBPyRelation:
        """Return the numbers of the rows that fulfil the condition, in any order."""
        view = self._connection.view("rows")
        found = view.filter(self._where)
        if not self._is_checked:
            self._require_reproducible(view)
            self._is_checked = True
        return found.project(_quoted(NUMBER))

    @contextmanager
    def _explained(self, columns: Sequence[str]) -> Iterator[None]:
        import duckdb

        try:
            yield
        except duckdb.Error as error:
            raise ConditionError(f"{self._option}: {self._explain(str(error), columns)}") from None

    def _require_reproducible(self, rows: duckdb.DuckDBPyRelation) -> None:
        """Check the functions in the condition on the columns of ``rows``, which is not read.

        DuckDB lists for each overload whether it is stable: a subtraction of numbers is, one of
        times with a time zone is not. So the overloads that it binds for these columns decide. Its
        binder replaces some constant calls by their values; such a call is refused if no overload
        of its name is stable. The list calls ``age`` with one argument stable, although it counts
        from today.

        Raises:
            ConditionError: a function depends on the time, on chance or on the session.
        """
        columns, functions = _names_in(self._connection, self._where)
        own = {name.lower() for name in rows.columns}
        # SQL reads CURRENT_TIME without parentheses as the function get_current_time.
        keywords = {f"get_{name}" for name in columns - own} | (columns - own)
        overloads = _overloads(self._connection)
        for name in sorted(functions | keywords):
            if name == "age/1" or (name in overloads and not any(overloads[name].values())):
                raise self._refused(name.partition("/")[0])
        for name, types in self._bound_functions(rows):
            listed = overloads.get(name, {})
            # Generic functions, such as those of lists, have no exact match.
            alike = [listed[known] for known in listed if len(known) == len(types)]
            if not listed.get(types, all(alike)):
                raise self._refused(name, types)

    def _refused(self, name: str, types: Collection[str] = ()) -> ConditionError:
        if not types:
            return ConditionError(
                f"{self._option}: {name}() returns another value each time, so {self._fix}; use "
                "columns of the table, and a date as in DATE '2027-06-01'"
            )
        return ConditionError(
            f"{self._option}: {name}({', '.join(types)}) depends on the settings of the session, "
            f"so {self._fix}; cast times to TIMESTAMP"
        )

    def _bound_functions(
        self, rows: duckdb.DuckDBPyRelation
    ) -> Iterator[tuple[str, tuple[str, ...]]]:
        """Yield the name and the types of the arguments of every function that DuckDB would call.

        Raises:
            ConditionError: DuckDB cannot bind the condition.
        """
        columns = ", ".join(
            f"CAST(NULL AS {kind}) AS {_quoted(name)}"
            for name, kind in zip(rows.columns, rows.types, strict=True)
        )
        query = f"SELECT 1 FROM (SELECT {columns}) WHERE (\n{self._where}\n)"
        [(text,)] = self._connection.execute("SELECT json_serialize_plan(?)", [query]).fetchall()
        plan = json.loads(text)
        if plan["error"]:
            raise ConditionError(f"{self._option}: {self._explain(plan['error_message'], ())}")
        for node in _nodes(plan):
            if node.get("expression_class") == "BOUND_FUNCTION":
                types = tuple(argument["id"] for argument in node["arguments"])
                yield node["qname"]["path"][-1].lower(), types

    def _explain(self, message: str, columns: Sequence[str]) -> str:
        if unknown := re.search(r'Referenced column "(.*?)" not found', message):
            similar = get_close_matches(unknown[1].lower(), columns, n=1)
            hint = f" (did you mean {similar[0]}?)" if similar else ""
            return f"{self._name} has no column {unknown[1]}{hint}; it has {', '.join(columns)}"
        first = message.splitlines()[0]
        if "table function" in first or "SUBQUERY" in first.upper():
            return f"{self._where}: subqueries are not supported; write a condition on columns"
        return f"{self._where}: {first}{self._hint(first)}"

    def _hint(self, message: str) -> str:
        """Return the first cell that keeps a column of numbers from being one."""
        if "type VARCHAR" not in message:
            return ""
        for name, column in self._texts.items():
            if column.kind == "text" and column.numbers and column.first_other is not None:
                row, text = column.first_other
                return f"; {name} holds texts, the first in row {row}: {text!r:.40}"
        return ""


def _json(row: dict[str, Any]) -> str:
    """Return a row as JSON; NaN, which JSON does not have, and what is not UTF-8 are replaced."""
    try:
        text = json.dumps(row, ensure_ascii=False, allow_nan=False)
    except ValueError:
        without = json.loads(json.dumps(row), parse_constant=lambda _: None)
        text = json.dumps(without, ensure_ascii=False)
    return _text(text) or ""


def _text(value: str | None) -> str | None:
    return None if value is None else value.encode(errors="replace").decode()


_SQL: dict[str, str] = {
    "boolean": "BOOLEAN",
    "integer": "BIGINT",
    "unsigned": "HUGEINT",
    "number": "DOUBLE",
    "date": "DATE",
    "timestamp": "TIMESTAMPTZ",
    "text": "VARCHAR",
}
"""SQL's type of a column of texts."""

MEMORY_LIMIT = "512MB"
"""What DuckDB may use before it writes to its file."""

THREADS = 2
"""More threads sort little faster and need more memory."""

_ROWS = 2**14
"""Rows that are inserted at once, and rows of a batch of results."""


def _connect(folder: Path) -> duckdb.DuckDBPyConnection:
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


def _read(relation: duckdb.DuckDBPyRelation) -> Iterator[pa.RecordBatch]:
    """Yield the rows of a query, some thousand at a time, while they are computed.

    The results of a connection's ``execute`` would all be in memory first.
    """
    yield from relation.to_arrow_reader(_ROWS)


class _ArrowTable:
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
        cells = zip(*self._rows, strict=True)
        columns = [
            pa.array(column, field.type) for column, field in zip(cells, self._schema, strict=True)
        ]
        rows = pa.Table.from_arrays(columns, schema=self._schema)
        self._rows.clear()
        self._connection.register("new_rows", rows)
        self._connection.execute(f"INSERT INTO {self._name} SELECT * FROM new_rows")
        self._connection.unregister("new_rows")


Overloads = dict[str, dict[tuple[str, ...], bool]]
"""Function → types of the arguments → whether the result depends on the arguments alone."""


def _names_in(connection: duckdb.DuckDBPyConnection, where: str) -> tuple[set[str], set[str]]:
    """Return the names of columns, and of called functions, in lower case.

    ``age`` with one argument is ``age/1``: it counts from today.
    """
    query = f"SELECT 1 WHERE (\n{where}\n)"
    [(tree,)] = connection.execute("SELECT json_serialize_sql(?)", [query]).fetchall()
    columns: set[str] = set()
    functions: set[str] = set()
    for node in _nodes(json.loads(tree)):
        columns.update(name.lower() for name in node.get("column_names", ()))
        name = str(node.get("function_name", "")).lower()
        is_since_today = name == "age" and len(node.get("arguments", ())) == 1
        functions.add("age/1" if is_since_today else name)
    return columns, functions


def _overloads(connection: duckdb.DuckDBPyConnection) -> Overloads:
    listed = connection.sql(
        "SELECT lower(function_name), parameter_types, stability = 'CONSISTENT' "
        "FROM duckdb_functions() WHERE stability IS NOT NULL"
    ).fetchall()
    found: Overloads = defaultdict(dict)
    for name, types, is_stable in listed:
        found[name][tuple(types)] = is_stable
    return found


def _cast(name: str, kind: ColumnType) -> str:
    """Return the SQL of a column of texts in a type; times are those of UTC, without a zone.

    What :func:`is_missing` says of a text holds here, too.
    """
    text = f"CASE WHEN lower({_quoted(name)}) IN ('', 'nan') THEN NULL ELSE {_quoted(name)} END"
    cell = f"CAST({text} AS {_SQL[kind]})"
    return f"{f'CAST({cell} AS TIMESTAMP)' if kind == 'timestamp' else cell} AS {_quoted(name)}"


def _quoted(name: str) -> str:
    """Return a column's name as an SQL identifier."""
    return '"' + name.replace('"', '""') + '"'


def _nodes(value: Any) -> Iterator[dict[str, Any]]:
    """Yield all objects of a JSON document."""
    if isinstance(value, dict):
        yield value
        value = list(value.values())
    for item in value if isinstance(value, list) else ():
        yield from _nodes(item)
