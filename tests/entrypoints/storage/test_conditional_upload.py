"""Uploads in parts that take effect only if the object has not changed meanwhile."""

from __future__ import annotations

import random

import pytest
from botocore.exceptions import ClientError
from sm_train.entrypoints.storage import conditional_upload
from sm_train.entrypoints.storage.store import ObjectStore, store_of

from tests.conftest import Aws
from tests.support.moto_server import aws_session

pytestmark = pytest.mark.integration

PART = 5 * 2**20
"""S3's smallest part."""

CONTENT = random.Random(0).randbytes(2 * PART + 1000)


@pytest.fixture
def store(aws: Aws, monkeypatch: pytest.MonkeyPatch) -> ObjectStore:
    for name, value in aws.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(conditional_upload, "PART_BYTES", PART)
    aws.make_bucket("bucket", key=b"old")
    return store_of(aws_session())


def write(store: ObjectStore, key: str, etag: str | None, content: bytes) -> str | None:
    with store.writer_if("bucket", key, etag=etag) as file:
        for first in range(0, len(content), 70_000):
            file.write(content[first : first + 70_000])
        assert file.tell() == len(content)
    return file.etag


def etag_of(store: ObjectStore, key: str) -> str:
    head = store.head("bucket", key)
    assert head is not None
    return head.etag


def unfinished(aws: Aws) -> int:
    return len(aws.client("s3").list_multipart_uploads(Bucket="bucket").get("Uploads", []))


@pytest.mark.parametrize("content", [b"", b"small", CONTENT], ids=["empty", "small", "parts"])
def test_the_object_is_written_if_it_is_the_expected_one(
    store: ObjectStore, aws: Aws, content: bytes
) -> None:
    assert write(store, "new", None, content) == etag_of(store, "new")
    assert store.get("bucket", "new") == content
    assert write(store, "key", etag_of(store, "key"), content) == etag_of(store, "key")
    assert store.get("bucket", "key") == content
    assert unfinished(aws) == 0


@pytest.mark.parametrize("content", [b"small", CONTENT], ids=["small", "parts"])
def test_an_object_that_has_changed_stays(store: ObjectStore, aws: Aws, content: bytes) -> None:
    before = etag_of(store, "key")
    store.put("bucket", "key", b"of another writer")
    assert write(store, "key", before, content) is None
    assert write(store, "key", None, content) is None
    assert store.get("bucket", "key") == b"of another writer"
    store.delete("bucket", "key")
    assert write(store, "key", before, content) is None
    assert unfinished(aws) == 0


def test_an_error_aborts_the_upload(store: ObjectStore, aws: Aws) -> None:
    def fail() -> None:
        with store.writer_if("bucket", "key", etag=None) as file:
            file.write(CONTENT)
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert store.get("bucket", "key") == b"old"
    assert unfinished(aws) == 0


@pytest.mark.parametrize("content", [b"", b"small", CONTENT], ids=["empty", "small", "parts"])
def test_lost_answer_of_its_own_write_is_success(
    store: ObjectStore, aws: Aws, content: bytes
) -> None:
    """S3 has stored it; botocore repeats the request, which S3 then refuses."""
    before = etag_of(store, "key")
    aws.loses_conditional_writes = True
    assert write(store, "new", None, content) == etag_of(store, "new")
    assert write(store, "key", before, content) == etag_of(store, "key")
    assert [store.get("bucket", key) for key in ("new", "key")] == [content, content]
    assert aws.lost == ["/bucket/new", "/bucket/key"]
    assert unfinished(aws) == 0


@pytest.mark.parametrize("content", [b"same", CONTENT], ids=["small", "parts"])
def test_refusal_after_a_retry_is_not_success_if_another_wrote_the_same_content(
    store: ObjectStore, aws: Aws, content: bytes
) -> None:
    before = etag_of(store, "key")
    store.put("bucket", "key", content)
    refused = set[str]()

    def fail_once(method: str, path: str) -> tuple[int, bytes] | None:
        if method == "HEAD" or path in refused:
            return None
        refused.add(path)
        return 500, b""

    aws.intercept = fail_once
    assert write(store, "key", before, content) is None
    refused.clear()
    assert write(store, "key", None, content) is None
    assert refused
    assert unfinished(aws) == 0


def test_last_attempt_whose_answer_is_lost_is_success(
    store: ObjectStore, aws: Aws, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With no attempt left nothing is repeated, and the object shows that it was written."""
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    once = store_of(aws_session())
    aws.loses_conditional_writes = True
    assert write(once, "new", None, b"content") == etag_of(store, "new")
    assert write(once, "parts", None, CONTENT) == etag_of(store, "parts")
    aws.loses_conditional_writes = False
    aws.intercept = lambda method, path: (503, b"") if method == "PUT" else None
    with pytest.raises(ClientError):
        write(once, "other", None, b"content")


def test_a_lost_answer_that_cannot_be_looked_up_is_an_error(store: ObjectStore, aws: Aws) -> None:
    """Whether the object is its own is unknown: it is not called another writer's."""
    aws.loses_conditional_writes = True
    aws.intercept = lambda method, path: (403, b"") if method == "HEAD" else None
    with pytest.raises(ClientError, match="403"):
        write(store, "new", None, b"content")
