"""Previews the columns of a table: their types as `pack` understands them, and odd cells."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc
from sm_train.entrypoints.sample_metadata.column_types import (
    COLUMN_TYPES,
    ColumnType,
    common_type,
    declared_type,
    type_of,
)
from sm_train.entrypoints.sample_metadata.text_columns import cell_kind, is_missing, text_kind
from sm_train.toolkit.data_prep.packing.table_files import TableFile
from sm_train.toolkit.data_prep.packing.tables import json_rows, open_csv, open_parquet, well_formed
from sm_train.toolkit.terminal.formatting import plural

if TYPE_CHECKING:
    from pyarrow.parquet import ParquetFile

_MAX_CELLS, _MAX_CHARACTERS = 3, 60
"""Odd cells that are named of each column, and characters of each."""


@dataclass(frozen=True)
class OddCell:
    """A cell of another type than most of its column; ``row`` is its number, from 1."""

    file: str
    row: int
    text: str


@dataclass(frozen=True)
class ColumnPreview:
    """A column: its ``type``, the number of cells with a value and of those without.

    If most cells have the type ``most``, and some do not, these are ``odd``: their number, and the
    ``first`` of them. The column is then of texts.
    """

    name: str
    type: str
    values: int
    missing: int
    most: str | None = None
    odd: int = 0
    first: tuple[OddCell, ...] = ()


@dataclass
class _Cells:
    """The cells of a column so far, by type; the first of each, with where they are."""

    counts: Counter[str] = field(default_factory=Counter)
    missing: int = 0
    first: dict[str, list[OddCell]] = field(default_factory=dict)

    def add(self, kind: str | None, file: str, row: int, value: Any) -> None:
        if kind is None:
            self.missing += 1
            return
        self.counts[kind] += 1
        named = self.first.setdefault(kind, [])
        if len(named) < _MAX_CELLS:
            text = value if isinstance(value, str) else repr(value)
            named.append(OddCell(file, row, text[:_MAX_CHARACTERS]))

    @property
    def total(self) -> int:
        """The number of cells."""
        return self.counts.total() + self.missing

    def preview(self, name: str) -> ColumnPreview:
        values = self.counts.total()
        if not values:
            return ColumnPreview(name, "text", 0, self.missing)
        if nested := [kind for kind in ("list", "object") if self.counts[kind]]:
            kind = nested[0] if len(self.counts) == 1 else "mixed"
            return ColumnPreview(name, kind, values, self.missing)
        kind = _common(self.counts)
        most = max(_FAMILIES, key=lambda family: sum(self.counts[member] for member in family))
        odd = [other for other in self.counts if other not in most]
        count = sum(self.counts[other] for other in odd)
        if kind != "text" or "text" in most or 2 * count > values:
            return ColumnPreview(name, kind, values, self.missing)
        cells = sorted((cell for other in odd for cell in self.first[other]), key=_position)
        meant = _common([member for member in most if self.counts[member]])
        return ColumnPreview(
            name, kind, values, self.missing, meant, count, tuple(cells[:_MAX_CELLS])
        )


_FAMILIES: tuple[frozenset[str], ...] = (
    frozenset(("integer", "unsigned", "decimal", "number")),
    frozenset(("date", "timestamp")),
    frozenset(("boolean",)),
    frozenset(("text",)),
)
"""Types whose values are of one type together."""


def _common(kinds: Any) -> str:
    return reduce(common_type, kinds, None) or "text"


def _position(cell: OddCell) -> tuple[str, int]:
    return cell.file, cell.row


def preview_tables(files: Sequence[TableFile]) -> tuple[ColumnPreview, ...]:
    """Return the columns of the files of a table, in order. It reads all cells of CSV and JSONL.

    Raises:
        UserError: a file cannot be read.
    """
    columns: dict[str, _Cells] = {}
    declared: dict[str, ColumnPreview] = {}
    readers: dict[str, Callable[[TableFile], Iterator[tuple[int, Mapping[str, Any]]]]] = {
        ".csv": _csv_rows,
        ".jsonl": lambda file: json_rows(file, {}),
    }
    for file in files:
        if file.kind == ".parquet":
            for found in _parquet_columns(file):
                before = declared.get(found.name)
                declared[found.name] = found if before is None else _added(before, found)
            continue
        is_text = file.kind == ".csv"
        rows = 0
        totals = {name: cells.total for name, cells in columns.items()}
        for row, row_cells in readers[file.kind](file):
            rows += 1
            for name, value in row_cells.items():
                kind = _kind_of_text(value) if is_text else _kind_of_json(value)
                columns.setdefault(name, _Cells()).add(kind, file.name, row, value)
        for name, cells in columns.items():
            # Keys that a row of JSONL lacks, and columns that a file lacks.
            cells.missing += rows - (cells.total - totals.get(name, 0))
    for name, cells in columns.items():
        found = cells.preview(name)
        declared[name] = found if name not in declared else _added(declared[name], found)
    return tuple(declared.values())


def _csv_rows(file: TableFile) -> Iterator[tuple[int, Mapping[str, Any]]]:
    with open_csv(file) as reader:
        yield from well_formed(reader)


def _kind_of_text(text: str | None) -> str | None:
    return None if text is None or is_missing(text) else cell_kind(text)


def _kind_of_json(value: Any) -> str | None:
    if isinstance(value, list | dict):
        return "list" if isinstance(value, list) else "object"
    if isinstance(value, str) and is_missing(value):
        return None
    if isinstance(value, float) and value != value:
        return None
    try:
        return text_kind(value) if isinstance(value, str) else type_of(value)
    except ValueError:
        return "text"  # an integer of more than 64 bits


def _parquet_columns(file: TableFile) -> Iterator[ColumnPreview]:
    """Yield the columns of a Parquet table, which declares their types; NaN is a missing value."""
    with open_parquet(file) as parquet:
        schema, rows = parquet.schema_arrow, parquet.metadata.num_rows
        missing = _count_missing(parquet, schema)
    for column in schema:
        try:
            kind: ColumnType | None = declared_type(column.type)
        except ValueError:
            kind = None
        count = missing[column.name]
        yield ColumnPreview(column.name, kind or str(column.type), rows - count, count)


def _count_missing(file: ParquetFile, schema: pa.Schema) -> Counter[str]:
    """Return the missing values of each column: by the statistics, or else by reading it."""
    missing: Counter[str] = Counter()
    unknown: set[str] = {
        column.name
        for column in schema
        if pa.types.is_floating(column.type) or pa.types.is_nested(column.type)
    }
    for group in range(file.metadata.num_row_groups):
        for number in range(file.metadata.num_columns):
            column = file.metadata.row_group(group).column(number)
            if column.is_stats_set and column.statistics.has_null_count:
                missing[column.path_in_schema] += column.statistics.null_count
            elif column.path_in_schema in schema.names:
                unknown.add(column.path_in_schema)
    for name in unknown:
        missing[name] = 0
        for batch in file.iter_batches(columns=[name], use_threads=False):
            cells = batch.column(batch.schema.get_field_index(name))
            is_float = pa.types.is_floating(cells.type)
            missing[name] += pc.sum(pc.is_null(cells, nan_is_null=is_float)).as_py() or 0
    return missing


def _added(left: ColumnPreview, right: ColumnPreview) -> ColumnPreview:
    """Return a column of several files, of the type that all of them together have."""
    kinds = [column.type for column in (left, right) if column.values]
    kind = _common(kinds) if {*kinds} <= COLUMN_TYPES else " and ".join(dict.fromkeys(kinds))
    values, missing = left.values + right.values, left.missing + right.missing
    return ColumnPreview(left.name, kind or left.type, values, missing)


def describe_columns(columns: Sequence[ColumnPreview]) -> Iterator[str]:
    """Yield a line for each column, and one for its odd cells."""
    width = max((len(column.name) for column in columns), default=0)
    for column in columns:
        missing = f", {column.missing:,} empty" if column.missing else ""
        yield f"  {column.name:{width}}  {column.type}: {plural(column.values, 'value')}{missing}"
        if column.most is not None:
            cells = ", ".join(f"{cell.file} row {cell.row}: {cell.text!r}" for cell in column.first)
            more = ", …" if column.odd > len(column.first) else ""
            yield (
                f"  {'':{width}}  warning: text, not {column.most}, because of "
                f"{plural(column.odd, 'cell')}: {cells}{more}; empty or correct them if they "
                "should be"
            )
