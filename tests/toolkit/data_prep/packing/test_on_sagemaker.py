"""Packing on SageMaker Processing: the request, and the nodes of a job."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from botocore.loaders import Loader
from botocore.model import ServiceModel
from botocore.validate import ParamValidator
from sm_train.cost.prices import shipped_prices
from sm_train.estimators.sdk.model_trainer import without_timestamps

from tests.conftest import Aws, Cli
from tests.support.deadline import DEADLINE
from tests.support.image_files import image_bytes, read_tree, write_album, write_pair
from tests.support.moto_server import ACCOUNT
from tests.support.run_documents import stage
from tests.support.run_files import write_run
from tests.toolkit.data_prep.packing.on_sagemaker_support import printed_policies, start_node
from tests.toolkit.data_prep.packing.pack_options_support import (
    read_objects,
    upload_folder,
    without_root,
)

pytestmark = pytest.mark.integration

SIZE = ("--shard-size", "20KB")
PACK = ("pack", "s3://raw/photos/", "s3://packed/set", *SIZE)


@pytest.fixture
def cloud(cli: Cli, aws: Aws, tmp_path: Path) -> Any:
    """Run ``sm-train`` with fourteen images in one bucket and another bucket for shards."""
    write_album(tmp_path / "in", 12)
    write_pair(tmp_path / "in", "cut.jpg", image_bytes()[:300], "x")
    write_pair(tmp_path / "in", "twin.jpg", image_bytes(3), "a duplicate")
    upload_folder(aws, tmp_path / "in", "photos/")
    aws.make_bucket("packed")
    aws.make_bucket("ai-bucket")

    def run(*arguments: object) -> Any:
        options = {"network": "loopback", "env": aws.environment, "timeout": 120}
        return cli("--region", "us-east-1", *arguments, **options)

    return run


@pytest.mark.parametrize("vpc", [None, {"subnets": ["subnet-1"], "security_groups": ["sg-1"]}])
def test_the_request_that_is_sent_is_the_one_of_the_dry_run(
    cloud: Any, aws: Aws, tmp_path: Path, vpc: dict[str, list[str]] | None
) -> None:
    cluster = {"instance_type": "ml.g5.xlarge"} | ({"vpc": vpc} if vpc else {})
    stages = [stage() | {"sharding": "auto"}]  # the default
    run = write_run(
        tmp_path, bucket="ai-bucket", cluster=cluster, tags={"team": "images"}, stages=stages
    )
    on = ("--on", "sagemaker", "--for", run, "--instances", "2")
    dry = cloud(*PACK, *on, "--dry-run", "--json")
    assert dry.returncode == 0, dry.stderr
    assert aws.bodies("CreateProcessingJob") == []
    document = json.loads(dry.stdout)
    assert 0 < document["cost_usd"] < document["cost_limit_usd"]
    assert "AWS Price List API" in " ".join(dry.stderr.split())
    model = ServiceModel(Loader().load_service_model("sagemaker", "service-2"))
    shape = model.operation_model("CreateProcessingJob").input_shape
    assert not ParamValidator().validate(document["request"], shape).has_errors()
    sent = cloud(*PACK, *on, "--yes", "--json")
    assert sent.returncode == 0, sent.stderr
    [body] = aws.bodies("CreateProcessingJob")
    assert without_timestamps(body) == without_timestamps(document["request"])
    assert json.loads(sent.stdout)["processing_job_name"] == body["ProcessingJobName"]
    assert body["ProcessingResources"]["ClusterConfig"]["InstanceCount"] == 2
    assert ("NetworkConfig" in body) is bool(vpc)


def test_a_type_without_a_price_has_no_cost(cloud: Any, tmp_path: Path) -> None:
    run = write_run(tmp_path, bucket="ai-bucket")
    on = ("--on", "sagemaker", "--for", run, "--instance", "ml.m4.xlarge", "--dry-run", "--json")
    dry = cloud(*PACK, *on)
    assert dry.returncode == 0, dry.stderr
    document = json.loads(dry.stdout)
    assert (document["cost_usd"], document["cost_limit_usd"]) == (None, None)
    assert "cost unknown: no processing price is known" in " ".join(dry.stderr.split())


def test_the_confirmation_shows_the_cost(cloud: Any, aws: Aws, tmp_path: Path) -> None:
    """The cost at the time limit and at the assumed speed."""
    run = write_run(
        tmp_path,
        bucket="ai-bucket",
        cluster={"instance_type": "ml.g5.xlarge", "max_runtime": "10h"},
    )
    hourly = shipped_prices().processing_price("ml.c7i.8xlarge", "us-east-1").usd_per_instance_hour
    assert hourly is not None
    on = ("--on", "sagemaker", "--for", run, "--instances", "2")
    unconfirmed = cloud(*PACK, *on)
    assert unconfirmed.returncode == 2
    assert f"at most ${20 * hourly:.2f} (${hourly:.4f} per instance-hour" in unconfirmed.stderr
    assert f"about ${hourly / 6:.2f} for 5 min, if a vCPU packs 20 MB/s" in unconfirmed.stderr
    assert aws.bodies("CreateProcessingJob") == []
    document = json.loads(cloud(*PACK, *on, "--dry-run", "--json").stdout)
    assert document["cost_limit_usd"] == pytest.approx(float(20 * hourly))


def test_nothing_is_sent_without_confirmation(cloud: Any, aws: Aws, tmp_path: Path) -> None:
    run = write_run(tmp_path, bucket="ai-bucket")
    unconfirmed = cloud(*PACK, "--on", "sagemaker", "--for", run)
    assert unconfirmed.returncode == 2
    assert aws.bodies("CreateProcessingJob") == []
    assert read_objects(aws, "packed", "") == {}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("pack", "s3://raw/photos/", "out"), "--on: DST out must be an S3 prefix"),
        (("pack", "in", "s3://packed/set"), "is a local file; SageMaker reads only from S3"),
        ((*PACK, "--instances", "99"), "--instances: 99 for "),
        ((*PACK, "--instance", "ml.c7i.8xlrge"), "did you mean ml.c7i.8xlarge?"),
    ],
)
def test_invalid_arguments_are_one_line(
    cloud: Any, tmp_path: Path, arguments: tuple[str, ...], message: str
) -> None:
    run = write_run(tmp_path, bucket="ai-bucket")
    result = cloud(*arguments, "--on", "sagemaker", "--for", run, "--dry-run")
    assert result.returncode != 0
    assert message in result.stderr
    assert result.stderr.count("sm-train: ") == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    "extra", [(), pytest.param(("--near-duplicates", "3"), marks=pytest.mark.slow)]
)
def test_two_nodes_build_the_same_pack_as_one(
    cli: Cli, cloud: Any, aws: Aws, tmp_path: Path, extra: tuple[str, ...]
) -> None:
    """Also if an image duplicates one that is assigned to the other node.

    Both buckets deny objects that do not name their key. The command and the nodes may do what
    `iam` prints for them, and no more.
    """
    aws.required_keys = {"ai-bucket": "alias/train", "packed": "alias/packed"}
    run = write_run(
        tmp_path,
        bucket="ai-bucket",
        role=f"arn:aws:iam::{ACCOUNT}:role/own",
        data={"uri": "s3://packed/set/shards/"},
        output_kms_key="alias/train",
        bucket_kms_keys={"packed": "alias/packed"},
    )
    on = ("--on", "sagemaker", "--for", run, "--instances", "2", "--yes")
    documents = printed_policies(cli, run, "--source", "s3://raw/photos/")
    aws.policy = documents["pack"]
    sent = cloud(*PACK, *extra, *on)
    assert sent.returncode == 0, sent.stderr
    [body] = aws.bodies("CreateProcessingJob")
    aws.policy = documents["processing"]
    nodes = [start_node(tmp_path, aws, body, rank) for rank in (0, 1)]
    logs = [node.communicate(timeout=DEADLINE)[0] for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], logs
    assert aws.denied == []
    aws.policy = None
    assert cli("pack", "in", "out", *SIZE, *extra, "--for", run).returncode == 0
    local = {name: content for name, content in read_tree(tmp_path / "out").items() if "." in name}
    assert without_root(read_objects(aws, "packed", "set/")) == without_root(local)
    assert sum("samples," in log for log in logs) >= 1
    again = cloud(*PACK, *extra, *on)
    assert "already packed" in again.stderr
    assert len(aws.bodies("CreateProcessingJob")) == 1


def test_an_index_is_made_with_the_printed_policies(
    cli: Cli, cloud: Any, aws: Aws, tmp_path: Path
) -> None:
    run = write_run(
        tmp_path,
        bucket="ai-bucket",
        role=f"arn:aws:iam::{ACCOUNT}:role/own",
        data={"uri": "s3://packed/set/shards/"},
    )
    assert cloud("pack", "s3://raw/photos/", "s3://packed/set", *SIZE).returncode == 0
    for key in ("index.parquet", "index.parquet.listing"):
        aws.client("s3").delete_object(Bucket="packed", Key=f"set/{key}")
    documents = printed_policies(cli, run)
    aws.policy = documents["index"]
    on = ("--on", "sagemaker", "--for", run, "--yes")
    sent = cloud("index", "s3://packed/set/shards/", *on)
    assert sent.returncode == 0, sent.stderr
    # Another command asks whether the job that holds the destination still runs.
    again = cloud("index", "s3://packed/set/shards/", *on)
    assert "another sm-train command is writing to it" in again.stderr
    [body] = aws.bodies("CreateProcessingJob")
    aws.policy = documents["processing"]
    node = start_node(tmp_path, aws, body, 0)
    log, _ = node.communicate(timeout=DEADLINE)
    assert node.returncode == 0, log
    assert aws.denied == []
    assert "index.parquet" in read_objects(aws, "packed", "set/")
    assert not {"sagemaker:CreateProcessingJob", "iam:PassRole"} & actions(documents["processing"])
    alone = json.loads(cli("iam", run, "--json").stdout)
    assert "processing" not in alone
    assert "iam:PassRole" not in actions(alone["index"])


def actions(policy: dict[str, Any]) -> set[str]:
    return {action for statement in policy["Statement"] for action in statement["Action"]}


def test_the_policy_of_jobs_needs_jobs(cli: Cli, tmp_path: Path) -> None:
    refused = cli("iam", write_run(tmp_path), "--only", "processing")
    assert refused.returncode == 2
    assert "processing is the policy of jobs; give --on sagemaker, too" in refused.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("--only", "remove", "--on", "sagemaker"),
            "--on: sagemaker does not change the policy",
        ),
        (("--only", "job", "--source", "s3://raw/"), "--source: s3://raw/ does not change"),
        (("--only", "pack", "--destination", "s3://d/"), "--destination: s3://d/ does not change"),
        (("--source", "s3://"), "--source: 's3://' is no S3 prefix"),
    ],
)
def test_an_option_of_iam_without_effect_is_refused(
    cli: Cli, tmp_path: Path, arguments: tuple[str, ...], message: str
) -> None:
    refused = cli("iam", write_run(tmp_path), *arguments)
    assert refused.returncode == 2
    assert refused.stdout == ""
    assert refused.stderr.startswith(f"sm-train: {message}")


def test_a_data_set_that_is_a_whole_bucket_is_pointed_out(cli: Cli, tmp_path: Path) -> None:
    whole = cli("iam", write_run(tmp_path), "--only", "index")
    assert "warning: data.uri: the data set is all of ai-bucket" in whole.stderr
    part = write_run(tmp_path, data={"uri": "s3://ai-bucket/set/shards/"})
    assert "data.uri" not in cli("iam", part, "--only", "index").stderr
