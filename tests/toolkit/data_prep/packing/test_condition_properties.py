"""Drawn tables: six commands select the rows that DuckDB selects in the original table."""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta, timezone
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from uuid import UUID

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import sm_train
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sm_train.entrypoints.data_prep.packing.plan_files import PlannedInputs
from sm_train.entrypoints.lineage.data_facts import data_facts
from sm_train.entrypoints.shards.removal_list import RemovalList
from sm_train.entrypoints.shards.selection import select_samples
from sm_train.entrypoints.storage.store import S3Access
from sm_train.toolkit.base.errors import UserError
from sm_train.toolkit.data_prep.enrichment.enrich import EnrichJob, plan_enrichment
from sm_train.toolkit.data_prep.lineage.follow import follow
from sm_train.toolkit.data_prep.packing.inputs import InputSource, find_inputs
from sm_train.toolkit.data_prep.packing.shard_set import ShardSet, find_shard_set
from sm_train.toolkit.data_prep.packing.tables import TableOptions
from sm_train.toolkit.data_prep.removal.find_samples import find_samples

from tests.support.image_files import image_bytes

pytestmark = pytest.mark.integration

NEW_YORK = timezone(timedelta(hours=-5))
TIMES = st.datetimes(datetime(2027, 5, 31), datetime(2027, 6, 2)).map(
    lambda moment: moment.replace(second=0, microsecond=0)
)
TEXTS = st.sampled_from(["CC0", "007", "1_000", "it's", "x y", "true", "n/a"])


@dataclass(frozen=True)
class Kind:
    """A type of columns: its values, as Parquet has it, and as a literal of SQL has a value.

    ``formats`` are those of the tables that can hold it.
    """

    arrow: pa.DataType
    values: st.SearchStrategy[Any]
    literal: Any = repr
    formats: str = "parquet jsonl csv"


def text(value: str) -> str:
    doubled = value.replace("'", "''")
    return f"'{doubled}'"


def moment(value: datetime) -> str:
    in_utc = value.astimezone(UTC).replace(tzinfo=None) if value.tzinfo else value
    return f"TIMESTAMP '{in_utc}'"


KINDS = {
    "boolean": Kind(pa.bool_(), st.booleans()),
    "small": Kind(pa.int8(), st.integers(-128, 127), formats="parquet"),
    "whole": Kind(pa.int64(), st.integers(-(2**63), 2**63 - 1) | st.integers(-3, 3)),
    "unsigned": Kind(pa.uint64(), st.integers(2**64 - 4, 2**64 - 1) | st.integers(0, 3)),
    "single": Kind(pa.float32(), st.floats(-2, 2, width=16), formats="parquet"),
    "float": Kind(
        pa.float64(), st.floats(-2, 2, width=16).map(lambda value: value + 0.5) | st.just(np.nan)
    ),
    "decimal": Kind(pa.decimal128(12, 4), st.decimals(-9, 9, places=4), str, formats="parquet"),
    "date": Kind(
        pa.date32(), st.dates(date(2027, 5, 30), date(2027, 6, 2)), lambda day: f"DATE '{day}'"
    ),
    "dates as texts": Kind(
        pa.date32(), st.dates(date(2027, 5, 30), date(2027, 6, 2)), lambda day: f"'{day}'"
    ),
    "time": Kind(pa.timestamp("us"), TIMES, moment),
    "nanoseconds": Kind(pa.timestamp("ns"), TIMES, moment, formats="parquet"),
    "zoned": Kind(
        pa.timestamp("us", tz="America/New_York"),
        TIMES.map(lambda value: value.replace(tzinfo=NEW_YORK)),
        moment,
    ),
    "text": Kind(pa.string(), TEXTS, text),
    "view": Kind(pa.string_view(), TEXTS, text, formats="parquet"),
    "dictionary": Kind(pa.dictionary(pa.int32(), pa.string()), TEXTS, text, formats="parquet"),
    "uuid": Kind(
        pa.uuid(),
        st.integers(0, 5).map(lambda n: UUID(int=n)),
        lambda value: text(str(value)),
        formats="parquet",
    ),
}
NAMES = ("score", "License", "meta.width", "day of", "größe")


@dataclass(frozen=True)
class DrawnTable:
    """A table of a format, with columns by their names, and conditions on it."""

    format: str
    kinds: dict[str, str]
    columns: dict[str, list[Any]]
    conditions: list[str]

    @property
    def rows(self) -> int:
        return len(next(iter(self.columns.values())))


@st.composite
def tables(draw: st.DrawFn) -> DrawnTable:
    name = draw(st.sampled_from(["parquet", "jsonl", "csv"]))
    rows = draw(st.integers(2, 6))
    usable = [kind for kind, described in KINDS.items() if name in described.formats]
    kinds = {
        column: draw(st.sampled_from(usable))
        for column in draw(st.lists(st.sampled_from(NAMES), min_size=3, max_size=5, unique=True))
    }
    columns = {}
    for column, kind in kinds.items():
        values = st.none() | KINDS[kind].values
        drawn = draw(st.lists(values, min_size=rows, max_size=rows))
        # Cells of CSV and JSON have a type only if there are some.
        if name != "parquet":
            drawn[0] = draw(KINDS[kind].values.filter(lambda value: value == value))
        columns[column] = drawn
    conditions = [draw(condition(kinds, columns)) for _ in range(8)]
    return DrawnTable(name, kinds, columns, conditions)


@st.composite
def condition(draw: st.DrawFn, kinds: dict[str, str], columns: dict[str, list[Any]]) -> str:
    """Return comparisons of columns with values of theirs, of which some are joined."""
    parts = []
    for _ in range(draw(st.integers(1, 2))):
        column = draw(st.sampled_from([*kinds]))
        kind = KINDS[kinds[column]]
        present = [value for value in columns[column] if value is not None and value == value]
        value = draw(st.sampled_from(present) if present else kind.values)
        literal = "0.5" if value != value else kind.literal(value)
        operator = draw(st.sampled_from(["=", "<>", "<", ">="]))
        quoted = f'"{column}"'
        parts.append(
            draw(
                st.sampled_from(
                    [
                        f"{quoted} {operator} {literal}",
                        f"NOT ({quoted} {operator} {literal})",
                        f"{quoted} IN ({literal})",
                        f"{quoted} IS NULL",
                        f"{quoted} IS NOT NULL",
                    ]
                )
            )
        )
    return draw(st.sampled_from([" AND ", " OR "])).join(parts)


def arrow_table(table: DrawnTable) -> pa.Table:
    columns: dict[str, Any] = {"image": [f"{row}.png" for row in range(table.rows)]}
    columns["caption"] = ["a"] * table.rows
    for name, values in table.columns.items():
        kind = KINDS[table.kinds[name]].arrow
        if kind == pa.uuid():
            stored = [None if value is None else value.bytes for value in values]
            columns[name] = pa.ExtensionArray.from_storage(kind, pa.array(stored, pa.binary(16)))
        elif pa.types.is_dictionary(kind):
            columns[name] = pa.array(values, pa.string()).dictionary_encode()
        else:
            columns[name] = pa.array(values, kind)
    columns["raw"] = pa.array([b"\xff"] * table.rows, pa.binary_view())
    return pa.table(columns)


def write(table: DrawnTable, folder: Path) -> Path:
    for row in range(table.rows):
        (folder / f"{row}.png").write_bytes(image_bytes(row))
    path = folder / f"t.{table.format}"
    if table.format == "parquet":
        pq.write_table(arrow_table(table), path, row_group_size=2)
        return path
    names = ["image", "caption", *table.columns]
    cells = zip(*table.columns.values(), strict=True)
    rows = [[f"{row}.png", "a", *values] for row, values in enumerate(cells)]
    if table.format == "jsonl":
        documents = [dict(zip(names, row, strict=True)) for row in rows]
        lines = [json.dumps(row, default=lambda value: value.isoformat()) for row in documents]
        path.write_text("\n".join(lines))
        return path
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([names, *rows])
    return path


def expected(table: DrawnTable, where: str) -> list[int]:
    """Return the rows that DuckDB selects; NaN is NULL, and times are those of UTC."""
    columns: dict[str, Any] = {"row": pa.array(range(table.rows))}
    for name, values in table.columns.items():
        kind = KINDS[table.kinds[name]].arrow
        cells = [None if value is None or value != value else value for value in values]
        if kind == pa.uuid():
            columns[name] = pa.array([None if cell is None else str(cell) for cell in cells])
        elif pa.types.is_timestamp(kind):
            aware = [
                cell if cell is None or cell.tzinfo else cell.replace(tzinfo=UTC) for cell in cells
            ]
            columns[name] = pa.array(aware, pa.timestamp("us", tz="UTC")).cast(pa.timestamp("us"))
        else:
            columns[name] = pa.array(cells, kind)
    connection = duckdb.connect()
    connection.register("drawn", pa.table(columns))
    found = connection.sql(f"SELECT row FROM drawn WHERE {where} ORDER BY row").fetchall()
    return [row for (row,) in found]


def sources(names: Sequence[str | None]) -> list[int]:
    return sorted(int(str(name).partition(".")[0]) for name in names)


def of_pack(path: Path, where: str) -> list[int]:
    with TemporaryDirectory() as folder:
        found = find_inputs(InputSource(str(path), table=TableOptions(where=where)), Path(folder))
        return sources([item.source for item in PlannedInputs(found.files, "", 0, found.images)])


def of_enrich(path: Path, where: str) -> list[int]:
    (path.parent / "makers.py").write_text("def facts(batch): ...\n")
    job = EnrichJob(
        str(path),
        str(path.parent / "made"),
        "makers:facts",
        path.parent,
        None,
        1,
        64,
        1,
        where=where,
    )
    with plan_enrichment(job) as planned:
        assert planned.folder is not None
        found = pq.read_table(next(planned.folder.glob("inputs*")), columns=["source"])
        return sources([name.decode() for name in found["source"].to_pylist()])


def of_index(shards: ShardSet, where: str) -> dict[str, list[int] | int]:
    """Return what the commands on an index select: rows, or of a report their number."""
    with shards.open_index() as (index, _):
        selection = select_samples(index, where, may_be_empty=True)
        numbers = np.concatenate([selection.is_selected(row) for row in range(len(index))])
        found = {"data.where": np.flatnonzero(numbers).tolist()}
        for name, select in (
            ("remove", lambda: find_samples(shards, index, (), where, RemovalList())),
            ("lineage", lambda: follow(shards, (), where, [])),
        ):
            found[name] = []
            with suppress(UserError):  # the condition selects nothing
                found[name] = sources([sample.source for sample in select()])
        with suppress(Exception):
            found["data-report"] = data_facts(index, RemovalList(), where=where).samples
        return found


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(tables())
def test_six_commands_select_the_rows_that_duckdb_selects(table: DrawnTable) -> None:
    with TemporaryDirectory() as name:
        folder = Path(name)
        path = write(table, folder)
        sm_train.pack(path, folder / "packed", index_column=[*table.columns], workers=1)
        shards = find_shard_set(str(folder / "packed"), S3Access())
        for where in table.conditions:
            rows = expected(table, where)
            found = {"data-report": 0} | of_index(shards, where)
            assert found == {
                "data.where": rows,
                "remove": rows,
                "lineage": rows,
                "data-report": len(rows),
            }, where
            if rows:
                assert (of_pack(path, where), of_enrich(path, where)) == (rows, rows), where
