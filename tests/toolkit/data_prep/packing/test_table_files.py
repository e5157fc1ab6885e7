"""Tables as they are: in S3, compressed, in parts, with images inside, and of image folders."""

from __future__ import annotations

import gzip
import json
import tarfile
from pathlib import Path
from typing import Any

import pytest
import sm_train
from sm_train.entrypoints.shards.shard_index import ShardIndex
from sm_train.entrypoints.storage.store import S3Access, open_store

from tests.conftest import Aws, Cli
from tests.support.image_files import image_bytes, read_tree, write_album
from tests.support.tables import encode_table

ROWS = [
    {"image": f"{number:03}.jpg", "caption": f"picture {number}", "score": number}
    for number in range(8)
]


@pytest.fixture
def album(tmp_path: Path) -> Path:
    """Return a folder of images without a table."""
    write_album(tmp_path / "in", len(ROWS), flat=True)
    return tmp_path / "in"


def samples(packed: Path | str) -> list[dict[str, bytes]]:
    """Return the files of all samples of a pack, by extension."""
    found: dict[str, dict[str, bytes]] = {}
    for shard in sorted((Path(packed) / "shards").iterdir()):
        with tarfile.open(shard) as tar:
            for member in tar:
                key, _, extension = member.name.partition(".")
                content = tar.extractfile(member)
                assert content is not None
                found.setdefault(key, {})[extension] = content.read()
    return list(found.values())


def captions(packed: Path) -> list[str]:
    return [sample["txt"].decode() for sample in samples(packed)]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["jsonl", "csv"])
def test_a_compressed_table_is_that_of_its_content(album: Path, tmp_path: Path, kind: str) -> None:
    (album / f"a.{kind}").write_bytes(encode_table(kind, ROWS))
    (album / f"b.{kind}.gz").write_bytes(gzip.compress(encode_table(kind, ROWS)))
    options: dict[str, Any] = {"keep": "score", "where": "score > 2"}
    sm_train.pack(album / f"a.{kind}", tmp_path / "a", **options)
    sm_train.pack(album / f"b.{kind}.gz", tmp_path / "b", **options)
    assert len(captions(tmp_path / "a")) == 5
    assert samples(tmp_path / "a") == samples(tmp_path / "b")


def test_a_damaged_compressed_table_is_one_line(album: Path, tmp_path: Path, cli: Cli) -> None:
    content = gzip.compress(encode_table("jsonl", ROWS * 100))
    (album / "list.jsonl.gz").write_bytes(content[: len(content) // 2])
    result = cli("pack", str(album / "list.jsonl.gz"), str(tmp_path / "out"))
    assert result.returncode == 2
    assert "list.jsonl.gz: not gzip: Compressed file ended before" in result.stderr
    (album / "list.csv.gz").write_bytes(encode_table("csv", ROWS))
    result = cli("pack", str(album / "list.csv.gz"), str(tmp_path / "out"))
    assert "list.csv.gz: not gzip: Not a gzipped file" in result.stderr


@pytest.mark.integration
def test_a_folder_of_parquet_parts_is_one_table(album: Path, tmp_path: Path) -> None:
    """As a source, as captions, and as a pattern; Spark's own files are no parts."""
    parts = tmp_path / "parts"
    parts.mkdir()
    (parts / "_SUCCESS").touch()
    (parts / "_metadata.parquet").write_bytes(b"")
    rows = [row | {"image": str(album / str(row["image"]))} for row in ROWS]
    for number, part in enumerate((rows[:3], rows[3:4], rows[4:])):
        (parts / f"part-{number:05}.parquet").write_bytes(encode_table("parquet", part))
    expected = [row["caption"] for row in ROWS if int(str(row["score"])) > 2]
    pattern = str(parts / "part-*.parquet")
    for number, source in enumerate((parts, pattern)):
        # Absolute paths of images are outside of the folder of their table.
        with pytest.raises(sm_train.UsageError, match="outside-source 5"):
            sm_train.pack(source, tmp_path / f"refused-{number}", where="score > 2")
    sm_train.pack(album, tmp_path / "out", captions=parts, where="score > 2")
    assert captions(tmp_path / "out") == expected


def test_parts_next_to_images_are_no_table(album: Path, tmp_path: Path) -> None:
    (album / "part.parquet").write_bytes(encode_table("parquet", ROWS[:1]))
    sm_train.pack(album, tmp_path / "out")
    assert len(captions(tmp_path / "out")) == len(ROWS)


def embedded_rows(column: str) -> list[dict[str, Any]]:
    """Return rows with images inside, as bytes or as Hugging Face stores them."""
    contents = [image_bytes(number) for number in range(8)]
    images: list[Any] = list(contents)
    if column == "object":
        images = [{"bytes": content, "path": "a.jpg"} for content in contents]
    return [
        {"image": image, "caption": f"picture {number}", "score": number}
        for number, image in enumerate(images)
    ]


@pytest.mark.slow
@pytest.mark.parametrize("column", ["object", "bytes"])
@pytest.mark.parametrize("workers", [1, 3])
def test_images_inside_a_table_are_packed(tmp_path: Path, column: str, workers: int) -> None:
    """Whatever their row groups are, in the order of the rows, with duplicates dropped."""
    rows = embedded_rows(column)
    rows[5] = rows[5] | {"image": rows[1]["image"]}
    (tmp_path / "in.parquet").write_bytes(encode_table("parquet", rows, row_group_size=3))
    result = sm_train.pack(
        tmp_path / "in.parquet",
        tmp_path / "out",
        keep="score",
        index_column="source",
        workers=workers,
        shard_size=20_000,
        drop_duplicates=True,
    )
    assert result.shards > 1
    assert result.rejected_by_reason == {"duplicate": 1}
    kept = [number for number in range(8) if number != 5]
    found = samples(tmp_path / "out")
    assert [sample["jpg"] for sample in found] == [image_bytes(number) for number in kept]
    assert [json.loads(sample["json"])["columns"]["score"] for sample in found] == kept
    assert json.loads(found[0]["json"])["source"] == "in.parquet/000000001"
    assert ShardIndex(tmp_path / "out" / "index.parquet").shard(0).columns["source"][0] == (
        "in.parquet/000000001"
    )


def test_an_edited_table_of_images_is_another_source(tmp_path: Path) -> None:
    """Also if its images have as many bytes as before."""
    rows = embedded_rows("bytes")
    table = tmp_path / "in.parquet"
    table.write_bytes(encode_table("parquet", rows))
    sm_train.pack(table, tmp_path / "out")
    assert sm_train.pack(table, tmp_path / "out").up_to_date
    rows[0]["image"], rows[1]["image"] = rows[1]["image"], rows[0]["image"]
    table.write_bytes(encode_table("parquet", rows))
    with pytest.raises(sm_train.UsageError):
        sm_train.pack(table, tmp_path / "out")


def test_rows_without_bytes_name_a_file(album: Path, tmp_path: Path) -> None:
    """A row with neither is rejected, with its number."""
    rows = embedded_rows("object")
    rows[2]["image"] = {"bytes": None, "path": "002.jpg"}
    rows[3]["image"] = {"bytes": None, "path": None}
    rows[4]["image"] = None
    (album / "in.parquet").write_bytes(encode_table("parquet", rows, row_group_size=3))
    sm_train.pack(album / "in.parquet", tmp_path / "out")
    index = ShardIndex(tmp_path / "out" / "index.parquet")
    assert [(item.source, item.reason) for item in index.rejected()] == [
        ("in.parquet row 4", "image-missing"),
        ("in.parquet row 5", "image-missing"),
    ]
    found = {sample["txt"].decode(): sample["jpg"] for sample in samples(tmp_path / "out")}
    assert found == {
        f"picture {number}": image_bytes(number) for number in range(8) if number not in (3, 4)
    }


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["jsonl", "csv"])
def test_an_image_folder_has_its_captions_in_metadata(tmp_path: Path, kind: str) -> None:
    for split in ("train", "test"):
        write_album(tmp_path / "in" / split, 4, flat=True)
        rows = [{"file_name": f"{n:03}.jpg", "text": f"{split} {n}", "n": n} for n in range(4)]
        (tmp_path / "in" / split / f"metadata.{kind}").write_bytes(encode_table(kind, rows))
    sm_train.pack(tmp_path / "in", tmp_path / "out", keep="n", where="n > 0")
    assert captions(tmp_path / "out") == [
        f"{split} {n}" for split in ("test", "train") for n in (1, 2, 3)
    ]
    [first, *_] = samples(tmp_path / "out")
    assert json.loads(first["json"])["source"] == "test/001.jpg"
    sm_train.pack(tmp_path / "in" / "train", tmp_path / "one")
    assert captions(tmp_path / "one") == [f"train {n}" for n in range(4)]


def test_addresses_of_the_web_are_refused_with_the_reason(
    album: Path, tmp_path: Path, cli: Cli
) -> None:
    rows = [*ROWS, {"image": "https://example.com/a.jpg", "caption": "x", "score": 1}]
    refused = cli("pack", "https://example.com/list.csv", str(tmp_path / "out"))
    assert refused.returncode == 2
    assert "addresses of the web are not read; download it first" in refused.stderr
    (album / "list.jsonl").write_bytes(encode_table("jsonl", rows))
    result = cli("pack", str(album / "list.jsonl"), str(tmp_path / "out"), "-v")
    assert result.returncode == 0
    assert "image-address" in result.stderr
    assert "addresses of the web are not downloaded; use img2dataset first" in result.stderr


def test_a_caption_that_is_true_is_no_text(album: Path, tmp_path: Path) -> None:
    rows = [row | {"caption": (True, None, "a", 5)[number % 4]} for number, row in enumerate(ROWS)]
    (album / "list.jsonl").write_bytes(encode_table("jsonl", rows))
    result = sm_train.pack(album / "list.jsonl", tmp_path / "out", keep="score")
    assert result.rejected_by_reason == {"caption-missing": 2, "caption-not-text": 2}
    assert captions(tmp_path / "out") == ["a", "5", "a", "5"]


@pytest.fixture
def bucket(aws: Aws, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that stores an object in the bucket raw."""
    for name, value in aws.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    aws.make_bucket("raw")
    store = open_store(S3Access(region="us-east-1"))

    def put(key: str, content: bytes) -> None:
        store.put("raw", key, content)

    for number in range(len(ROWS)):
        put(f"photos/{number:03}.jpg", image_bytes(number))
    return put


@pytest.mark.slow
@pytest.mark.integration
def test_tables_in_s3_are_read(bucket: Any, tmp_path: Path) -> None:
    """A file, a compressed one, parts, and an image folder; as a source and as captions."""
    bucket("photos/list.csv", encode_table("csv", ROWS))
    bucket("lists/list.jsonl.gz", gzip.compress(encode_table("jsonl", ROWS)))
    bucket("parts/part-0.parquet", encode_table("parquet", ROWS[:5]))
    bucket("parts/part-1.parquet", encode_table("parquet", ROWS[5:]))
    bucket("parts/_SUCCESS", b"")
    for number, (source, table) in enumerate(
        [
            ("s3://raw/photos/list.csv", None),
            ("s3://raw/photos/", "s3://raw/lists/list.jsonl.gz"),
            ("s3://raw/photos/", "s3://raw/parts/"),
        ]
    ):
        out = tmp_path / str(number)
        sm_train.pack(source, out, captions=table, where="score > 1", keep="score")
        assert captions(out) == [row["caption"] for row in ROWS[2:]]
    trees = [samples(tmp_path / str(number)) for number in range(3)]
    assert trees[0] == trees[1] == trees[2]
    names = [{"file_name": row["image"], "text": f"of S3 {row['score']}"} for row in ROWS]
    bucket("photos/metadata.jsonl", encode_table("jsonl", names))
    sm_train.pack("s3://raw/photos/", tmp_path / "folder")
    assert captions(tmp_path / "folder") == [f"of S3 {number}" for number in range(8)]


@pytest.mark.integration
def test_images_inside_a_table_in_s3_are_packed(bucket: Any, tmp_path: Path) -> None:
    """Without a download of the table: row groups are read by range."""
    bucket("set/in.parquet", encode_table("parquet", embedded_rows("object"), row_group_size=3))
    sm_train.pack("s3://raw/set/in.parquet", tmp_path / "out", workers=2)
    assert [sample["jpg"] for sample in samples(tmp_path / "out")] == list(
        map(image_bytes, range(8))
    )
    sm_train.pack("s3://raw/set/", tmp_path / "again", workers=1)
    assert read_tree(tmp_path / "again" / "shards") == read_tree(tmp_path / "out" / "shards")


@pytest.mark.integration
def test_a_table_that_is_not_in_s3_is_one_line(bucket: Any, tmp_path: Path) -> None:
    for name in ("gone.csv", "gone.parquet"):
        with pytest.raises(sm_train.UsageError, match=f"s3://raw/{name}: no such table"):
            sm_train.pack(f"s3://raw/{name}", tmp_path / "out")
