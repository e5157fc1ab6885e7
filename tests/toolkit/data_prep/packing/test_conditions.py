"""One condition selects the same rows of a table and of the index that was packed from it.

`pack --where` and `enrich --where` evaluate it on the table; `data.where`, `remove --where`,
`lineage --where` and `data-report --where` on the columns of the index. Both are compared with
DuckDB on the original table, in which NaN is NULL and times are those of UTC.
"""

from __future__ import annotations

import csv
import json
import random
from collections.abc import Callable, Iterator
from datetime import date, datetime, time, timedelta, timezone
from decimal import Decimal
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
from hypothesis import given, settings
from hypothesis import strategies as st
from sm_train.entrypoints.sample_metadata.row_filter import ConditionError, RowFilter
from sm_train.entrypoints.shards.selection import select_samples
from sm_train.entrypoints.shards.shard_index import ShardIndex
from sm_train.entrypoints.storage.store import S3Access
from sm_train.toolkit.data_prep.packing.table_files import TableFile
from sm_train.toolkit.data_prep.packing.tables import ImageTable, _matching_numbers
from sm_train.toolkit.run_file.run_file import load

from tests.conftest import Cli
from tests.support.image_files import image_bytes
from tests.support.run_files import write_run

ROWS = 24
FORMATS = ("parquet", "jsonl", "csv")
NEW_YORK = timezone(timedelta(hours=-5))


def cells() -> dict[str, list[Any]]:
    """Return columns of every type with missing values, as Python has them."""
    random.seed(4)
    start = date(2027, 5, 20)
    days = [start + timedelta(days=n) for n in range(ROWS)]
    times = [datetime(2027, 5, 31, 20, 0) + timedelta(minutes=31 * n) for n in range(ROWS)]
    columns: dict[str, list[Any]] = {
        "number": list(range(ROWS)),
        "whole": [n * 3 - 20 for n in range(ROWS)],
        "score": [n / 4 for n in range(ROWS)],
        "license": [("CC0", "agency", "CC-BY")[n % 3] for n in range(ROWS)],
        "flag": [n % 2 == 0 for n in range(ROWS)],
        "day": days,
        "naive": times,
        "code": [f"{n:04}" for n in range(ROWS)],
    }
    for name in ("whole", "score", "license", "flag", "day", "naive"):
        columns[name][random.randrange(ROWS)] = None
    columns["score"][5] = float("nan")
    return columns


TYPED: dict[str, pa.DataType] = {
    "single": pa.float32(),
    "small": pa.int8(),
    "large": pa.uint64(),
    "price": pa.decimal128(12, 4),
    "zoned": pa.timestamp("us", tz="America/New_York"),
    "fine": pa.timestamp("ns"),
    "kind": pa.dictionary(pa.int32(), pa.string()),
    "view": pa.string_view(),
}
"""Columns that Parquet has alone."""


def parquet_table() -> pa.Table:
    columns = cells()
    table = pa.table({"image": [f"{n:03}.png" for n in range(ROWS)], **columns})
    moments = [
        datetime(2027, 5, 31, 22, n, tzinfo=NEW_YORK) + timedelta(hours=n // 4) for n in range(ROWS)
    ]
    added: dict[str, list[Any]] = {
        "single": [n / 10 for n in range(ROWS)],
        "small": [n * 5 for n in range(ROWS)],
        "large": [2**64 - 1 - n for n in range(ROWS)],
        "price": [Decimal(n) / 8 for n in range(ROWS)],
        "zoned": moments,
        "fine": [datetime(2027, 5, 31, 22, n) for n in range(ROWS)],
        "kind": ["a" if n % 2 else "b" for n in range(ROWS)],
        "view": [f"v{n}" for n in range(ROWS)],
    }
    for name, kind in TYPED.items():
        values = [None if n == 7 else value for n, value in enumerate(added[name])]
        cell = pa.array(values, pa.uint64() if name == "large" else None).cast(kind)
        table = table.append_column(name, cell)
    identities = pa.array([UUID(int=n).bytes for n in range(ROWS)], pa.binary(16))
    table = table.append_column("identity", pa.ExtensionArray.from_storage(pa.uuid(), identities))
    return table.append_column("meta.width", pa.array(range(600, 600 + ROWS))).append_column(
        "meta", pa.array([{"width": 0} for _ in range(ROWS)])
    )


COMMON = [
    "day >= '2027-06-01'",
    "day < '2027-6-3'",
    "day > DATE '2027-06-01'",
    "day BETWEEN DATE '2027-05-25' AND DATE '2027-06-02'",
    "day < TIMESTAMP '2027-06-01 00:00:00'",
    "year(day) = 2027 AND month(day) = 6",
    "naive >= '2027-06-01'",
    "naive >= '2027-06-01 03:00:00'",
    "naive >= '2027-06-01T03:00:00'",
    "naive > TIMESTAMP '2027-06-01 01:00:00'",
    "naive < DATE '2027-06-01'",
    "naive >= day",
    "whole > 3",
    "whole % 2 = 0",
    "whole = -20",
    "score > 2",
    "score > 2.5 OR score IS NULL",
    "NOT (score > 2)",
    "score <> 3",
    "isnan(score)",
    "license = 'CC0'",
    "license IN ('CC0', 'agency') AND whole > 0",
    "license LIKE 'CC%'",
    "license IS NULL",
    "license <> 'CC0'",
    "flag",
    "NOT flag",
    "flag = true",
    "code = '0003'",
    "code > '0010'",
    "length(code) = 4",
    "true",
]
PARQUET_ONLY = [
    "single = 0.5",
    "single > 1.1",
    "small * 2 > 40",
    "large > 18446744073709551610",
    "large = 18446744073709551615",
    "price = 0.125",
    "price > 1.5",
    "price + 1 < 2",
    "zoned >= '2027-06-01'",
    "zoned >= '2027-06-01 05:00:00'",
    "zoned < TIMESTAMP '2027-06-01 06:00:00'",
    "zoned < DATE '2027-06-01'",
    "fine > TIMESTAMP '2027-05-31 22:10:00'",
    "fine = '2027-05-31 22:05:00'",
    "kind = 'a'",
    "view > 'v2'",
    "identity = '00000000-0000-0000-0000-000000000004'",
    '"meta.width" >= 612',
    "list_contains(['a', 'b'], kind)",
]


def write_table(folder: Path, kind: str) -> Path:
    path = folder / f"photos.{kind}"
    for number in range(ROWS):
        (folder / f"{number:03}.png").write_bytes(image_bytes(number))
    table = parquet_table()
    if kind == "parquet":
        pq.write_table(table, path, row_group_size=7)
        return path
    columns = cells()
    names = ["image", *columns]
    rows = [
        dict(zip(names, (f"{n:03}.png", *(values[n] for values in columns.values())), strict=True))
        for n in range(ROWS)
    ]
    if kind == "jsonl":
        lines = (json.dumps(row, default=lambda value: value.isoformat()) for row in rows)
        path.write_text("".join(f"{line}\n" for line in lines))
        return path
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, names)
        writer.writeheader()
        writer.writerows(rows)
    return path


def reference() -> pa.Table:
    """Return the original table, in which NaN is NULL and times are those of UTC."""
    table = parquet_table()
    score = pa.array([None if v is None or v != v else v for v in table["score"].to_pylist()])
    table = table.set_column(table.schema.get_field_index("score"), "score", score)
    zoned = table["zoned"].cast(pa.timestamp("us", tz="UTC")).cast(pa.timestamp("us"))
    table = table.set_column(table.schema.get_field_index("zoned"), "zoned", zoned)
    fine = table["fine"].cast(pa.timestamp("us"))
    return table.set_column(table.schema.get_field_index("fine"), "fine", fine)


def expected_rows(where: str) -> list[int]:
    connection = duckdb.connect()
    connection.execute("SET TimeZone = 'UTC'")
    connection.register("photos", reference())
    found = connection.sql(f"SELECT number FROM photos WHERE {where} ORDER BY number").fetchall()
    return [number for (number,) in found]


def table_rows(path: Path, where: str) -> list[int]:
    """Return the rows that `pack` and `enrich` take."""
    file = TableFile(str(path), path, S3Access())
    with RowFilter(path.name, where) as row_filter:
        return [n - 1 for n in _matching_numbers(ImageTable(file=file), row_filter)]


def index_rows(index: ShardIndex, where: str) -> list[int]:
    """Return the rows whose samples every command that reads an index selects."""
    selection = select_samples(index, where, may_be_empty=True)
    numbers = np.concatenate([selection.is_selected(row) for row in range(len(index))])
    return np.flatnonzero(numbers).tolist()


@pytest.fixture(scope="module", params=FORMATS)
def packed(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Any]:
    folder = tmp_path_factory.mktemp(request.param)
    path = write_table(folder, request.param)
    names = [*cells(), *([*TYPED, "identity", "meta.width"] if request.param == "parquet" else [])]
    sm_train.pack(path, folder / "out", caption_column="license", index_column=names, workers=1)
    return request.param, path, ShardIndex(folder / "out" / "index.parquet")


def test_a_condition_selects_the_same_rows_everywhere(packed: Any) -> None:
    kind, path, index = packed
    # A row without a caption is not packed; its number is that of the row all the same.
    without = cells()["license"].index(None)
    for where in (*COMMON, *(PARQUET_ONLY if kind == "parquet" else [])):
        rows = expected_rows(where)
        assert table_rows(path, where) == rows, where
        kept = [row - (row > without) for row in rows if row != without]
        assert index_rows(index, where) == kept, where


def test_an_index_keeps_the_types_of_a_table(packed: Any) -> None:
    kind, _, index = packed
    types = index.header.columns
    assert types["day"] == "date"
    assert types["naive"] == "timestamp"
    assert (types["whole"], types["score"], types["flag"]) == ("integer", "number", "boolean")
    assert (types["license"], types["code"]) == ("text", "text")
    if kind == "parquet":
        assert (types["single"], types["large"], types["price"]) == (
            "single",
            "unsigned",
            "decimal",
        )
        assert (types["zoned"], types["fine"]) == ("timestamp", "timestamp")
        assert {types[name] for name in ("kind", "view", "identity")} == {"text"}


@pytest.mark.integration
@settings(max_examples=15, deadline=None)
@given(
    st.lists(
        st.one_of(
            st.integers(-5, 5),
            st.floats(-2, 2, width=32),
            st.sampled_from(["1_000", "007", "nan", "", "true", "n/a", "2027-06-01", "1e3"]),
        ),
        min_size=1,
        max_size=6,
    ),
    st.sampled_from(["x IS NULL", "x > '1'", "x = '2027-06-01'", "length(x::VARCHAR) > 1"]),
)
def test_cells_of_csv_have_one_type(values: list[Any], where: str) -> None:
    """The table that `pack --where` filters, and the index that `--index-column` makes of it."""
    with TemporaryDirectory() as name:
        folder = Path(name)
        for number in range(len(values)):
            (folder / f"{number}.png").write_bytes(image_bytes(number))
        lines = [f'{number}.png,a,"{value}"\n' for number, value in enumerate(values)]
        (folder / "t.csv").write_text("image,caption,x\n" + "".join(lines))
        sm_train.pack(folder / "t.csv", folder / "out", index_column="x", workers=1)
        index = ShardIndex(folder / "out" / "index.parquet")
        assert outcome(table_rows, folder / "t.csv", where) == outcome(index_rows, index, where)


def outcome(select: Callable[[Any, str], list[int]], rows: Any, where: str) -> list[int] | str:
    """Return the selected rows, or how the message of an error begins after the option."""
    try:
        return select(rows, where)
    except ConditionError as error:
        return str(error).partition(": ")[2][:20]


@pytest.mark.integration
def test_every_command_takes_a_condition_on_times_alike(cli: Cli, tmp_path: Path) -> None:
    """The example of docs/data.md, on times with a zone: the same rows, wherever it is written."""
    write_table(tmp_path, "parquet")
    where = "zoned >= '2027-06-01 05:00:00'"
    rows = expected_rows(where)
    assert len(rows) == 16
    columns = ("--index-column", "zoned", "--index-column", "source", "--caption-column", "code")
    assert cli("pack", "photos.parquet", "some", *columns, "--where", where).returncode == 0
    selected = ShardIndex(tmp_path / "some/index.parquet")
    assert selected.header.samples == len(rows)
    assert cli("pack", "photos.parquet", "all", *columns).returncode == 0
    (tmp_path / "seen.py").write_text(
        "def names(batch):\n    return {'size': [image.width for image in batch.images]}\n"
    )
    done = cli("enrich", "photos.parquet", "out", "--with", "seen:names", "--where", where)
    assert done.returncode == 0, done.stderr
    assert f"{len(rows)} images" in done.stderr
    [facts] = json.loads(cli("data-report", "all", "--where", where, "--json").stdout)["sets"]
    assert facts["samples"] == len(rows)
    done = cli("remove", "all", "--where", where, "--dry-run", "--json")
    assert len(json.loads(done.stdout)["samples"]) == len(rows), done.stderr
    # The cost of a run counts the samples that it selects.
    data = {"uri": "s3://b-1/all/shards/", "local": "all/shards", "where": where}
    assert load(write_run(tmp_path, data=data)).data.samples == len(rows)


@pytest.mark.integration
@pytest.mark.parametrize(
    ("name", "where", "message"),
    [
        ("photos.parquet", "number = (SELECT max(number) FROM rows)", "subqueries are not"),
        ("t.csv", "x > 5", "x holds texts, the first in row 2: 'n/a'"),
        (
            "t.jsonl",
            "width > 1",
            "t.jsonl has the keys Width and width, which SQL cannot tell apart",
        ),
    ],
)
def test_what_is_not_supported_is_said_in_its_own_words(
    cli: Cli, tmp_path: Path, name: str, where: str, message: str
) -> None:
    write_table(tmp_path, "parquet")
    (tmp_path / "t.csv").write_text("image,caption,x\n000.png,a,1\n001.png,a,n/a\n002.png,a,7\n")
    rows = [{"image": f"{n:03}.png", "caption": "a", ("Width", "width")[n]: n} for n in range(2)]
    (tmp_path / "t.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    done = cli("pack", name, "out", "--where", where, "--caption-column", "caption")
    if name.startswith("photos"):
        done = cli("pack", name, "out", "--where", where, "--caption-column", "code")
    assert done.returncode == 2
    assert message in done.stderr
    assert done.stderr.count("\n") == 1


def test_one_type_of_several_in_json_holds_texts(tmp_path: Path) -> None:
    lines = ['{"license": "CC0"}', '{"license": 4}', '{"license": "CC0"}']
    (tmp_path / "t.jsonl").write_text("\n".join(lines))
    assert table_rows(tmp_path / "t.jsonl", "license = 'CC0'") == [0, 2]
    assert table_rows(tmp_path / "t.jsonl", "license = '4'") == [1]


@pytest.mark.parametrize(
    "kind",
    [
        pa.list_(pa.float64()),
        pa.large_list(pa.float32()),
        pa.list_(pa.float64(), 2),
        pa.list_(pa.struct({"a": pa.float64()})),
        pa.struct({"a": pa.list_(pa.float64())}),
        None,
    ],
)
def test_nan_is_null_in_lists_too(tmp_path: Path, kind: pa.DataType | None) -> None:
    """DuckDB takes NaN for the largest number, so a list with one would fulfill `> 2`."""
    lists: list[Any] = [
        [0.5, float("nan")],
        [2.5, 1.0],
        None,
        [float("nan"), float("nan")],
        [3.0, None],
    ]
    if kind is not None and pa.types.is_fixed_size_list(kind):
        lists[2] = [0.0, 0.0]  # PyArrow 25 reads no missing list of a fixed size (arrow#35692)
    values: list[Any] = lists
    found = "x"
    if kind is not None and pa.types.is_struct(kind):
        values, found = [None if cell is None else {"a": cell} for cell in lists], "x.a"
    elif kind is not None and pa.types.is_struct(kind.value_type):
        values = [None if row is None else [{"a": cell} for cell in row] for row in lists]
        found = "[each.a for each in x]"
    if kind is None:
        path = tmp_path / "t.jsonl"
        path.write_text("".join(json.dumps({"x": value}) + "\n" for value in values))
    else:
        path = tmp_path / "t.parquet"
        pq.write_table(pa.table({"x": pa.array(values, kind)}), path, row_group_size=2)
    assert table_rows(path, f"list_max({found}) > 2") == [1, 4]
    assert table_rows(path, f"list_count({found}) = 0") == [3]
    missing = [row for row, value in enumerate(lists) if value is None]
    assert table_rows(path, f"{found} IS NULL") == missing


@pytest.mark.parametrize(
    ("values", "words"),
    [
        (pa.array([time(10, n) for n in range(2)]), "times of day"),
        (pa.array([[1], [2]]), "lists"),
        (pa.array([Decimal("0.1"), None], pa.decimal128(38, 12)), "decimals of 12 digits"),
    ],
)
def test_columns_that_an_index_cannot_hold_are_named(
    tmp_path: Path, values: pa.Array, words: str
) -> None:
    (tmp_path / "0.png").write_bytes(image_bytes(0))
    table = pa.table({"image": ["0.png"] * 2, "caption": ["a"] * 2, "x": values})
    pq.write_table(table, tmp_path / "t.parquet")
    with pytest.raises(sm_train.Error, match=f"--index-column: x holds {words}"):
        sm_train.pack(tmp_path / "t.parquet", tmp_path / "out", index_column="x")
