"""A job from the container's first process on: the SDK's start script, staged by the SDK."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

import psutil
import pytest
from sm_train.entrypoints.base.sagemaker_paths import SageMakerPaths
from sm_train.entrypoints.launcher.launch import hyperparameters, torchrun
from sm_train.estimators.bundle.bundle import REQUIREMENTS, Bundle, build_bundle
from sm_train.estimators.config.naming import staging_uri
from sm_train.estimators.config.schema import RunConfig
from sm_train.estimators.request.launch_plan import launch_plan
from sm_train.estimators.request.request_patch import additions
from sm_train.estimators.request.training_request import TrainingRequest, training_request
from sm_train.estimators.sdk.model_trainer import create_training_job
from sm_train.toolkit.records.job_logs import parse_event
from sm_train.toolkit.submit.local.emulated_channels import channel_files

from tests.conftest import Aws, clean_environment
from tests.support.cluster.training_jobs import DEADLINE, tiny_run, write_shards
from tests.support.moto_server import aws_session

pytestmark = pytest.mark.integration

PLATFORM = Path("/opt/ml")
"""SageMaker's folder in a container; its path is fixed in the start script."""


@pytest.fixture
def platform() -> Iterator[None]:
    """Create the folder during the test, as a mount point for the job's folder."""
    if os.geteuid() != 0:
        pytest.skip("a container's first process needs a PID namespace, which needs root")
    made = not PLATFORM.exists()
    PLATFORM.mkdir(parents=True, exist_ok=True)
    yield
    if made:
        PLATFORM.rmdir()


def without_requirements(bundle: Bundle) -> Bundle:
    """Empty the requirements: installing packages would change this environment."""
    packed = io.BytesIO()
    with (
        tarfile.open(fileobj=io.BytesIO(bundle.archive)) as before,
        tarfile.open(fileobj=packed, mode="w:gz") as after,
    ):
        for entry in before:
            content = before.extractfile(entry)
            assert content is not None
            if entry.name == REQUIREMENTS:
                entry.size, content = 0, io.BytesIO()
            after.addfile(entry, content)
    return dataclasses.replace(bundle, archive=packed.getvalue())


def stage_job(aws: Aws, config: RunConfig, base: Path) -> TrainingRequest:
    """Submit through the SDK, and download the channels as SageMaker would."""
    [stage] = config.stages
    bundle = without_requirements(build_bundle(config, None))
    request = training_request(
        config,
        stage,
        launch_plan(config, stage, "own:1"),
        bundle,
        region="us-east-1",
        staged=staging_uri(config, stage, "us-east-1", datetime.now()),
    )
    session = aws_session()
    create_training_job(
        request,
        bundle,
        boto_session=session,
        bucket="ai-bucket",
        added=additions(config.cluster),
    )
    [request] = aws.bodies("CreateTrainingJob")
    s3 = aws.client("s3")
    for channel in request["InputDataConfig"]:
        uri = channel["DataSource"]["S3DataSource"]["S3Uri"]
        prefix = uri.removeprefix("s3://ai-bucket/")
        listed = s3.list_objects_v2(Bucket="ai-bucket", Prefix=prefix).get("Contents", ())
        for path, key in channel_files([entry["Key"] for entry in listed], prefix).items():
            target = base / "input" / "data" / channel["ChannelName"] / path
            target.parent.mkdir(parents=True, exist_ok=True)
            s3.download_file("ai-bucket", key, str(target))
    settings = base / "input" / "config"
    settings.mkdir(parents=True)
    hosts = {
        "current_host": "algo-1",
        "hosts": ["algo-1"],
        "network_interface_name": "lo",
        "current_instance_type": "ml.g5.xlarge",
    }
    channels = {entry["ChannelName"]: {} for entry in request["InputDataConfig"]}
    (settings / "resourceconfig.json").write_text(json.dumps(hosts))
    (settings / "inputdataconfig.json").write_text(json.dumps(channels))
    (settings / "hyperparameters.json").write_text(json.dumps(request["HyperParameters"]))
    (base / "output").mkdir()
    return request


@pytest.mark.usefixtures("platform")
def test_sigterm_to_the_first_process_ends_with_a_checkpoint(
    aws: Aws, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", aws.url)
    base = tmp_path / "ml"
    config = tiny_run(max_steps=10**6, checkpoint_every=10**6, log_every=5)
    aws.make_bucket("ai-bucket")
    write_shards(tmp_path / "packed", shards=2, each=20)
    for shard in (tmp_path / "packed").iterdir():
        for folder in ("shards", "shards-old"):
            aws.client("s3").upload_file(str(shard), "ai-bucket", f"{folder}/{shard.name}")
    request = stage_job(aws, config, base)
    algorithm = request["AlgorithmSpecification"]
    container = [*algorithm["ContainerEntrypoint"], *algorithm["ContainerArguments"]]
    mounted = f'mount --bind {base} {PLATFORM} && exec "$@"'
    process = subprocess.Popen(
        [
            "unshare",
            "--mount",
            "--pid",
            "--fork",
            "--kill-child",
            "--mount-proc",
            "sh",
            "-c",
            mounted,
            "-",
            *container,
        ],
        env=clean_environment(tmp_path)
        | request["Environment"]
        | {
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "TRAINING_JOB_NAME": request["TrainingJobName"],
            "ACCELERATE_USE_CPU": "true",
            "OMP_NUM_THREADS": "1",
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    output: list[str] = []
    try:
        assert process.stdout is not None
        for line in process.stdout:
            output.append(line)
            event = parse_event(line)
            # At every step: a second SIGTERM must not interrupt the checkpoint.
            if event and event["kind"] == "step":
                [first] = psutil.Process(process.pid).children()
                first.terminate()
        code = process.wait(timeout=DEADLINE)
    finally:
        process.kill()
        process.wait()
    text = "".join(output)
    end = [event for line in output if (event := parse_event(line)) and event["kind"] == "end"]
    assert [event["reason"] for event in end] == ["sigterm"], text
    # A channel is a string prefix: without its final slash it would hold the old shards, too.
    assert len([*(base / "input" / "data" / "train").rglob("*.tar")]) == 2
    assert (base / "checkpoints" / f"step-{end[0]['step']:08d}" / "complete.json").is_file()
    assert code == 0, text


def test_each_node_starts_one_process_per_gpu() -> None:
    environment = {
        "SM_NUM_GPUS": "8",
        "SM_HOST_COUNT": "4",
        "SM_CURRENT_HOST_RANK": "2",
        "SM_MASTER_ADDR": "algo-1",
        "SM_MASTER_PORT": "7777",
    }
    command = torchrun(environment, ["train.py", "--stage", "a"])
    assert command[-3:] == ["train.py", "--stage", "a"]
    assert {
        "--nproc_per_node=8",
        "--nnodes=4",
        "--node_rank=2",
        "--master_addr=algo-1",
        "--master_port=7777",
    } <= set(command)


def test_single_node_starts_standalone() -> None:
    command = torchrun({"SM_NUM_GPUS": "0", "SM_HOST_COUNT": "1"}, ["train.py"])
    assert command[-3:] == ["--nproc_per_node=1", "--standalone", "train.py"]


def test_hyperparameters_are_passed_unchanged(tmp_path: Path) -> None:
    """A stage may be called 007 or 1e3, which the SDK's parser would turn into numbers."""
    path = tmp_path / "input" / "config" / "hyperparameters.json"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps({"stage": "1e3", "doctor-only": "true"}))
    assert hyperparameters(SageMakerPaths(tmp_path)) == ["--stage", "1e3", "--doctor-only", "true"]
