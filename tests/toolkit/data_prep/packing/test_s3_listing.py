"""Listing the objects below an S3 prefix, folder by folder at the same time."""

from __future__ import annotations

import gzip
import io
import json
from datetime import UTC, datetime
from pathlib import Path
from threading import Event
from typing import Any
from urllib.parse import quote_plus

import pyarrow
import pyarrow.parquet
import pytest
from sm_train.entrypoints.data_prep.packing.plan_files import PlannedInputs
from sm_train.entrypoints.storage.store import S3Access, open_store
from sm_train.toolkit.base.errors import UserError
from sm_train.toolkit.data_prep.packing.inputs import InputSource, find_inputs
from sm_train.toolkit.data_prep.packing.s3_listing import merge_in_threads

from tests.conftest import Aws

pytestmark = pytest.mark.integration

KEYS = [
    *(f"set/{letter}/{number}/{name}" for letter in "abc" for number in range(8) for name in "xy"),
    *("set/top", "set/a/middle", "set/a/1.5/deep/er", "set/odd.name.v1", "settle/other"),
]
"""Images without their extension, at several depths; the last one is outside the folder."""


@pytest.fixture
def access(aws: Aws, monkeypatch: pytest.MonkeyPatch) -> S3Access:
    for name, value in aws.environment.items():
        monkeypatch.setenv(name, value)
    aws.make_bucket("raw")
    access = S3Access(region="us-east-1")
    store = open_store(access)
    for key in KEYS:
        store.put("raw", f"{key}.jpg", b"12345")
        store.put("raw", f"{key}.txt", b"text")
    for name in ("set/b/notes.md", "set/a/0/table.csv", "set/lonely.txt", "set/folder/"):
        store.put("raw", name, b"")
    return access


def test_all_folders_below_a_prefix_are_listed(access: S3Access, tmp_path: Path) -> None:
    inputs = find_inputs(InputSource("s3://raw/set/", access=access), tmp_path)
    found = list(PlannedInputs(inputs.files, inputs.root, 0, inputs.images))
    expected = sorted(f"{key.removeprefix('set/')}.jpg" for key in KEYS[:-1])
    assert [item.source for item in found] == expected
    assert {item.address for item in found} == {f"s3://raw/set/{name}" for name in expected}
    assert all(item.caption_address == f"{item.address[:-4]}.txt" for item in found)
    assert {kind: skipped.first for kind, skipped in inputs.skipped.items()} == {
        "csv": ["a/0/table.csv"],
        "md": ["b/notes.md"],
        "txt": ["lonely.txt"],
    }


def test_a_prefix_may_end_inside_a_name(access: S3Access, tmp_path: Path) -> None:
    inputs = find_inputs(InputSource("s3://raw/set", access=access), tmp_path)
    found = list(PlannedInputs(inputs.files, inputs.root, 0, inputs.images))
    assert [item.source for item in found] == sorted(f"{key}.jpg" for key in KEYS)


def test_an_error_while_listing_is_one_line(access: S3Access, tmp_path: Path) -> None:
    with pytest.raises(UserError) as error:
        find_inputs(InputSource("s3://missing/set/", access=access), tmp_path)
    assert "\n" not in str(error.value)


def test_results_of_threads_are_merged_and_errors_raised() -> None:
    merged = merge_in_threads(lambda item: [item, -item], range(1, 50), threads=4)
    assert sorted(merged) == [number for number in range(-49, 50) if number]
    assert list(merge_in_threads(lambda item: [item], [], threads=2)) == []
    with pytest.raises(ZeroDivisionError):
        list(merge_in_threads(lambda item: [1 // (item - 5)], range(1, 9), threads=2))


def test_threads_wait_for_their_results_and_end_with_the_reader() -> None:
    far_ahead = Event()

    def count(item: int) -> list[int]:
        if item > 100:
            far_ahead.set()
        return [item]

    merged = merge_in_threads(count, range(1, 100_000), threads=2)
    next(merged)
    assert not far_ahead.wait(0.5)
    merged.close()


NAMES = ["a b/é+1.jpg", "a b/é+1.txt", "top.jpg", "top.txt", "more/x,y.png", "notes.md"]


def write_inventory(access: S3Access, file_format: str, **changes: Any) -> str:
    """Write an inventory of two files as S3 does; return the address of its manifest."""
    store = open_store(access)
    files = []
    for number, names in enumerate((NAMES[::2], NAMES[1::2])):
        rows = [(name, 7, datetime(2026, 1, 2, tzinfo=UTC), True, False) for name in names]
        rows += [("old.jpg", 7, datetime(2026, 1, 1, tzinfo=UTC), False, False)]
        rows += [("deleted.jpg", None, datetime(2026, 1, 1, tzinfo=UTC), True, True)]
        file = io.BytesIO()
        if file_format == "CSV":
            lines = [
                f'"raw2","{quote_plus(name, safe="/")}","{"" if size is None else size}",'
                f'"{time:%Y-%m-%dT%H:%M:%S.000Z}","{str(latest).lower()}","{str(gone).lower()}"\n'
                for name, size, time, latest, gone in rows
            ]
            file.write(gzip.compress("".join(lines).encode()))
        else:
            columns = ("key", "size", "last_modified_date", "is_latest", "is_delete_marker")
            cells = [dict(zip(columns, row, strict=True)) | {"bucket": "raw2"} for row in rows]
            pyarrow.parquet.write_table(pyarrow.Table.from_pylist(cells), file)
        key = f"list/raw2/daily/data/{number}"
        store.put("raw", key, file.getvalue())
        files.append({"key": key, "size": len(file.getvalue()), "MD5checksum": ""})
    manifest = {
        "sourceBucket": "raw2",
        "destinationBucket": "arn:aws:s3:::raw",
        "version": "2016-11-30",
        "creationTimestamp": "1767312000000",
        "fileFormat": file_format,
        "fileSchema": "Bucket, Key, Size, LastModifiedDate, IsLatest, IsDeleteMarker",
        "files": files,
    }
    key = "list/raw2/daily/2026-01-02T00-00Z/manifest.json"
    store.put("raw", key, json.dumps(manifest | changes).encode())
    return f"s3://raw/{key}"


@pytest.mark.parametrize("file_format", ["CSV", "Parquet"])
def test_an_inventory_gives_the_same_inputs_as_a_listing(
    access: S3Access, aws: Aws, tmp_path: Path, file_format: str
) -> None:
    aws.make_bucket("raw2")
    for name in NAMES:
        open_store(access).put("raw2", name, b"7 bytes")
    found = []
    for source in (write_inventory(access, file_format), "s3://raw2/"):
        folder = tmp_path / str(len(found))
        folder.mkdir()
        inputs = find_inputs(InputSource(source, access=access), folder)
        items = list(PlannedInputs(inputs.files, inputs.root, 0, inputs.images))
        found.append((items, inputs.fingerprint, inputs.root, inputs.skipped))
    assert found[0] == found[1]
    assert [item.source for item in found[0][0]] == ["a b/é+1.jpg", "more/x,y.png", "top.jpg"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"fileFormat": "ORC"}, "the inventory has the format ORC; configure CSV or Parquet"),
        ({"files": 5}, "is not the manifest of an S3 Inventory"),
        ({"files": [{"key": "gone"}]}, "s3://raw/gone"),
        ({"fileSchema": "Bucket, Key"}, "not CSV"),
        (
            {"fileSchema": "Bucket, Key, ETag, LastModifiedDate, IsLatest, IsDeleteMarker"},
            "has no sizes; add Size to the fields of the inventory",
        ),
    ],
)
def test_an_unusable_inventory_is_one_line(
    access: S3Access, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError) as error:
        find_inputs(InputSource(write_inventory(access, "CSV", **changes), access=access), tmp_path)
    assert message in str(error.value)
    assert "\n" not in str(error.value)
