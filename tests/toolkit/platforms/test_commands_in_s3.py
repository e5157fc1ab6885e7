"""Commands for a run whose pods train and store what they do in S3: real nodes, simulated AWS."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from sm_train.entrypoints.clusters.node_record import RUN_FILE, STOP_FILE, NodeRecord, read_nodes
from sm_train.entrypoints.storage.storage import Storage, open_storage, write_file
from sm_train.entrypoints.storage.store import S3Access
from sm_train.estimators.bundle.bundle import run_document
from sm_train.estimators.config.schema import RunConfig
from sm_train.toolkit.base.errors import ExitCode

from tests.conftest import Aws, Cli
from tests.support.cluster.pods import (
    BUCKET,
    PREFIX,
    Cluster,
    checkpoint_storage,
    cluster_with_shards,
    run_file,
)
from tests.support.run_files import one_line
from tests.support.webhook_server import webhook_server

pytestmark = pytest.mark.integration

ROOT = f"s3://{BUCKET}/tiny/checkpoints"


@pytest.fixture
def cluster(tmp_path: Path, aws: Aws) -> Iterator[Cluster]:
    with cluster_with_shards(tmp_path, aws) as running:
        yield running


@pytest.fixture
def storage(aws: Aws, monkeypatch: pytest.MonkeyPatch) -> Storage:
    return checkpoint_storage(aws, monkeypatch)


def run_of(max_steps: int, **changes: Any) -> RunConfig:
    document = run_file(1, max_steps=max_steps).model_dump(mode="json")
    return RunConfig.model_validate(document | {"region": "us-east-1", "bucket": BUCKET} | changes)


def aws_options(aws: Aws) -> dict[str, Any]:
    return {"network": "loopback", "env": aws.environment | {"AWS_REGION": "us-east-1"}}


def age(aws: Aws, storage: Storage, seconds: float) -> None:
    """Make all heartbeats older, as if the pods had been gone for that time."""
    for node in read_nodes(storage):
        _, _, address = storage.address(node.record.file).partition("://")
        bucket, _, key = address.partition("/")
        aws.make_older(bucket, key, seconds)


@pytest.mark.slow
def test_finished_run_is_found_by_file_name_and_address(
    cluster: Cluster, aws: Aws, cli: Cli, tmp_path: Path
) -> None:
    config = run_of(4)
    [node] = cluster.start(config)
    assert node.end() == 0, node.text
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(config.model_dump(mode="json", exclude_defaults=True)))
    for target in (str(path), ROOT, f"{ROOT}/8px"):
        aws.calls.clear()
        done = cli("status", target, "--json", **aws_options(aws))
        assert done.returncode == 0, done.stderr
        document = json.loads(done.stdout)
        assert (document["run"], document["state"]) == ("tiny", "done")
        [stage] = document["stages"]
        assert (stage["step"], stage["checkpoint_step"]) == (4, 4)
        assert [job["status"] for job in stage["jobs"]] == ["Completed"]
        # A run file may also have jobs on SageMaker; the address of records is enough.
        assert [name for name, _ in aws.calls] == ["ListTrainingJobs"] * (target == str(path))
    [listed] = json.loads(cli("list", f"s3://{BUCKET}", "--json", **aws_options(aws)).stdout)[
        "runs"
    ]
    assert (listed["run"], listed["status"]) == ("tiny", "Completed")
    logs = cli("logs", ROOT, **aws_options(aws)).stdout
    assert "algo-1 | sm-train start: prepared in" in logs
    review = json.loads(cli("review", ROOT, "--json", **aws_options(aws)).stdout)
    [job] = review["jobs"]
    assert job["last_step"] == 4
    actual = cli("cost", ROOT, "--actual", "--json", **aws_options(aws))
    assert actual.returncode == 0, actual.stderr
    diagnosis = json.loads(cli("diagnose", ROOT, "--json", **aws_options(aws)).stdout)
    assert diagnosis["cause"] == "no-failure"


@pytest.mark.slow
def test_cron_job_alerts_when_the_pods_are_gone_and_stops_at_the_budget(
    cluster: Cluster, aws: Aws, storage: Storage
) -> None:
    config = run_of(10_000, budget={"usd": 1e6})
    [node] = cluster.start(config)
    node.wait_for('"kind": "step"')
    with webhook_server() as server:
        variables = {"SM_TRAIN_WEBHOOK": server.address}
        done = cluster.watch(config, variables)
        assert (done.returncode, done.stdout) == (0, ""), done.stderr
        node.kill()
        age(aws, storage, 600)
        done = cluster.watch(config, variables)
        assert done.returncode == 0, done.stdout + done.stderr
        assert "tiny/8px: no node sends heartbeats" in done.stdout
        cluster.watch(config, variables)
        [alert] = server.received
        assert alert["symptom"].startswith("no heartbeat of algo-1 for 1")
        assert alert["command"].startswith("kubectl get")

        cheap = run_of(10_000, budget={"usd": 1e-6})
        [node] = cluster.start(cheap)
        node.wait_for('"kind": "step"')
        done = cluster.watch(cheap, variables)
        assert "the budget is spent" in done.stdout
        assert node.end() == 0, node.text
        assert [sent["title"] for sent in server.received[1:]] == [
            "the budget is spent",
            "nodes send heartbeats again, or have ended as planned",
        ]


@pytest.mark.slow
def test_stop_and_watch_of_a_running_pod(
    cluster: Cluster, aws: Aws, cli: Cli, tmp_path: Path
) -> None:
    [node] = cluster.start(run_of(10_000))
    node.wait_for('"kind": "step"')
    path = tmp_path / "run.yaml"
    document = run_of(10_000).model_dump(mode="json", exclude_defaults=True)
    path.write_text(yaml.safe_dump(document))
    aws.calls.clear()
    for command in ("resume", "alarms"):
        for target in (str(path), ROOT):
            refused = cli(command, target, **aws_options(aws))
            assert refused.returncode == ExitCode.USAGE
            assert one_line(refused.stderr).startswith(
                f"sm-train: {target}: is a run on Kubernetes; this command works on SageMaker. "
                "To continue the run there: kubectl delete"
            )
    assert aws.calls == []
    polled = cli("watch", ROOT, "--once", "--json", **aws_options(aws))
    assert polled.returncode == 0, polled.stderr
    assert json.loads(polled.stdout)["action"] == "wait"
    stopped = cli("stop", ROOT, "--wait", **aws_options(aws))
    assert stopped.returncode == 0, stopped.stderr
    assert node.end() == 0, node.text
    watched = cli("watch", ROOT, **aws_options(aws))
    assert watched.returncode == 0, watched.stderr
    assert "sm-train stop asked for the stop" in watched.stderr.replace("\n", " ")
    assert aws.client("s3").head_object(Bucket=BUCKET, Key=f"{PREFIX}/{STOP_FILE}")


def test_run_without_records_says_where_they_would_be(cli: Cli, aws: Aws, tmp_path: Path) -> None:
    aws.make_bucket(BUCKET)
    config = run_of(4, cluster={"instance_type": "own.8xH100-SXM5-80GB.3200gbps.24usd"})
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(config.model_dump(mode="json", exclude_defaults=True)))
    done = cli("status", path, **aws_options(aws))
    assert done.returncode == ExitCode.USAGE
    assert "manifest RUN --to KIND" in done.stderr


def test_run_in_the_default_bucket_is_found_by_its_name(
    cli: Cli, aws: Aws, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run of machines that AWS sells, which has no job on SageMaker."""
    for name, value in aws.environment.items():
        monkeypatch.setenv(name, value)
    account = aws.client("sts").get_caller_identity()["Account"]
    bucket = f"sagemaker-us-east-1-{account}"
    aws.make_bucket(bucket)
    place = f"s3://{bucket}/tiny/checkpoints/8px"
    now = time.time()
    record = NodeRecord(
        "tiny", "8px", "kubernetes", "algo-1", 1, "ml.p4d.24xlarge", "pod", None, now - 60, now, 60
    )
    stored = open_storage(place, S3Access(region="us-east-1"))
    write_file(stored, record.file, record.to_json())
    write_file(stored, RUN_FILE, json.dumps(run_document(run_of(4))).encode())
    done = cli("status", "tiny", "--json", **aws_options(aws))
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert (document["run"], document["state"]) == ("tiny", "starting")
    missing = cli("status", "other", **aws_options(aws))
    assert "neither a run file here nor a run or job" in missing.stderr
