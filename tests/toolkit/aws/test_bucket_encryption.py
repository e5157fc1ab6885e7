"""New objects name the bucket's KMS key, so that a policy which demands SSE-KMS allows them."""

from __future__ import annotations

from pathlib import Path

import boto3
import pytest
from boto3.s3.transfer import TransferConfig
from hypothesis import given
from hypothesis import strategies as st
from sm_train.entrypoints.storage.bucket_settings import (
    KEYS_VARIABLE,
    OWNERS_VARIABLE,
    bucket_variables,
    declare_buckets,
    declared_key,
    declared_owner,
)
from sm_train.toolkit.aws.session import open_session

from tests.conftest import Aws, Cli
from tests.support.image_files import write_album
from tests.support.run_documents import config
from tests.support.run_files import one_line, write_run

KEY = "arn:aws:kms:us-east-1:345678901234:key/1234abcd-12ab-34cd-56ef-1234567890ab"
SHARDS = {f"shards/{index}.tar": b"x" for index in range(4)} | {"index.parquet": b"x"}


@pytest.mark.integration
def test_submit_to_a_bucket_that_demands_the_runs_key(cli: Cli, aws: Aws, tmp_path: Path) -> None:
    aws.make_bucket("ai-bucket", **SHARDS)
    aws.required_keys["ai-bucket"] = KEY
    options = {"network": "loopback", "env": aws.environment}
    denied = cli("submit", write_run(tmp_path), "--yes", **options)
    assert denied.returncode == 4
    assert "demands SSE-KMS, name the key in output_kms_key" in one_line(denied.stderr)
    assert aws.bodies("CreateTrainingJob") == []
    run = write_run(tmp_path, output_kms_key=KEY)
    submitted = cli("submit", run, "--yes", **options)
    assert submitted.returncode == 0, submitted.stderr
    [job] = aws.bodies("CreateTrainingJob")
    assert job["OutputDataConfig"]["KmsKeyId"] == KEY
    s3 = aws.client("s3")
    stored = {entry["Key"] for entry in s3.list_objects_v2(Bucket="ai-bucket")["Contents"]}
    for key in stored - SHARDS.keys():
        assert s3.head_object(Bucket="ai-bucket", Key=key)["SSEKMSKeyId"].endswith(KEY), key


@pytest.mark.integration
def test_a_bucket_with_a_key_of_its_own(cli: Cli, aws: Aws, tmp_path: Path) -> None:
    """The bucket's key replaces the run's, also for the job's output."""
    aws.make_bucket("ai-bucket", **SHARDS)
    aws.required_keys["ai-bucket"] = "alias/bucket"
    keys = {"ai-bucket": "alias/bucket"}
    run = write_run(tmp_path, output_kms_key=KEY, bucket_kms_keys=keys)
    submitted = cli("submit", run, "--yes", network="loopback", env=aws.environment)
    assert submitted.returncode == 0, submitted.stderr
    [job] = aws.bodies("CreateTrainingJob")
    assert job["OutputDataConfig"]["KmsKeyId"] == "alias/bucket"


@pytest.mark.integration
def test_pack_and_index_to_a_bucket_that_demands_a_key(cli: Cli, aws: Aws, tmp_path: Path) -> None:
    aws.make_bucket("data")
    aws.required_keys["data"] = KEY
    write_album(tmp_path / "images", 3)
    options = {"network": "loopback", "env": aws.environment}
    pack = ("--region", "us-east-1", "pack", tmp_path / "images", "s3://data/set/")
    denied = cli(*pack, **options)
    assert denied.returncode == 4, denied.stderr
    assert "--bucket-kms-key" in denied.stderr
    packed = cli("--bucket-kms-key", f"data={KEY}", *pack, **options)
    assert packed.returncode == 0, packed.stderr
    s3 = aws.client("s3")
    s3.delete_object(Bucket="data", Key="set/index.parquet")
    index = ("--region", "us-east-1", "index", "s3://data/set/shards/")
    assert cli(*index, **options).returncode == 4
    indexed = cli(*index, "--bucket-kms-key", f"data={KEY}", **options)
    assert indexed.returncode == 0, indexed.stderr
    head = s3.head_object(Bucket="data", Key="set/index.parquet")
    assert head["ServerSideEncryption"] == "aws:kms"
    invalid = cli("--bucket-kms-key", "data", *index, **options)
    assert invalid.returncode == 2
    assert "BUCKET=KEY" in one_line(invalid.stderr)


def test_parts_of_uploads_take_the_key_of_their_upload(
    aws: Aws, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    aws.make_bucket("data")
    aws.required_keys["data"] = "alias/data"
    for variable, value in aws.environment.items():
        monkeypatch.setenv(variable, value)
    monkeypatch.setenv(KEYS_VARIABLE, "data=alias/data")
    s3 = open_session(None, "us-east-1").client("s3")
    parts = TransferConfig(multipart_threshold=5 << 20, multipart_chunksize=5 << 20)
    original = tmp_path / "original"
    original.write_bytes(bytes(11 << 20))
    s3.upload_file(str(original), "data", "a", Config=parts)
    s3.copy({"Bucket": "data", "Key": "a"}, "data", "b", Config=parts)
    s3.copy_object(Bucket="data", Key="c", CopySource="data/a")
    assert {entry["Size"] for entry in s3.list_objects_v2(Bucket="data")["Contents"]} == {11 << 20}


def test_a_request_that_names_its_encryption_keeps_it(
    aws: Aws, monkeypatch: pytest.MonkeyPatch
) -> None:
    aws.make_bucket("data")
    aws.required_keys["data"] = "alias/of-the-call"
    for variable, value in aws.environment.items():
        monkeypatch.setenv(variable, value)
    monkeypatch.setenv(KEYS_VARIABLE, "data=alias/data")
    s3 = open_session(None, "us-east-1").client("s3")
    encryption = {"ServerSideEncryption": "aws:kms", "SSEKMSKeyId": "alias/of-the-call"}
    s3.put_object(Bucket="data", Key="a", Body=b"x", **encryption)  # type: ignore[arg-type]


def test_the_server_of_these_tests_denies_objects_without_the_key(aws: Aws) -> None:
    aws.make_bucket("data")
    aws.required_keys["data"] = "alias/data"
    session = boto3.Session("testing", "testing", region_name="us-east-1")
    s3 = session.client("s3", endpoint_url=aws.url)
    with pytest.raises(s3.exceptions.ClientError, match="AccessDenied"):
        s3.put_object(Bucket="data", Key="a", Body=b"x")
    with pytest.raises(s3.exceptions.ClientError, match="AccessDenied"):
        s3.create_multipart_upload(Bucket="data", Key="a")
    aws.without_owner.clear()


_BUCKETS = st.from_regex(r"[a-z0-9][a-z0-9.-]{1,20}", fullmatch=True)
_KEYS = st.from_regex(r"[a-zA-Z0-9:/_-]{1,60}", fullmatch=True)
_OWNERS = st.from_regex(r"[0-9]{12}", fullmatch=True)


@pytest.mark.integration
@given(st.dictionaries(_BUCKETS, _OWNERS), st.dictionaries(_BUCKETS, _KEYS))
def test_a_child_process_reads_what_was_declared(
    owners: dict[str, str], keys: dict[str, str]
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv(OWNERS_VARIABLE, raising=False)
        patch.delenv(KEYS_VARIABLE, raising=False)
        for variable, value in bucket_variables(owners, keys).items():
            patch.setenv(variable, value)
        assert {bucket: declared_owner(bucket) for bucket in owners} == owners
        expected = {bucket: None if key == "default" else key for bucket, key in keys.items()}
        assert {bucket: declared_key(bucket) for bucket in keys} == expected


def test_later_declarations_keep_other_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEYS_VARIABLE, "first=alias/a")
    declare_buckets(keys={"second": "alias/b"})
    declare_buckets(owners={"third": "any"})
    assert declared_key("first") == "alias/a"
    assert declared_key("second") == "alias/b"
    assert declared_key("third") is None
    monkeypatch.delenv(OWNERS_VARIABLE)


@pytest.mark.parametrize(
    ("changes", "bucket", "key"),
    [
        ({"output_kms_key": KEY}, "ai-bucket", KEY),
        ({"output_kms_key": KEY}, "elsewhere", None),
        ({"output_kms_key": KEY, "bucket": None}, "sagemaker-us-east-1-111122223333", KEY),
        ({"output_kms_key": KEY, "bucket": None}, "sagemaker-us-east-1-444455556666", None),
        ({"bucket_kms_keys": {"elsewhere": "alias/a"}}, "elsewhere", "alias/a"),
        ({"bucket_kms_keys": {"elsewhere": "alias/a"}}, "ai-bucket", None),
        (
            {"output_kms_key": KEY, "bucket_kms_keys": {"ai-bucket": "default"}},
            "ai-bucket",
            None,
        ),
    ],
)
def test_run_file_names_the_key_of_each_bucket(
    monkeypatch: pytest.MonkeyPatch, changes: dict[str, object], bucket: str, key: str | None
) -> None:
    role = "arn:aws:iam::111122223333:role/Train"
    monkeypatch.setenv(KEYS_VARIABLE, "")
    declare_buckets(keys=config(role=role, **changes).bucket_keys)
    assert declared_key(bucket) == key
