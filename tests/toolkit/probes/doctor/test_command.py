"""``sm-train doctor``: on emulated nodes, and as a job of its own."""

from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path
from typing import Any

import pytest
import yaml
from sm_train.entrypoints.job_interface.job_config import ExpectedPerformance, read_job_config
from sm_train.estimators.bundle.bundle import build_bundle
from sm_train.estimators.config.load import load_run
from sm_train.estimators.request.training_request import code_uri, stage_name
from sm_train.toolkit.memory.sharding_choice import with_sharding
from sm_train.toolkit.run_file.run_file import load

from tests.conftest import Aws, Cli
from tests.support.cluster.training_jobs import write_shards
from tests.support.job_lifecycle import FakeSageMaker
from tests.toolkit.submit.local.submit_local_support import processes_of, write_tiny

pytestmark = pytest.mark.integration


@pytest.mark.slow
def test_emulated_nodes_are_examined_in_the_runs_folder(cli: Cli, tmp_path: Path) -> None:
    write_shards(tmp_path / "shards", shards=2, each=20)
    run = write_tiny(tmp_path, max_steps=4)
    run_document = yaml.safe_load(run.read_text())
    run_document["doctor"] = {"timeout": 30}
    run.write_text(yaml.safe_dump(run_document))
    training = tmp_path / "out" / "8px" / "nodes"
    training.mkdir(parents=True)
    result = cli(
        "doctor",
        run,
        "--local",
        "--nodes",
        "2",
        "--output",
        "out",
        "--json",
        network="loopback",
    )
    assert result.returncode == 0, result.stderr
    document = json.loads(result.stdout)
    assert document["measurements"]["nodes"] == ["algo-1", "algo-2"]
    assert document["measurements"]["world"]["ranks"] == 2
    [stored] = (tmp_path / "out" / "8px" / "checkpoints" / "doctor").glob("*.json")
    assert json.loads(stored.read_text()) == document
    assert "matrix products" in result.stderr
    assert "it/s" in result.stderr
    assert training.is_dir(), "training in the same folder is left alone"
    assert processes_of(tmp_path) == []


def test_dry_run_prints_a_job_that_only_runs_the_doctor(cli: Cli, tmp_path: Path) -> None:
    cli("init", "run.yaml", "--preset", "bria-2.0")
    result = cli("doctor", "run.yaml", "--stage", "512px", "--dry-run", "--json")
    assert result.returncode == 0, result.stderr
    document = json.loads(result.stdout)
    request = document["request"]
    assert request["TrainingJobName"].startswith("bria-2-0--512px-doctor-")
    assert request["HyperParameters"]["doctor-only"] == "true"
    assert stage_name(request) == "512px"
    assert "/bria-2-0/code/512px-" in (code_uri(request) or "")
    assert [channel["ChannelName"] for channel in request["InputDataConfig"]] == ["train"]
    assert request["StoppingCondition"]["MaxRuntimeInSeconds"] <= 1800
    assert "RetryStrategy" not in request
    assert document["results"] == "s3://my-bucket/bria-2-0/checkpoints/512px/doctor/"
    assert document["cost_usd"] > 0
    assert "8 × ml.p4de.24xlarge for about 12 min: $" in result.stderr


def sagemaker_run(folder: Path, aws: Aws) -> Path:
    """Write a run file of the tiny model for SageMaker, with its bucket and shards."""
    aws.make_bucket("ai-bucket", **{"shards/a.tar": b"x", "shards/b.tar": b"x"})
    run = write_tiny(folder, max_steps=4)
    document = yaml.safe_load(run.read_text())
    document |= {"role": "arn:aws:iam::210987654321:role/r", "bucket": "ai-bucket"}
    document["data"]["uri"] = "s3://ai-bucket/shards/"
    document["region"] = "us-east-1"
    run.write_text(yaml.safe_dump(document))
    return run


def end_with(aws: Aws, status: str, **event: Any) -> None:
    """Let each new job log the doctor's ``event``, if there is one, and end at once."""
    sagemaker = FakeSageMaker(aws)
    started = aws.response_filters["CreateTrainingJob"]

    def start(response: dict[str, Any]) -> dict[str, Any] | None:
        answer = started(response)
        name = response["TrainingJobArn"].rsplit("/", 1)[1]
        if event:
            figures = {"seconds": 40.0, "network_bytes_per_second": None, "slowdown": None}
            sagemaker.log_event(name, "doctor", findings=[], **figures | event)
        sagemaker.set_status(name, status, reason="AlgorithmError: ExitCode 1")
        return answer

    aws.response_filters["CreateTrainingJob"] = start


def test_job_is_submitted_as_it_was_shown_and_its_verdict_is_shown(
    cli: Cli, tmp_path: Path, aws: Aws
) -> None:
    run = sagemaker_run(tmp_path, aws)
    rejected = cli("doctor", run, network="loopback", env=aws.environment)
    assert rejected.returncode == 2
    assert "not confirmed" in rejected.stderr
    assert "at most $" in rejected.stderr
    assert aws.bodies("CreateTrainingJob") == []
    end_with(aws, "Completed", level="ok", sentence="GPUs and shards are as expected")
    done = cli("doctor", run, "--yes", "--json", network="loopback", env=aws.environment)
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    [body] = aws.bodies("CreateTrainingJob")
    assert body["TrainingJobName"] == document["training_job_name"]
    assert body["TrainingJobName"].startswith("tiny--8px-doctor-")
    assert body["HyperParameters"]["doctor-only"] == "true"
    assert (document["level"], document["result"]) == ("ok", None)
    assert "GPUs and shards are as expected" in done.stderr


@pytest.mark.parametrize(
    ("status", "event", "code", "message"),
    [
        ("Failed", {"level": "fail", "sentence": "algo-2: slow"}, 3, "the cluster is unfit"),
        ("Failed", {}, 6, "failed: "),
        ("Stopped", {}, 6, "Stopped without a verdict in its log"),
    ],
)
def test_unfit_cluster_and_lost_verdict_are_errors(
    cli: Cli,
    tmp_path: Path,
    aws: Aws,
    status: str,
    event: dict[str, str],
    code: int,
    message: str,
) -> None:
    run = sagemaker_run(tmp_path, aws)
    end_with(aws, status, **event)
    done = cli("doctor", run, "--yes", network="loopback", env=aws.environment)
    assert done.returncode == code, done.stderr
    assert message in done.stderr
    assert event.get("sentence", "") in done.stderr


def test_run_name_too_long_for_the_doctors_job_is_an_error(cli: Cli, tmp_path: Path) -> None:
    run = write_tiny(tmp_path, max_steps=4)
    document = yaml.safe_load(run.read_text()) | {"name": "n" * 41, "region": "us-east-1"}
    run.write_text(yaml.safe_dump(document))
    result = cli("doctor", run, "--dry-run")
    assert result.returncode == 2
    assert "has 68 characters and SageMaker allows 63" in result.stderr


def test_bundle_holds_the_expected_performance(tmp_path: Path, cli: Cli) -> None:
    cli("init", "run.yaml", "--preset", "bria-2.0")
    config = with_sharding(load(tmp_path / "run.yaml"))
    bundle = build_bundle(config, None)
    with tarfile.open(fileobj=io.BytesIO(bundle.archive)) as archive:
        archive.extract("job.json", tmp_path, filter="data")
    expected = read_job_config(tmp_path / "job.json", "256px").expected
    assert isinstance(expected, ExpectedPerformance)
    assert expected.instance_type == "ml.p4de.24xlarge"
    assert (expected.steps_per_second, expected.speed_source) == (
        1.8,
        "the run file states it",
    )
    assert expected.usd_per_instance_hour is not None
    unmeasured = read_job_config(tmp_path / "job.json", "512px").expected
    assert unmeasured is not None
    assert unmeasured.steps_per_second is None


def test_mode_off_may_be_written_as_yaml_reads_it(tmp_path: Path) -> None:
    run = write_tiny(tmp_path, max_steps=4)
    run.write_text(run.read_text().replace("mode: auto", "mode: off"))
    assert "mode: off" in run.read_text()
    assert load_run(run).doctor.mode == "off"


@pytest.mark.parametrize(
    ("doctor", "key"),
    [
        ({"mode": "sometimes"}, "doctor.mode"),
        ({"timeout": "10s"}, "doctor.timeout"),
        ({"max_slowdown": 0.5}, "doctor.max_slowdown"),
    ],
)
def test_invalid_keys_of_the_section_are_named(
    cli: Cli, tmp_path: Path, doctor: dict[str, object], key: str
) -> None:
    run = write_tiny(tmp_path, max_steps=4)
    run.write_text(yaml.safe_dump(yaml.safe_load(run.read_text()) | {"doctor": doctor}))
    result = cli("doctor", run, "--dry-run")
    assert result.returncode == 2
    assert key in result.stderr
