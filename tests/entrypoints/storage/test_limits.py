"""Limits of requests to S3, and what their errors say, with a server that answers as S3 does."""

from __future__ import annotations

import random

import pytest
from botocore.exceptions import ClientError
from sm_train.entrypoints.storage.bucket_settings import ANY_OWNER, OWNERS_VARIABLE
from sm_train.entrypoints.storage.store import ObjectStore, S3Access, open_store, store_of

from tests.conftest import Aws
from tests.support.moto_server import aws_session

pytestmark = pytest.mark.integration

CONTENT = random.Random(0).randbytes(20 * 2**20)


@pytest.fixture
def store(aws: Aws, monkeypatch: pytest.MonkeyPatch) -> ObjectStore:
    for name, value in aws.environment.items():
        monkeypatch.setenv(name, value)
    aws.make_bucket("bucket", large=CONTENT)
    return store_of(aws_session())


def test_a_large_object_is_read_in_ranges_of_8_mib(store: ObjectStore, aws: Aws) -> None:
    """What one object keeps in memory and repeats after an error is bounded."""
    assert store.read("bucket", "large") == CONTENT
    assert len([path for method, path, _ in aws.requests if method == "GET"]) == 3


def test_a_process_opens_at_most_64_connections() -> None:
    """Each is a socket, and a response that is read; S3 allows many, a laptop's network fewer."""
    opened = open_store(S3Access(None, "us-east-1"))
    assert opened._client.meta.config.max_pool_connections == 64


@pytest.mark.parametrize("owner", [ANY_OWNER, None])
def test_a_denial_blames_the_owner_only_if_one_was_expected(
    store: ObjectStore, aws: Aws, monkeypatch: pytest.MonkeyPatch, owner: str | None
) -> None:
    if owner is not None:
        monkeypatch.setenv(OWNERS_VARIABLE, f"bucket={owner}")
    denied = b"<Error><Code>AccessDenied</Code><Message>no</Message></Error>"
    aws.intercept = lambda method, path: (403, denied) if path.startswith("/bucket") else None
    with pytest.raises(ClientError) as error:
        store.get("bucket", "large")
    assert ("own the bucket" in str(error.value)) == (owner is None)


def test_the_region_in_a_denial_is_not_an_answer(store: ObjectStore, aws: Aws) -> None:
    """S3 names a bucket's region also when it denies access to it."""
    aws.headers["x-amz-bucket-region"] = "eu-west-1"
    denied = b"<Error><Code>AccessDenied</Code><Message>no</Message></Error>"
    aws.intercept = lambda method, path: (403, denied) if path.startswith("/bucket") else None
    with pytest.raises(ClientError, match="AccessDenied"):
        store.bucket_region("bucket", "")
