"""S3 requests expect the bucket's owner. Every test with the ``aws`` fixture also checks that."""

from __future__ import annotations

from pathlib import Path

import boto3
import pytest
from boto3.s3.transfer import TransferConfig
from sm_train.entrypoints.storage.bucket_settings import OWNERS_VARIABLE, declare_buckets
from sm_train.toolkit.aws.session import open_session, session_in_region

from tests.conftest import Aws, Cli
from tests.support.run_files import one_line, write_run

pytestmark = pytest.mark.integration

OTHER = "999988887777"
SHARDS = {f"shards/{index}.tar": b"x" for index in range(4)} | {"index.parquet": b"x"}


def test_bucket_of_another_account_is_rejected_with_one_line(
    cli: Cli, aws: Aws, tmp_path: Path
) -> None:
    aws.make_bucket("ai-bucket", **SHARDS)
    aws.bucket_owners["ai-bucket"] = OTHER
    result = cli("submit", write_run(tmp_path), "--yes", network="loopback", env=aws.environment)
    assert result.returncode == 4
    line = one_line(result.stderr)
    assert "bucket ai-bucket: AWS returned AccessDenied" in line
    assert "account 345678901234 does not own the bucket" in line
    assert "bucket_owners" in line
    assert aws.bodies("CreateTrainingJob") == []
    checked = cli("check", tmp_path / "run.yaml", network="loopback", env=aws.environment)
    assert "if it is not account 345678901234" in " ".join(checked.stderr.split())
    stored = aws.client("s3").list_objects_v2(Bucket="ai-bucket")["Contents"]
    assert {entry["Key"] for entry in stored} == SHARDS.keys(), "nothing was uploaded"


@pytest.mark.parametrize("owner", [OTHER, "any"])
def test_run_file_names_the_owner_of_a_shared_bucket(
    cli: Cli, aws: Aws, tmp_path: Path, owner: str
) -> None:
    """Also by the run's name alone: the job's tag and its record name the owner."""
    aws.make_bucket("ai-bucket", **SHARDS)
    aws.bucket_owners["ai-bucket"] = OTHER
    run = write_run(tmp_path, bucket_owners={"ai-bucket": owner})
    options = {"network": "loopback", "env": aws.environment}
    submitted = cli("submit", run, "--yes", **options)
    aws.without_owner.clear()  # `any` names none
    assert submitted.returncode == 0, submitted.stderr
    status = cli("--region", "us-east-1", "status", "demo", **options)
    aws.without_owner.clear()
    assert status.returncode == 0, status.stderr


def test_command_line_names_owners_where_there_is_no_run_file(
    cli: Cli, aws: Aws, tmp_path: Path
) -> None:
    aws.make_bucket("public", **{"set/shards/0.tar": b""})
    aws.bucket_owners["public"] = OTHER
    index = ("--region", "us-east-1", "index", "s3://public/set/shards/")
    options = {"network": "loopback", "env": aws.environment}
    denied = cli(*index, **options)
    assert denied.returncode == 4
    assert "--bucket-owner" in one_line(denied.stderr)
    allowed = cli("--bucket-owner", f"public={OTHER}", *index, **options)
    assert allowed.returncode == 0, allowed.stderr
    invalid = cli("--bucket-owner", "public", *index, **options)
    assert invalid.returncode == 2
    assert "BUCKET=ACCOUNT" in one_line(invalid.stderr)


def test_transfers_in_parts_expect_both_owners(
    aws: Aws, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Uploads, copies between regions and downloads of s3transfer, each in several parts."""
    aws.make_bucket("east")
    aws.make_bucket("west", "us-west-2")
    aws.bucket_owners["west"] = OTHER
    for variable, value in aws.environment.items():
        monkeypatch.setenv(variable, value)
    monkeypatch.setenv(OWNERS_VARIABLE, "")
    declare_buckets({"west": OTHER})
    east = open_session(None, "us-east-1")
    west = session_in_region(east, "us-west-2")
    parts = TransferConfig(multipart_threshold=5 << 20, multipart_chunksize=5 << 20)
    original, copy = tmp_path / "original", tmp_path / "copy"
    original.write_bytes(bytes(11 << 20))
    source, target = east.client("s3"), west.client("s3")
    source.upload_file(str(original), "east", "a", Config=parts)
    target.copy({"Bucket": "east", "Key": "a"}, "west", "b", SourceClient=source, Config=parts)
    target.download_file("west", "b", str(copy), Config=parts)
    assert copy.read_bytes() == original.read_bytes()
    sent = {method for method, path, _ in aws.requests if path in ("/east/a", "/west/b")}
    assert sent == {"HEAD", "GET", "PUT", "POST"}


def test_a_request_without_an_owner_fails_the_test_that_sends_it(aws: Aws) -> None:
    """The ``aws`` fixture requires that this list is empty."""
    aws.make_bucket("ai-bucket")
    session = boto3.Session("testing", "testing", region_name="us-east-1")
    s3 = session.client("s3", endpoint_url=aws.url)
    s3.put_object(Bucket="ai-bucket", Key="a", Body=b"x")
    s3.copy_object(
        Bucket="ai-bucket",
        Key="b",
        CopySource="ai-bucket/a",
        ExpectedBucketOwner="345678901234",  # but none for the source
    )
    s3.list_objects_v2(Bucket="ai-bucket")
    assert aws.without_owner == [
        "PUT ai-bucket/a?",
        "PUT ai-bucket/b?",
        "GET ai-bucket?list-type=2&encoding-type=url",
    ]
    aws.without_owner.clear()
