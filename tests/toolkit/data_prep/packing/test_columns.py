"""Columns of a table stay with the samples, with their types, and some of them are in the index."""

from __future__ import annotations

import csv
import json
import tarfile
from datetime import date
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
import sm_train
from hypothesis import given
from hypothesis import strategies as st
from sm_train.entrypoints.job_interface.job_config import CaptionSource
from sm_train.entrypoints.sample_metadata.captions import choose_caption
from sm_train.entrypoints.shards.shard_index import ShardIndex
from sm_train.toolkit.data_prep.packing.table_columns import CsvTypes

from tests.conftest import Cli
from tests.support.image_files import write_album
from tests.support.tables import write_table

ROWS: list[dict[str, Any]] = [
    {
        "image": f"{number:03}.jpg",
        "caption": None if number == 1 else f"picture {number}",
        "made": f"a made caption {number}",
        "license": ("CC0", "agency", None)[number % 3],
        "contributor": 40 + number // 2,
        "score": number / 4,
        "released": number % 2 == 0,
    }
    for number in range(6)
]
COLUMNS = ("license", "contributor", "score", "released")


@pytest.fixture
def album(tmp_path: Path) -> Path:
    write_album(tmp_path / "in", len(ROWS), flat=True)
    return tmp_path / "in"


def documents(packed: Path) -> list[dict[str, Any]]:
    """Return the JSON files of all samples, in order."""
    found = []
    for shard in sorted((packed / "shards").iterdir()):
        with tarfile.open(shard) as tar:
            found += [
                json.loads(tar.extractfile(member).read())  # type: ignore[union-attr]
                for member in tar
                if member.name.endswith(".json")
            ]
    return found


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["csv", "jsonl", "parquet"])
def test_columns_keep_their_types(album: Path, tmp_path: Path, kind: str) -> None:
    table = write_table(album, kind, ROWS)
    sm_train.pack(table, tmp_path / "out", caption_column="made", keep=COLUMNS)
    expected = [{name: row[name] for name in COLUMNS} for row in ROWS]
    assert [document["columns"] for document in documents(tmp_path / "out")] == expected


def test_an_index_has_the_values_of_the_accepted_samples(album: Path, tmp_path: Path) -> None:
    """The values of a rejected image are not assigned to the next one."""
    (album / "002.jpg").write_bytes(b"not an image")
    table = write_table(album, "parquet", ROWS)
    names = (*COLUMNS, "source")
    sm_train.pack(table, tmp_path / "out", caption_column="made", index_column=names)
    index = ShardIndex(tmp_path / "out" / "index.parquet")
    assert index.header.columns == {
        "license": "text",
        "contributor": "integer",
        "score": "number",
        "released": "boolean",
        "source": "text",
    }
    accepted = [row | {"source": row["image"]} for row in ROWS if row["image"] != "002.jpg"]
    stored = index.shard(0).columns
    assert {name: list(stored[name]) for name in names} == {
        name: [row[name] for row in accepted] for name in names
    }
    assert [document["columns"]["score"] for document in documents(tmp_path / "out")] == [
        row["score"] for row in accepted
    ]


def test_several_captions_stay_and_the_first_that_is_not_blank_is_the_text(
    album: Path, tmp_path: Path
) -> None:
    rows = [*ROWS]
    rows[2] = rows[2] | {"caption": " "}
    table = write_table(album, "jsonl", rows)
    sm_train.pack(table, tmp_path / "out", caption_column=("caption", "made"))
    with tarfile.open(next((tmp_path / "out" / "shards").iterdir())) as tar:
        texts = [
            tar.extractfile(member).read().decode()  # type: ignore[union-attr]
            for member in tar
            if member.name.endswith(".txt")
        ]
    assert texts[:3] == ["picture 0", "a made caption 1", "a made caption 2"]
    captions = [document["captions"] for document in documents(tmp_path / "out")]
    assert captions[0] == {"caption": "picture 0", "made": "a made caption 0"}
    assert captions[1] == {"made": "a made caption 1"}


def test_a_job_chooses_one_of_several_captions(album: Path, tmp_path: Path) -> None:
    """By its weight, of those that the sample has."""
    table = write_table(album, "jsonl", ROWS)
    sm_train.pack(table, tmp_path / "out", caption_column=("caption", "made"))
    with tarfile.open(next((tmp_path / "out" / "shards").iterdir())) as tar:
        files = [
            memoryview(tar.extractfile(member).read())  # type: ignore[union-attr]
            for member in tar
            if member.name.endswith(".json")
        ]
    sources = [CaptionSource("json", f"captions.{name}", 1.0) for name in ("caption", "made")]
    chosen = [choose_caption({"json": content}, sources, 0.2) for content in files[:2]]
    assert chosen == ["picture 0", "a made caption 1"]


def test_a_pack_without_columns_is_unchanged(album: Path, tmp_path: Path) -> None:
    table = write_table(album, "jsonl", ROWS)
    sm_train.pack(table, tmp_path / "out", caption_column="made")
    [document, *_] = documents(tmp_path / "out")
    assert "columns" not in document
    assert "captions" not in document


@pytest.mark.slow
def test_workers_and_resumes_give_the_same_bytes(album: Path, tmp_path: Path) -> None:
    table = write_table(album, "parquet", ROWS)
    contents = []
    for workers in (1, 3):
        out = tmp_path / str(workers)
        sm_train.pack(
            table,
            out,
            caption_column="made",
            index_column=COLUMNS,
            shard_size=20_000,
            workers=workers,
        )
        names = sorted(path.relative_to(out) for path in out.rglob("*.*") if path.is_file())
        contents.append({str(name): (out / name).read_bytes() for name in names})
    assert len([name for name in contents[0] if name.endswith(".tar")]) > 1
    assert contents[0] == contents[1]


def test_an_append_adds_values_and_compares_them(album: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {"caption_column": "made", "index_column": COLUMNS}
    sm_train.pack(write_table(album, "jsonl", ROWS[:3]), tmp_path / "out", **options)
    changed = [*ROWS]
    changed[1] = changed[1] | {"license": "withdrawn"}
    table = write_table(album, "jsonl", changed)
    result = sm_train.pack(table, tmp_path / "out", **options, append=True)
    assert result.appended is not None
    assert (result.appended.samples, result.appended.comparison.first_changed) == (3, ["001.jpg"])
    index = ShardIndex(tmp_path / "out" / "index.parquet")
    stored = [value for shard in range(len(index)) for value in index.shard(shard).columns["score"]]
    assert stored == [row["score"] for row in ROWS]


def test_an_append_of_another_type_is_refused(album: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {"caption_column": "made", "index_column": "contributor"}
    sm_train.pack(write_table(album, "jsonl", ROWS[:3]), tmp_path / "out", **options)
    rows = [row | {"contributor": f"C-{row['contributor']}"} for row in ROWS]
    table = write_table(album, "jsonl", rows)
    with pytest.raises(sm_train.UsageError, match=r"contributor .* type text, in .* integer"):
        sm_train.pack(table, tmp_path / "out", **options, append=True)


def test_other_types_of_parquet_become_json(album: Path, tmp_path: Path) -> None:
    row = ROWS[0] | {
        "expiry": date(2027, 3, 1),
        "price": Decimal("2.50"),
        "tags": ["a", "b"],
        "meta": {"width": 5, "at": date(2026, 1, 2)},
        "nan": float("nan"),
    }
    table = write_table(album, "parquet", [row])
    keep = ("expiry", "price", "tags", "meta", "nan")
    sm_train.pack(table, tmp_path / "out", keep=keep)
    [document] = documents(tmp_path / "out")
    assert document["columns"] == {
        "expiry": "2027-03-01",
        "price": 2.5,
        "tags": ["a", "b"],
        "meta": {"width": 5, "at": "2026-01-02"},
        "nan": None,
    }


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--keep", "licence"], "no column 'licence'; it has image, caption"),
        (["--index-column", "tags"], "--index-column: tags holds lists; the index takes texts"),
        (["--keep", "thumbnail"], "--keep: the column thumbnail holds bytes"),
    ],
)
def test_columns_that_cannot_be_kept_are_refused_in_one_line(
    album: Path, tmp_path: Path, cli: Cli, arguments: list[str], message: str
) -> None:
    table = write_table(
        album, "parquet", [row | {"tags": ["a"], "thumbnail": b"\0"} for row in ROWS]
    )
    result = cli("pack", str(table), str(tmp_path / "out"), *arguments)
    assert result.returncode == 2
    assert message in result.stderr
    assert not (tmp_path / "out" / "index.parquet").exists()


def test_columns_need_a_table_but_a_source_does_not(album: Path, tmp_path: Path, cli: Cli) -> None:
    result = cli("pack", str(album), str(tmp_path / "out"), "--keep", "license")
    assert result.returncode == 2
    assert "--keep: needs a table; pass one as SRC or --captions" in result.stderr
    sm_train.pack(album, tmp_path / "out", index_column="source")
    index = ShardIndex(tmp_path / "out" / "index.parquet")
    assert index.shard(0).columns["source"][0] == "000.jpg"


def test_cells_of_csv_that_are_no_numbers_stay_texts() -> None:
    lines = ["id,size,flag,mixed", "007,1,true,1", "12,,FALSE,x", "3,2.5e1,,"]
    types = CsvTypes(enumerate(csv.DictReader(lines), 1), ["id", "size", "flag", "mixed"])
    rows = [[types.cell(name, row[name]) for name in row] for row in csv.DictReader(lines)]
    assert rows == [["007", 1.0, True, "1"], ["12", None, False, "x"], ["3", 25.0, None, None]]


@given(st.lists(st.floats(allow_nan=False, allow_infinity=False), min_size=1))
def test_numbers_of_csv_are_read_back_exactly(values: list[float]) -> None:
    lines = ["number", *map(repr, values)]
    types = CsvTypes(enumerate(csv.DictReader(lines), 1), ["number"])
    assert [types.cell("number", repr(value)) for value in values] == values
