"""Files in a folder and objects in S3: read whole, written whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from sm_train.entrypoints.packing import storage
from sm_train.entrypoints.packing.storage import (
    Access,
    LocalFolder,
    S3Prefix,
    open_storage,
    read_uri,
    s3_client,
)

from tests.conftest import Aws

MEGABYTE = 2**20


@pytest.fixture
def prefix(aws: Aws, monkeypatch: pytest.MonkeyPatch) -> S3Prefix:
    for name, value in aws.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    s3_client.cache_clear()
    aws.make_bucket("bucket")
    return S3Prefix("bucket", "set/", Access())


@pytest.mark.parametrize("size", [0, 1, 8 * MEGABYTE, 8 * MEGABYTE + 1, 20 * MEGABYTE])
def test_an_object_is_read_in_ranges(aws: Aws, prefix: S3Prefix, size: int) -> None:
    content = os.urandom(size)
    aws.client("s3").put_object(Bucket="bucket", Key="set/a", Body=content)
    assert prefix.read("a") == content
    assert read_uri("s3://bucket/set/a", Access()) == content


def test_an_object_that_changes_between_two_ranges_is_an_error(
    aws: Aws, prefix: S3Prefix, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Never the first half of one version and the second of another."""
    monkeypatch.setattr(storage, "RANGE_BYTES", 10)
    s3 = aws.client("s3")
    s3.put_object(Bucket="bucket", Key="set/a", Body=b"0123456789abcdef")
    ranges = storage._ranges(s3_client(Access()), "bucket", "set/a")
    assert next(ranges) == b"0123456789"
    s3.put_object(Bucket="bucket", Key="set/a", Body=b"9876543210fedcba")
    with pytest.raises(Exception, match=r"PreconditionFailed|412"):
        next(ranges)


@pytest.mark.parametrize("size", [0, 5, 40 * MEGABYTE])
def test_an_object_appears_when_it_is_whole(aws: Aws, prefix: S3Prefix, size: int) -> None:
    content = os.urandom(size)
    with prefix.writing("a") as sink:
        for first in range(0, size, 7 * MEGABYTE):
            sink.write(content[first : first + 7 * MEGABYTE])
            assert prefix.size("a") is None
    assert prefix.size("a") == size
    assert prefix.read("a") == content


def test_an_error_leaves_no_object_and_no_upload(aws: Aws, prefix: S3Prefix) -> None:
    def broken() -> None:
        with prefix.writing("a") as sink:
            sink.write(os.urandom(20 * MEGABYTE))
            raise RuntimeError

    with pytest.raises(RuntimeError):
        broken()
    assert prefix.size("a") is None
    assert "Uploads" not in aws.client("s3").list_multipart_uploads(Bucket="bucket")


def test_an_object_is_created_once(prefix: S3Prefix) -> None:
    assert prefix.create("a", b"first")
    assert not prefix.create("a", b"second")
    assert prefix.read("a") == b"first"
    assert prefix.names("nothing") == {}


@pytest.fixture(params=["folder", "prefix"])
def either(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    if request.param == "folder":
        return LocalFolder(tmp_path / "set")
    return request.getfixturevalue("prefix")


def test_both_kinds_behave_alike(either: Any) -> None:
    assert either.size("a/b") is None
    with pytest.raises(FileNotFoundError):
        either.read("a/b")
    assert not either.holds("a")
    with either.writing("a/b") as sink:
        sink.write(b"one")
        sink.write(b"two")
    assert (either.read("a/b"), either.size("a/b"), either.holds("a")) == (b"onetwo", 6, True)
    assert either.shown("a/b").endswith("set/a/b")
    either.remove("a/b")
    either.remove("a/b")
    assert either.size("a/b") is None


def test_an_address_says_which_kind_it_is() -> None:
    assert open_storage("s3://b/p/q", Access()) == S3Prefix("b", "p/q/", Access())
    assert open_storage("s3://b", Access()) == S3Prefix("b", "", Access())
    assert open_storage("a/b", Access()) == LocalFolder(Path("a/b"))
