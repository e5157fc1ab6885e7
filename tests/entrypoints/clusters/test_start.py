"""Nodes that start as a manifest's pods do: data and checkpoints in S3, no shared folder."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from sm_train.entrypoints.clusters.node_record import read_nodes, store_stop_request
from sm_train.entrypoints.job_interface.checkpoint_layout import (
    MARKER,
    CheckpointMarker,
    step_folder_name,
)
from sm_train.entrypoints.job_interface.node_description import FAILED_AFTER_PROGRESS, STOPPED
from sm_train.entrypoints.storage.storage import Storage
from sm_train.estimators.config.schema import RunConfig
from sm_train.toolkit.records.job_logs import parse_events

from tests.conftest import Aws
from tests.support.cluster.pods import (
    BUCKET,
    PREFIX,
    Cluster,
    checkpoint_storage,
    cluster_with_shards,
    run_file,
)
from tests.support.deadline import DEADLINE, wait_until

pytestmark = pytest.mark.integration


@pytest.fixture
def cluster(tmp_path: Path, aws: Aws) -> Iterator[Cluster]:
    with cluster_with_shards(tmp_path, aws) as running:
        yield running


@pytest.fixture
def storage(aws: Aws, monkeypatch: pytest.MonkeyPatch) -> Storage:
    return checkpoint_storage(aws, monkeypatch)


def objects(aws: Aws) -> dict[str, int]:
    """Return name → size of the run's checkpoint files in S3."""
    listed = aws.client("s3").list_objects_v2(Bucket=BUCKET, Prefix=f"{PREFIX}/")
    return {
        item["Key"].removeprefix(f"{PREFIX}/"): item["Size"] for item in listed.get("Contents", ())
    }


def complete_steps(aws: Aws) -> list[int]:
    """Return the steps whose marker is in S3; each must have all the files that it lists."""
    found = objects(aws)
    steps = []
    for name in found:
        folder, _, file = name.rpartition("/")
        if file == MARKER and folder.startswith("step-"):
            body = aws.client("s3").get_object(Bucket=BUCKET, Key=f"{PREFIX}/{name}")["Body"]
            marker = CheckpointMarker.parse(body.read())
            assert {entry.name for entry in marker.files} <= {
                key.removeprefix(f"{folder}/") for key in found if key.startswith(f"{folder}/")
            }
            assert folder == step_folder_name(marker.step)
            steps.append(marker.step)
    return sorted(steps)


def test_one_pod_trains_from_s3_and_leaves_its_model_there(
    cluster: Cluster, aws: Aws, storage: Storage
) -> None:
    [node] = cluster.start(run_file(1, max_steps=4))
    assert node.end() == 0, node.text
    [start] = node.events("start")
    assert (start["world_size"], start["nodes"]) == (1, 1)
    assert complete_steps(aws)[-1] == 4
    assert "final/model_index.json" in objects(aws)
    [stored] = read_nodes(storage)
    assert (stored.record.node, stored.record.state, stored.record.exit_code) == (
        "algo-1",
        "ended",
        0,
    )
    log = b"".join(map(storage.read, stored.segments)).decode()
    assert log in node.text.replace("\r\n", "\n")
    assert "sm-train start: prepared in" in log
    assert any(event["kind"] == "end" for event in parse_events(log.splitlines()))
    assert RunConfig.model_validate_json(storage.read("job-records/run.json")).name == "tiny"


def test_traceback_of_an_unexpected_error_is_stored(
    cluster: Cluster, storage: Storage, tmp_path: Path
) -> None:
    folder = tmp_path / "attempt-1" / "node-0" / "input"
    folder.mkdir(parents=True)
    (folder / "config").write_text("a file in the folder's place")
    [node] = cluster.start(run_file(1, max_steps=1))
    assert node.end() == 1, node.text
    [stored] = read_nodes(storage)
    assert (stored.record.state, stored.record.exit_code) == ("ended", 1)
    log = b"".join(map(storage.read, stored.segments)).decode()
    assert "Traceback" in log
    assert "FileExistsError" in log


@pytest.mark.slow
def test_stored_request_stops_the_pod_for_good(
    cluster: Cluster, aws: Aws, storage: Storage
) -> None:
    """With the exit code 0 the platform does not start it again; a later start trains on."""
    [node] = cluster.start(run_file(1, max_steps=10_000, checkpoint_every=100_000))
    node.wait_for('"kind": "step"')
    store_stop_request(storage, "sm-train stop")
    assert node.end() == 0, node.text
    assert "sm-train stop asks for a stop" in node.text
    [step] = complete_steps(aws)
    [stored] = read_nodes(storage)
    assert (stored.record.stopped_by, stored.record.exit_code) == ("sm-train stop", 0)

    [node] = cluster.start(run_file(1, max_steps=step + 2))
    assert node.end() == 0, node.text
    assert complete_steps(aws)[-1] == step + 2
    # Records of the first attempt are not part of a checkpoint.
    assert not list(node.folder.glob("checkpoints/job-records"))


@pytest.mark.slow
def test_restart_after_progress_is_not_counted(cluster: Cluster, aws: Aws) -> None:
    """The exit code says whether the attempt stored a checkpoint; the manifest counts by it."""
    [node] = cluster.start(run_file(1, max_steps=10_000))
    wait_until(lambda: bool(complete_steps(aws)))
    node.kill_ranks()
    assert node.end() == FAILED_AFTER_PROGRESS, node.text
    saved = complete_steps(aws)[-1]
    assert f"failed with progress: the checkpoint of step {saved} is stored" in node.text

    [node] = cluster.start(run_file(1, max_steps=10_000, checkpoint_every=100_000))
    node.wait_for('"kind": "step"')
    node.kill_ranks()
    assert node.end() not in (0, STOPPED, FAILED_AFTER_PROGRESS), node.text
    assert complete_steps(aws)[-1] == saved


@pytest.mark.slow
def test_pods_survive_a_lost_node_a_stop_and_another_number_of_nodes(
    cluster: Cluster, aws: Aws
) -> None:
    first, second = cluster.start(run_file(2, max_steps=10_000))
    for node, rank in ((first, 0), (second, 1)):
        node.wait_for(f"channel train: 2 files, part {rank + 1} of 2")
    first.wait_for('"step": 12')
    deadline = time.monotonic() + DEADLINE
    while not complete_steps(aws):
        assert time.monotonic() < deadline, "no checkpoint is complete in S3"
        time.sleep(0.5)
    second.kill()
    assert first.end() not in (0, STOPPED), first.text
    assert "node 1 was lost: it has sent nothing for" in first.text
    saved = complete_steps(aws)

    first, second = cluster.start(run_file(2, max_steps=10_000))
    first.wait_for('"kind": "step"')
    [start] = first.events("start")
    assert start["resumed_from_step"] == saved[-1]
    # Kubernetes evicts one of the pods: all ranks stop after the same step.
    second.process.send_signal(signal.SIGTERM)
    assert [first.end(), second.end()] == [STOPPED, STOPPED], first.text + second.text
    [end] = first.events("end")
    assert end["reason"] == "sigterm"
    stopped = complete_steps(aws)[-1]
    assert stopped == end["step"]

    [alone] = cluster.start(run_file(1, max_steps=stopped + 2))
    assert alone.end() == 0, alone.text
    [start] = alone.events("start")
    assert start["resumed_from_step"] == stopped
    assert start["world_size"] == 1
    assert complete_steps(aws)[-1] == stopped + 2
    assert "final/model_index.json" in objects(aws)


@pytest.mark.slow
def test_pod_continues_from_sagemakers_checkpoints_only_if_the_manifest_says_so(
    cluster: Cluster, aws: Aws
) -> None:
    [node] = cluster.start(run_file(1, max_steps=2))
    assert node.end() == 0, node.text
    key = f"{PREFIX}/{step_folder_name(2)}/{MARKER}"
    body = aws.client("s3").get_object(Bucket=BUCKET, Key=key)["Body"]
    marker = CheckpointMarker.parse(body.read())
    assert marker.platform == "kubernetes"
    moved = replace(marker, platform="sagemaker").to_json()
    aws.client("s3").put_object(Bucket=BUCKET, Key=key, Body=moved.encode())
    for stored in objects(aws):
        if stored.startswith("final/"):
            aws.client("s3").delete_object(Bucket=BUCKET, Key=f"{PREFIX}/{stored}")

    [node] = cluster.start(run_file(1, max_steps=4))
    assert node.end() == 1, node.text
    assert "step-00000002 was written by a job on sagemaker" in node.text
    assert "--take-over" in node.text
    assert complete_steps(aws) == [2]

    [node] = cluster.start(run_file(1, max_steps=4), take_over=True)
    assert node.end() == 0, node.text
    [start] = node.events("start")
    assert start["resumed_from_step"] == 2
    assert complete_steps(aws)[-1] == 4


def test_a_pod_without_data_says_so_and_fails(cluster: Cluster, aws: Aws) -> None:
    s3 = aws.client("s3")
    for item in s3.list_objects_v2(Bucket=BUCKET, Prefix="shards/")["Contents"]:
        s3.delete_object(Bucket=BUCKET, Key=item["Key"])
    [node] = cluster.start(run_file(1, max_steps=1))
    assert node.end() == 1
    assert "error: channel train: s3://ai-bucket/shards/: no files" in node.text
    assert "Traceback" not in node.text
