"""`pack --dry-run` shows what would be packed, and how a table is understood; it writes nothing."""

from __future__ import annotations

import json
from datetime import date
from decimal import Decimal
from pathlib import Path

import pyarrow as pa
import pytest
from pyarrow import parquet

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
