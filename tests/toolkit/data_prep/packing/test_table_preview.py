"""`pack --dry-run` shows what would be packed, and how a table is understood; it writes nothing."""

from __future__ import annotations

import json
from datetime import date
from decimal import Decimal
from pathlib import Path

import pyarrow as pa
import pytest
from pyarrow import parquet
from sm_train.entrypoints.shards.shard_index import ShardIndex

from tests.conftest import Cli
from tests.support.image_files import image_bytes, write_album

ROWS = """image,caption,aesthetic,expiry,license
0.jpg,a dog,7.5,2027-01-01,CC0
1.jpg,a cat,n/a,2027-06-01,CC0
2.jpg,a red, old car,3,2028-01-01,CC-BY
3.jpg,a bird,6,soon,4
4.jpg,a cow,6.25,,CC0
"""


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    for number in range(5):
        (tmp_path / f"{number}.jpg").write_bytes(image_bytes(number))
    (tmp_path / "list.csv").write_text(ROWS)
    return tmp_path


def test_types_and_odd_cells_of_csv_are_shown(cli: Cli, photos: Path) -> None:
    before = sorted(photos.rglob("*"))
    run = cli("pack", "list.csv", "out", "--dry-run", "--json")
    assert run.returncode == 0, run.stderr
    document = json.loads(run.stdout)
    assert (document["images"], document["shards"], document["is_packed"]) == (4, 1, False)
    assert document["rejected"] == {"row-malformed": 1}
    shown = {column["name"]: column for column in document["columns"]}
    assert {name: column["type"] for name, column in shown.items()} == dict.fromkeys(shown, "text")
    # The malformed row says nothing about the columns.
    assert shown["aesthetic"]["most"] == "number"
    assert shown["aesthetic"]["first"] == [{"file": "list.csv", "row": 2, "text": "n/a"}]
    assert (shown["expiry"]["most"], shown["expiry"]["missing"]) == ("date", 1)
    assert shown["license"]["most"] is None
    assert "warning: text, not number, because of 1 cell: list.csv row 2: 'n/a'" in run.stderr
    assert "rejected 1: 1 row-malformed (list.csv row 3)" in run.stderr
    assert sorted(photos.rglob("*")) == before
    (photos / "list.csv").write_text(ROWS.replace("n/a", "").replace("soon", "2029-01-01"))
    run = cli("pack", "list.csv", "out", "--dry-run", "--json", "--where", "aesthetic > 6")
    assert run.returncode == 0, run.stderr
    document = json.loads(run.stdout)
    assert (document["images"], document["filtered"]) == (2, 2)
    assert document["rejected"] == {"row-malformed": 1}
    types = {column["name"]: column["type"] for column in document["columns"]}
    assert (types["aesthetic"], types["expiry"]) == ("number", "date")


def test_types_of_jsonl_and_parquet_are_shown(cli: Cli, photos: Path) -> None:
    rows = [
        {"image": "0.jpg", "caption": ["a", "b"], "score": 5, "made": "2026-01-01", "at": {"x": 1}},
        {"image": "1.jpg", "caption": ["c"], "score": "high", "made": "2026-01-02T03:00:00Z"},
        {"image": "2.jpg", "caption": ["c"], "score": 7.5, "made": None},
    ]
    (photos / "list.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    document = json.loads(cli("pack", "list.jsonl", "out", "--dry-run", "--json").stdout)
    shown = {column["name"]: column for column in document["columns"]}
    assert {name: column["type"] for name, column in shown.items()} == {
        "image": "text",
        "caption": "list",
        "score": "text",
        "made": "timestamp",
        "at": "object",
    }
    assert (shown["score"]["most"], shown["score"]["odd"]) == ("number", 1)
    assert shown["made"]["missing"] == 1
    table = pa.table(
        {
            "image": ["0.jpg", "1.jpg"],
            "caption": ["a", "b"],
            "expiry": [date(2027, 1, 1), None],
            "price": [Decimal("1.50"), Decimal("2.25")],
            "tags": [["a"], ["b"]],
        }
    )
    parquet.write_table(table, photos / "list.parquet")
    document = json.loads(cli("pack", "list.parquet", "out", "--dry-run", "--json").stdout)
    shown = {column["name"]: column for column in document["columns"]}
    assert {name: column["type"] for name, column in shown.items()} == {
        "image": "text",
        "caption": "text",
        "expiry": "date",
        "price": "decimal",
        "tags": "list<element: string>",
    }
    assert (shown["expiry"]["values"], shown["expiry"]["missing"]) == (1, 1)


def test_a_finished_pack_and_a_folder_are_previewed(cli: Cli, tmp_path: Path) -> None:
    write_album(tmp_path / "in", 3)
    run = cli("pack", "in", "out", "--dry-run")
    assert run.returncode == 0
    assert run.stderr.startswith("3 images, 0.")
    assert not (tmp_path / "out").exists()
    assert cli("pack", "in", "out").returncode == 0
    assert (
        "already packed: nothing would be written" in cli("pack", "in", "out", "--dry-run").stderr
    )
    write_album(tmp_path / "in", 4)
    refused = cli("pack", "in", "out", "--dry-run")
    assert refused.returncode == 2
    assert refused.stderr.startswith("sm-train: out:")
    appended = cli("pack", "in", "out", "--append", "--dry-run", "--json")
    assert json.loads(appended.stdout)["images"] == 1


@pytest.mark.parametrize(
    ("name", "text", "kind", "condition"),
    [
        (
            "rejected.csv",
            "image,caption,d\n0.jpg,a,2027-01-01\n1.jpg,b,2027-11-02\n,c,n/a\n",
            "text",
            "d > '2027-6-03'",
        ),
        (
            "rejected.jsonl",
            '{"image": "0.jpg", "caption": "a", "d": 1}\n{"image": "1.jpg", "caption": "b", '
            '"d": 2.5}\n{"image": "", "caption": "c", "d": "z"}\n',
            "text",
            "d > '10'",
        ),
        (
            "empty.jsonl",
            '{"image": "0.jpg", "caption": "a", "d": "2027-01-01"}\n'
            '{"image": "1.jpg", "caption": "b", "d": ""}\n',
            "date",
            "d > DATE '2026-01-01'",
        ),
    ],
)
def test_a_column_has_one_type_in_the_preview_a_condition_and_the_index(
    cli: Cli, photos: Path, name: str, text: str, kind: str, condition: str
) -> None:
    """All rows of a table count, also those that are not packed."""
    (photos / name).write_text(text)
    shown = json.loads(cli("pack", name, "out", "--dry-run", "--json").stdout)["columns"]
    assert {column["name"]: column["type"] for column in shown}["d"] == kind
    selected = cli("pack", name, "out", "--dry-run", "--json", "--where", condition)
    images = json.loads(selected.stdout)["images"] if selected.returncode == 0 else 0
    assert cli("pack", name, "packed", "--index-column", "d").returncode == 0
    assert ShardIndex(photos / "packed/index.parquet").header.columns == {"d": kind}
    removed = cli("remove", "packed", "--where", condition, "--dry-run", "--json")
    found = json.loads(removed.stdout)["samples"] if removed.returncode == 0 else []
    assert (len(found) if isinstance(found, list) else found) == images


def test_what_a_table_lacks_is_counted(cli: Cli, photos: Path) -> None:
    (photos / "list.jsonl").write_text(
        '{"image": "0.jpg", "caption": "a", "y": 1}\n{"image": "1.jpg", "caption": "b"}\n'
    )
    table = pa.table(
        {
            "image": ["0.jpg", "1.jpg", "2.jpg"],
            "caption": ["a", "b", "c"],
            "score": [1.0, float("nan"), None],
            "a.b": [1, 2, None],
            "place": [{"x": 1}, None, None],
        }
    )
    parquet.write_table(table, photos / "list.parquet", write_statistics=False)
    for name, expected in (
        ("list.jsonl", {"y": (1, 1)}),
        ("list.parquet", {"score": (1, 2), "a.b": (2, 1), "place": (1, 2)}),
    ):
        run = cli("pack", name, "out", "--dry-run", "--json", "--keep", "*")
        assert run.returncode == 0, run.stderr
        shown = {
            column["name"]: (column["values"], column["missing"])
            for column in json.loads(run.stdout)["columns"]
        }
        assert expected.items() <= shown.items()
    packed = cli("pack", "list.parquet", "packed", "--index-column", "a.b")
    assert packed.returncode == 0, packed.stderr
    assert ShardIndex(photos / "packed/index.parquet").header.columns == {"a.b": "integer"}


def test_the_exit_code_is_that_of_the_pack(cli: Cli, photos: Path) -> None:
    (photos / "none.csv").write_text("image,caption\n0.jpg,a,b,c\n")
    refused = cli("pack", "none.csv", "out", "--dry-run")
    assert refused.returncode == 2
    assert "nothing to pack, all 1 inputs were rejected: row-malformed 1" in refused.stderr
    (photos / "list.csv").write_text("image,caption\n0.jpg,a\n")
    assert cli("pack", "list.csv", "packed").returncode == 0
    (photos / "list.csv").write_text("image,caption\n0.jpg,another\n")
    changed = cli("pack", "list.csv", "packed", "--append", "--dry-run")
    assert changed.returncode == 3
    assert changed.stderr.startswith("nothing to append: no image would be packed\nerror: 1 image")
