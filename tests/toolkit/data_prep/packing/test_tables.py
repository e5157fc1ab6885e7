"""Tables of images: rows that fulfil a condition, and sizes that save requests."""

from __future__ import annotations

import json
import sqlite3
import tarfile
import time
from pathlib import Path
from typing import Any

import pytest
import sm_train
from sm_train.entrypoints.data_prep.packing.plan_files import PlannedInputs
from sm_train.entrypoints.storage.store import S3Access
from sm_train.toolkit.base.errors import UserError
from sm_train.toolkit.data_prep.packing import input_sorter
from sm_train.toolkit.data_prep.packing.inputs import InputSource, PackInputs, find_inputs
from sm_train.toolkit.data_prep.packing.tables import TableOptions

from tests.conftest import Cli
from tests.support.image_files import image_bytes, write_album
from tests.support.tables import write_table

KINDS = pytest.mark.parametrize("kind", ["csv", "jsonl", "parquet"])
NESTED = pytest.mark.parametrize("kind", ["jsonl", "parquet"])


def row(number: int) -> dict[str, Any]:
    return {
        "image": f"s3://raw/{number:02}.jpg",
        "caption": f"picture {number}",
        "bytes": 1000 + number,
        "aesthetic": number / 2,
        "watermark": number % 5 / 10,
        "Kind": "art" if number % 2 else "photo",
        "faces": number,
        "meta": {"width": number * 100, "tags": ["old"] if number % 3 == 0 else []},
    }


def find(
    folder: Path,
    kind: str,
    where: str | None = None,
    *,
    access: S3Access | None = None,
) -> PackInputs:
    """Find the inputs of a table of 20 rows; without credentials no request can be sent."""
    table = write_table(folder, kind, [row(number) for number in range(20)])
    (folder / "plan").mkdir(exist_ok=True)
    columns = TableOptions(where=where)
    source = InputSource(str(table), table=columns, access=access or S3Access())
    return find_inputs(source, folder / "plan")


def numbers(inputs: PackInputs) -> list[int]:
    found = PlannedInputs(inputs.files, inputs.root, 0, inputs.images)
    return [int(item.source[-6:-4]) for item in found]


@KINDS
@pytest.mark.parametrize(
    ("where", "expected"),
    [
        ("aesthetic > 5 and watermark < 0.2", [11, 15, 16]),
        ("AESTHETIC >= 9.5 -- the best", [19]),
        ("kind = 'art' and faces - 12 < -7", [1, 3]),
        ("caption like '%1' or faces in (4, 5)", [1, 4, 5, 11]),
    ],
)
def test_where_selects_rows_by_any_column(
    tmp_path: Path, kind: str, where: str, expected: list[int]
) -> None:
    inputs = find(tmp_path, kind, where)
    assert numbers(inputs) == expected
    assert inputs.filtered == 20 - len(expected)


@NESTED
def test_where_reaches_nested_columns(tmp_path: Path, kind: str) -> None:
    inputs = find(tmp_path, kind, "meta.width > 1200 and list_contains(meta.tags, 'old')")
    assert numbers(inputs) == [15, 18]


@KINDS
@pytest.mark.parametrize(
    ("where", "message"),
    [
        ("aesthetic > ", "--where: aesthetic > : Parser Error: syntax error at"),
        ("aesthetc > 5", "has no column aesthetc (did you mean aesthetic?); it has image, caption"),
        ("kind > 5", "Cannot compare values of type VARCHAR and type INTEGER_LITERAL"),
        ("aesthetic > 'high'", "Could not convert string 'high' to DOUBLE"),
        ("count(*) > 1", "WHERE clause cannot contain aggregates"),
        ("random() < 0.5", "--where: random() returns another value each time"),
        ("true; drop table images", "Parser Error"),
        ("true) union select 1 where (true", "Parser Error"),
        ("faces in (select 1 from read_text('/etc/hostname'))", "Cannot access file"),
        ("faces in (select 1 from '/etc/hostname')", "--where: "),
        ("false", "none of 20 rows fulfils --where"),
    ],
)
def test_an_invalid_condition_is_one_line(
    tmp_path: Path, kind: str, where: str, message: str
) -> None:
    with pytest.raises(UserError) as error:
        find(tmp_path, kind, where)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


@KINDS
@pytest.mark.parametrize(
    ("where", "expected"),
    [
        ("aesthetic - watermark > 9", [19]),
        ("faces + aesthetic * 2 > 36", [19]),
        ("-faces < -18", [19]),
        ("date_diff('day', date '2026-01-01', date '2026-01-01' + faces::int) > 18", [19]),
        ("extract(year from date '2000-01-01' + (faces * 365)::int) > 2016", [18, 19]),
        ("interval 1 day * faces > interval 18 day + interval 1 hour", [19]),
    ],
)
def test_an_operator_is_judged_by_the_types_of_its_columns(
    tmp_path: Path, kind: str, where: str, expected: list[int]
) -> None:
    """DuckDB 2.0.1 lists overloads of + and - for times with a time zone as not stable."""
    assert numbers(find(tmp_path, kind, where)) == expected


@pytest.mark.parametrize(
    ("where", "function"),
    [
        ("now() > timestamptz '2026-01-01'", "now()"),
        ("current_timestamp > timestamptz '2026-01-01'", "get_current_timestamp()"),
        ("current_date > date '2026-01-01'", "current_date()"),
        ("current_time > '01:00'", "get_current_time()"),
        ("age(timestamp '2026-01-01') > interval 1 day", "age()"),
        ("faces > 1 and uuid()::varchar like 'a%'", "uuid()"),
        ("exists(select random())", "random()"),
        ("current_setting('threads')::int > faces", "current_setting()"),
        ("timestamptz '2026-01-01' - interval 1 day * faces < timestamptz '2026-01-01'", "-(TIME"),
        ("list_filter([1], lambda x: x > random()) = [1]", "random()"),
    ],
)
def test_a_condition_that_may_select_other_rows_later_is_refused(
    tmp_path: Path, where: str, function: str
) -> None:
    with pytest.raises(UserError) as error:
        find(tmp_path, "parquet", where)
    assert str(error.value).startswith(f"--where: {function}")
    assert "an interrupted pack could not be resumed" in str(error.value)


def test_times_with_a_time_zone_select_the_same_rows_everywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of an image at 23:00 UTC on New Year's Eve, the year depends on the time zone."""
    for zone in ("UTC", "Asia/Tokyo"):
        monkeypatch.setenv("TZ", zone)
        time.tzset()
        where = "(timestamptz '2025-12-31 23:00:00+00')::timestamp < timestamp '2026-01-01'"
        assert len(numbers(find(tmp_path, "parquet", where))) == 20
    monkeypatch.undo()
    time.tzset()


def test_a_condition_requires_a_table(tmp_path: Path) -> None:
    write_album(tmp_path / "in", 1)
    with pytest.raises(UserError, match="--where: needs a table"):
        find_inputs(InputSource(str(tmp_path / "in"), table=TableOptions(where="x > 1")), tmp_path)


@pytest.mark.integration
def test_the_condition_identifies_the_pack(cli: Cli, tmp_path: Path) -> None:
    write_album(tmp_path / "in", 4)
    (tmp_path / "list.csv").write_text(
        "image,caption,score\n000.jpg,a,1\n001.jpg,b,2.5\n003.jpg,c,3\n,d,1\n"
    )
    packing = ("pack", "in", "out", "--captions", "list.csv", "--json", "--where")
    first = cli(*packing, "score > 2")
    assert first.returncode == 0, first.stderr
    assert "filtered 2 rows by --where" in first.stderr
    document = json.loads(first.stdout)
    assert (document["samples"], document["filtered"], document["rejected"]) == (2, 2, {})
    assert cli(*packing, "score > 2").stdout == first.stdout
    assert "contains a pack of other inputs or options" in cli(*packing, "score > 2.0").stderr


@KINDS
def test_a_column_of_sizes_saves_requests(tmp_path: Path, kind: str) -> None:
    nowhere = S3Access(profile=None, region="us-east-1")
    inputs = find(tmp_path, kind, access=nowhere)
    assert inputs.image_bytes == sum(1000 + number for number in range(20))


def test_too_little_space_to_sort_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = input_sorter.connect

    def connect(folder: Path) -> sqlite3.Connection:
        connection = original(folder)
        connection.execute("PRAGMA max_page_count = 6")
        return connection

    monkeypatch.setattr(input_sorter, "connect", connect)
    with pytest.raises(UserError, match=r"cannot be sorted in .*disk is full; set TMPDIR") as error:
        find(tmp_path, "jsonl")
    assert "\n" not in str(error.value)


def pack_table(folder: Path, content: str | bytes, *, name: str = "t.csv", **options: Any) -> Any:
    """Pack a table of two images, and return the result."""
    for number in range(2):
        (folder / f"{number}.png").write_bytes(image_bytes(number))
    path = folder / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return sm_train.pack(path, folder / "out", workers=1, **options)


def packed_captions(folder: Path) -> list[str]:
    [shard] = (folder / "out" / "shards").iterdir()
    with tarfile.open(shard) as tar:
        files = [tar.extractfile(name) for name in tar.getnames() if name.endswith(".txt")]
        return [file.read().decode() for file in files if file is not None]


def test_a_row_with_more_cells_than_columns_is_rejected(tmp_path: Path) -> None:
    """An unquoted comma would cut its caption."""
    result = pack_table(tmp_path, 'image,caption\n0.png,a red, old car\n1.png,"a red, old car"\n')
    assert packed_captions(tmp_path) == ["a red, old car"]
    [rejected] = result.index.rejected()
    assert (rejected.source, rejected.reason) == ("t.csv row 1", "row-malformed")
    assert rejected.detail == "3 cells for 2 columns; quote the cells that contain a comma"


@pytest.mark.parametrize("delimiter", [";", "\t"])
def test_tables_of_spreadsheets_are_read(tmp_path: Path, delimiter: str) -> None:
    rows = [["image", "caption"], ["0.png", "a red, old car"], ["1.png", "b"]]
    pack_table(tmp_path, "".join(delimiter.join(row) + "\n" for row in rows))
    assert packed_captions(tmp_path) == ["a red, old car", "b"]


def test_lists_of_captions_are_all_kept(tmp_path: Path) -> None:
    """As COCO has them: the first is the sample's text, and data.caption chooses among all."""
    rows = [{"image": "0.png", "caption": ["a", "b"]}, {"image": "1.png", "caption": ["c"]}]
    content = "".join(json.dumps(row) + "\n" for row in rows)
    pack_table(tmp_path, content, name="t.jsonl")
    assert packed_captions(tmp_path) == ["a", "c"]
    [shard] = (tmp_path / "out" / "shards").iterdir()
    with tarfile.open(shard) as tar:
        document = json.load(tar.extractfile("000000000.json"))  # type: ignore[arg-type]
    assert document["captions"] == {"caption": ["a", "b"]}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("image,caption\n0.png,a\n".encode("utf-16"), "UTF-16; save it as UTF-8"),
        ("image,caption,caption\n0.png,a,b\n", "two columns 'caption'; rename one"),
    ],
)
def test_tables_that_cannot_be_read_as_meant_are_refused(
    tmp_path: Path, content: str | bytes, message: str
) -> None:
    with pytest.raises(sm_train.Error, match=message):
        pack_table(tmp_path, content)


def test_a_long_cell_is_read(tmp_path: Path) -> None:
    pack_table(tmp_path, f"image,caption\n0.png,{'word ' * 40_000}\n1.png,b\n")
    assert [len(text) for text in packed_captions(tmp_path)] == [199_999, 1]
