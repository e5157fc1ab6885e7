"""Packing on SageMaker Processing: the request, and what its machines do together."""

from __future__ import annotations

import io
import json
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest
from botocore.loaders import Loader
from botocore.model import ServiceModel
from botocore.validate import ParamValidator
from sm_train.estimators.sdk.model_trainer import without_timestamps

from tests.conftest import Aws, Cli, clean_environment
from tests.support.image_files import album, picture, tree, write_pair
from tests.support.run_files import write_run
from tests.toolkit.packing.test_pack_options import below, upload

SIZE = ("--shard-size", "20KB")
PACK = ("pack", "s3://raw/photos/", "s3://packed/set", *SIZE)


@pytest.fixture
def cloud(cli: Cli, aws: Aws, tmp_path: Path) -> Any:
    """``sm-train`` in a region, with thirteen images in one bucket and another for shards."""
    album(tmp_path / "in", 12)
    write_pair(tmp_path / "in", "cut.jpg", picture()[:300], "x")
    write_pair(tmp_path / "in", "twin.jpg", picture(3), "the same as another")
    upload(aws, tmp_path / "in", "photos/")
    aws.make_bucket("packed")
    aws.make_bucket("my-bucket")

    def run(*arguments: object) -> Any:
        options = {"network": "loopback", "env": aws.environment, "timeout": 120}
        return cli("--region", "us-east-1", *arguments, **options)

    return run


@pytest.mark.parametrize("vpc", [None, {"subnets": ["subnet-1"], "security_groups": ["sg-1"]}])
def test_what_goes_over_the_wire_is_what_the_dry_run_shows(
    cloud: Any, aws: Aws, tmp_path: Path, vpc: dict[str, list[str]] | None
) -> None:
    cluster = {"instance_type": "ml.g5.xlarge"} | ({"vpc": vpc} if vpc else {})
    run = write_run(tmp_path, bucket="my-bucket", cluster=cluster, tags={"team": "images"})
    on = ("--on", "sagemaker", "--for", run, "--instances", "2")
    dry = cloud(*PACK, *on, "--dry-run", "--json")
    assert dry.returncode == 0, dry.stderr
    assert aws.bodies("CreateProcessingJob") == []
    shown = json.loads(dry.stdout)
    assert (shown["cost_usd"], shown["cost_limit_usd"]) == (None, None)
    assert "cost unknown: no processing price is known (`sm-train cost --refresh`" in dry.stderr
    model = ServiceModel(Loader().load_service_model("sagemaker", "service-2"))
    shape = model.operation_model("CreateProcessingJob").input_shape
    assert not ParamValidator().validate(shown["request"], shape).has_errors()
    sent = cloud(*PACK, *on, "--yes", "--json")
    assert sent.returncode == 0, sent.stderr
    [body] = aws.bodies("CreateProcessingJob")
    assert without_timestamps(body) == without_timestamps(shown["request"])
    assert json.loads(sent.stdout)["processing_job_name"] == body["ProcessingJobName"]
    assert body["ProcessingResources"]["ClusterConfig"]["InstanceCount"] == 2
    assert ("NetworkConfig" in body) is bool(vpc)


def test_the_question_names_the_dollars(cloud: Any, aws: Aws, tmp_path: Path) -> None:
    """After one's own price list: the limit's, and a guess by the assumed speed."""
    run = write_run(
        tmp_path,
        bucket="my-bucket",
        cluster={"instance_type": "ml.g5.xlarge", "max_runtime": "10h"},
    )
    prices = tmp_path / "prices.csv"
    prices.write_text("instance_type,kind,usd_per_hour\nml.c7i.8xlarge,processing,2.5\n")
    on = ("--on", "sagemaker", "--for", run, "--instances", "2", "--prices", prices)
    asked = cloud(*PACK, *on)
    assert asked.returncode == 130
    assert "at most $50.00 ($2.5000 an instance-hour" in asked.stderr
    assert "about $0.42 for 5 min, if a vCPU packs 20 MB/s" in asked.stderr
    assert aws.bodies("CreateProcessingJob") == []
    shown = json.loads(cloud(*PACK, *on, "--dry-run", "--json").stdout)
    assert (shown["cost_limit_usd"], round(shown["cost_usd"], 2)) == (50, 0.42)


def test_without_a_yes_nothing_is_sent(cloud: Any, aws: Aws, tmp_path: Path) -> None:
    run = write_run(tmp_path, bucket="my-bucket")
    asked = cloud(*PACK, "--on", "sagemaker", "--for", run)
    assert asked.returncode == 130
    assert aws.bodies("CreateProcessingJob") == []
    assert below(aws, "packed", "") == {}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("pack", "s3://raw/photos/", "out"), "--on: DST out must be an S3 prefix"),
        (("pack", "in", "s3://packed/set"), "is on this machine; SageMaker reads from S3 alone"),
        ((*PACK, "--instances", "99"), "--instances: 99 for "),
        ((*PACK, "--instance", "ml.c7i.8xlrge"), "did you mean ml.c7i.8xlarge?"),
    ],
)
def test_what_cannot_be_packed_there_is_one_line(
    cloud: Any, tmp_path: Path, arguments: tuple[str, ...], words: str
) -> None:
    run = write_run(tmp_path, bucket="my-bucket")
    found = cloud(*arguments, "--on", "sagemaker", "--for", run, "--dry-run")
    assert found.returncode != 0
    assert words in found.stderr
    assert found.stderr.count("sm-train: ") == 1


def machine(folder: Path, aws: Aws, body: dict[str, Any], rank: int) -> subprocess.Popen[str]:
    """A machine of the job as the platform starts it: inputs copied, nothing but the bundle."""
    base = folder / f"machine-{rank}"
    for one in body["ProcessingInputs"]:
        bucket, _, prefix = one["S3Input"]["S3Uri"].removeprefix("s3://").partition("/")
        place = base / one["S3Input"]["LocalPath"].removeprefix("/opt/ml/")
        for name, content in below(aws, bucket, f"{prefix}/").items():
            (place / name).parent.mkdir(parents=True, exist_ok=True)
            (place / name).write_bytes(content)
    (base / "config").mkdir()
    hosts = ["algo-1", "algo-2"]
    resources = {"current_host": hosts[rank], "hosts": hosts}
    (base / "config/resourceconfig.json").write_text(json.dumps(resources))
    archive = base / "processing/input/code/sourcedir.tar.gz"
    with tarfile.open(fileobj=io.BytesIO(archive.read_bytes())) as tar:
        tar.extractall(base / "code", filter="data")
    return subprocess.Popen(
        [sys.executable, "-m", "sm_train.entrypoints.packing.processing_job", "--base", str(base)],
        cwd=base / "code",
        env=clean_environment(folder)
        | aws.environment
        | body["Environment"]
        | {"PYTHONPATH": str(base / "code")},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.mark.parametrize(
    "extra", [(), pytest.param(("--near-duplicates", "3"), marks=pytest.mark.slow)]
)
def test_two_machines_make_what_one_makes(
    cli: Cli, cloud: Any, aws: Aws, tmp_path: Path, extra: tuple[str, ...]
) -> None:
    """Also where an image is a duplicate of one that the other machine looks at."""
    run = write_run(tmp_path, bucket="my-bucket")
    on = ("--on", "sagemaker", "--for", run, "--instances", "2", "--yes")
    sent = cloud(*PACK, *extra, *on)
    assert sent.returncode == 0, sent.stderr
    [body] = aws.bodies("CreateProcessingJob")
    both = [machine(tmp_path, aws, body, rank) for rank in (0, 1)]
    said = [one.communicate(timeout=120)[0] for one in both]
    assert [one.returncode for one in both] == [0, 0], said
    assert cli("pack", "in", "out", *SIZE, *extra, "--for", run).returncode == 0
    here = {name: content for name, content in tree(tmp_path / "out").items() if "." in name}
    assert below(aws, "packed", "set/") == here
    assert sum("samples," in one for one in said) >= 1
    again = cloud(*PACK, *extra, *on)
    assert "already packed" in again.stderr
    assert len(aws.bodies("CreateProcessingJob")) == 1
