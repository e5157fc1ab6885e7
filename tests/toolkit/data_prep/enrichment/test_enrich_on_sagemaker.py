"""``sm-train enrich --on sagemaker``: the request, its price, and the nodes of a job."""

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
from tests.support.image_files import write_album
from tests.support.moto_server import ACCOUNT
from tests.support.run_files import write_run
from tests.toolkit.data_prep.packing.on_sagemaker_support import printed_policies, start_node
from tests.toolkit.data_prep.packing.pack_options_support import read_objects, upload_folder

pytestmark = pytest.mark.integration

CODE = """
def score(batch):
    weight = float((batch.model / "weight.txt").read_text())
    return {"score": [weight * image.width for image in batch.images]}
"""
ENRICH = ("enrich", "s3://raw/packed", "s3://scored/set", "--with", "scores:score")
OPTIONS = ("--index-column", "score", "--model", "model")


@pytest.fixture
def cloud(cli: Cli, aws: Aws, tmp_path: Path) -> Any:
    """Run ``sm-train`` with a pack of twelve images in a bucket, and a run file with code."""
    write_album(tmp_path / "in", 12)
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "scores.py").write_text(CODE)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "weight.txt").write_text("0.5")
    assert cli("pack", "in", "packed", "--shard-size", "10KB").returncode == 0
    upload_folder(aws, tmp_path / "packed", "packed/")
    for bucket in ("scored", "ai-bucket"):
        aws.make_bucket(bucket)
    write_run(
        tmp_path,
        bucket="ai-bucket",
        role=f"arn:aws:iam::{ACCOUNT}:role/own",
        code="code",
        cluster={"instance_type": "ml.g5.xlarge", "max_runtime": "10h"},
    )

    def run(*arguments: object) -> Any:
        options = {"network": "loopback", "env": aws.environment, "timeout": DEADLINE}
        on = ("--on", "sagemaker", "--for", "run.yaml")
        return cli("--region", "us-east-1", *arguments, *on, **options)

    return run


def test_the_price_is_shown_and_the_request_of_the_dry_run_is_sent(cloud: Any, aws: Aws) -> None:
    hourly = shipped_prices().processing_price("ml.g5.2xlarge", "us-east-1").usd_per_instance_hour
    assert hourly is not None
    unconfirmed = cloud(*ENRICH, *OPTIONS)
    assert unconfirmed.returncode == 2
    assert "cost unknown" not in unconfirmed.stderr
    assert f"at most ${10 * hourly:.2f} (${hourly:.4f} per instance-hour" in unconfirmed.stderr
    estimated = cloud(*ENRICH, *OPTIONS, "--images-per-second", "0.04", "--dry-run", "--json")
    assert "for 10 min, if an instance does 0.04 images/s" in estimated.stderr
    assert aws.bodies("CreateProcessingJob") == []
    assert read_objects(aws, "scored", "") == {}
    document = json.loads(cloud(*ENRICH, *OPTIONS, "--dry-run", "--json").stdout)
    assert (document["images"], document["cost_usd"]) == (12, None)
    model = ServiceModel(Loader().load_service_model("sagemaker", "service-2"))
    shape = model.operation_model("CreateProcessingJob").input_shape
    assert not ParamValidator().validate(document["request"], shape).has_errors()
    sent = cloud(*ENRICH, *OPTIONS, "--yes", "--json")
    assert sent.returncode == 0, sent.stderr
    [body] = aws.bodies("CreateProcessingJob")
    assert without_timestamps(body) == without_timestamps(document["request"])


@pytest.mark.slow
def test_two_nodes_make_the_same_shards_as_one_process(
    cli: Cli, cloud: Any, aws: Aws, tmp_path: Path
) -> None:
    sent = cloud(*ENRICH, *OPTIONS, "--instances", "2", "--yes")
    assert sent.returncode == 0, sent.stderr
    [body] = aws.bodies("CreateProcessingJob")
    nodes = [start_node(tmp_path, aws, body, rank) for rank in (0, 1)]
    logs = [node.communicate(timeout=DEADLINE)[0] for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], logs
    local = cli("enrich", "packed", "local", "--code", "code", *ENRICH[3:], *OPTIONS)
    assert local.returncode == 0, local.stderr
    stored = read_objects(aws, "scored", "set/")
    for name, content in stored.items():
        if name.endswith(".tar"):
            assert content == (tmp_path / "local" / name).read_bytes(), name
    result = json.loads(stored["enriched.json"])
    assert (result["images"], result["columns"]) == (12, {"score": "number"})
    assert not any(name.startswith(".packing") for name in stored), stored.keys()
    again = cloud(*ENRICH, *OPTIONS, "--instances", "2", "--yes")
    assert "already enriched" in again.stderr


@pytest.mark.slow
def test_images_in_s3_become_a_table_with_their_addresses(
    cli: Cli, cloud: Any, aws: Aws, tmp_path: Path
) -> None:
    upload_folder(aws, tmp_path / "in", "photos/")
    source = ("enrich", "s3://raw/photos/", "s3://scored/table", "--with", "scores:score")
    places = ("--source", "s3://raw/photos/", "--destination", "s3://scored/table/")
    documents = printed_policies(cli, tmp_path / "run.yaml", *places)
    aws.policy = documents["enrich"]
    sent = cloud(*source, "--model", "model", "--yes")
    assert aws.denied == [], sent.stderr
    assert sent.returncode == 0, sent.stderr
    [body] = aws.bodies("CreateProcessingJob")
    aws.policy = documents["processing"]
    node = start_node(tmp_path, aws, body, 0)
    log, _ = node.communicate(timeout=DEADLINE)
    assert node.returncode == 0, log
    assert aws.denied == []
    aws.policy = None
    environment = {"network": "loopback", "env": aws.environment, "timeout": DEADLINE}
    packed = cli(
        *("--region", "us-east-1", "pack", "s3://scored/table/table", "packed-table"),
        *("--index-column", "score"),
        **environment,
    )
    assert "packed 12 samples" in packed.stderr, packed.stderr


def test_a_credential_in_the_code_is_refused(cloud: Any, aws: Aws, tmp_path: Path) -> None:
    key = "AKIA" + "Z7QXJ3N5RKTW2MPL"
    (tmp_path / "code" / "settings.py").write_text(f'key = "{key}"\n')
    refused = cloud(*ENRICH, *OPTIONS, "--yes")
    assert refused.returncode == 2, refused.stderr
    assert "code/settings.py" in refused.stderr or "settings.py" in refused.stderr
    assert key not in refused.stderr
    assert aws.bodies("CreateProcessingJob") == []
    assert read_objects(aws, "scored", "") == {}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("enrich", "s3://raw/packed", "out", *ENRICH[3:]), "--on: DST out must be an S3 prefix"),
        (("enrich", "packed", *ENRICH[2:]), "SageMaker reads only from S3"),
        ((*ENRICH, "--instances", "99"), "--instances: 99 for "),
        ((*ENRICH, "--instance", "ml.g5.2xlrge"), "did you mean ml.g5.2xlarge?"),
    ],
)
def test_invalid_arguments_are_one_line(
    cloud: Any, arguments: tuple[str, ...], message: str
) -> None:
    result = cloud(*arguments, "--dry-run")
    assert result.returncode == 2, result.stderr
    assert message in result.stderr
    assert result.stderr.count("sm-train: ") == 1
