"""``iam``: commands on data sets run with the policy that is printed for each."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from PIL import Image

from tests.conftest import Aws, Cli
from tests.support.aws.policy_enforcement import ACCOUNT, allowed
from tests.support.run_files import write_run

MAKER = "def brightness(batch):\n    return {'brightness': [1.0] * len(batch.images)}\n"


LOST_WRITES = {
    "set/.packing/lease",
    "set/index",
    "rich/.packing/lease",
    "set/.indexing/shards/.packing/lease",
}
"""The files of the destination that the commands write on a condition."""


def photo(number: int) -> bytes:
    file = io.BytesIO()
    Image.effect_noise((64, 64), 20 + number).convert("RGB").save(file, "JPEG")
    return file.getvalue()


@pytest.mark.integration
@pytest.mark.parametrize("loses", [False, True], ids=["answers", "lost answers"])
def test_commands_on_data_need_only_their_policy(
    cli: Cli, aws: Aws, tmp_path: Path, loses: bool
) -> None:
    """Also if the first answer to each conditional write is lost after S3 has carried it out."""
    aws.loses_conditional_writes = loses
    aws.make_bucket("raw")
    aws.make_bucket("packed", **{"other/secret.tar": b"x"})
    aws.make_bucket("ai-bucket")
    s3 = aws.client("s3")
    s3.put_bucket_versioning(Bucket="packed", VersioningConfiguration={"Status": "Enabled"})
    for number in range(4):
        s3.put_object(Bucket="raw", Key=f"photos/{number}.jpg", Body=photo(number))
        s3.put_object(Bucket="raw", Key=f"photos/{number}.txt", Body=b"a photo")
    run = write_run(
        tmp_path,
        role=f"arn:aws:iam::{ACCOUNT}:role/sm-train",
        data={"uri": "s3://packed/set/shards/"},
    )
    (tmp_path / "makers.py").write_text(MAKER)
    options = {"network": "loopback", "env": aws.environment, "cwd": tmp_path}
    printed = cli(
        "iam", run, "--json", "--source", "s3://raw/photos/", "--destination", "s3://packed/rich/"
    )
    assert printed.returncode == 0, printed.stderr
    documents = json.loads(printed.stdout)

    def run_command(*command: str) -> None:
        aws.policy = documents[command[0]]
        result = cli("--region", "us-east-1", *command, **options)
        assert aws.denied == [], (command, result.stderr)
        assert result.returncode == 0, (command, result.stderr)

    run_command("pack", "s3://raw/photos/", "s3://packed/set/")
    s3.put_object(Bucket="raw", Key="photos/9.jpg", Body=photo(9))
    s3.put_object(Bucket="raw", Key="photos/9.txt", Body=b"a photo")
    run_command("pack", "s3://raw/photos/", "s3://packed/set/", "--append")
    run_command("enrich", "s3://packed/set/", "s3://packed/rich/", "--with", "makers:brightness")
    run_command("lineage", "s3://packed/set/", "1.jpg", "--runs", "s3://ai-bucket")
    run_command("remove", "s3://packed/set/", "2.jpg", "--yes")
    # Shards without an index of a pack: their index is made of their content.
    for key in ("index.parquet", "index.parquet.listing"):
        s3.delete_object(Bucket="packed", Key=f"set/{key}")
    run_command("index", "s3://packed/set/shards/")
    lost = {path.removeprefix("/packed/").rpartition(".")[0] for path in aws.lost}
    assert lost == (LOST_WRITES if loses else set())
    for name in ("pack", "index", "enrich", "remove", "lineage", "stream"):
        for action in ("s3:GetObject", "s3:PutObject", "s3:DeleteObject"):
            assert allowed(documents[name], action, "arn:aws:s3:::packed/other/secret.tar") is None
        assert allowed(documents[name], "s3:DeleteObject", "arn:aws:s3:::raw/photos/1.jpg") is None
        assert allowed(documents[name], "s3:ListBucket", "arn:aws:s3:::packed", "other/") is None


@pytest.mark.parametrize("option", ["--source", "--destination"])
def test_other_addresses_than_those_of_s3_are_named(cli: Cli, tmp_path: Path, option: str) -> None:
    result = cli("iam", write_run(tmp_path), option, "photos/")
    assert result.returncode == 2
    assert f"{option}: 'photos/' is no S3 prefix: write s3://BUCKET/PREFIX/" in result.stderr
