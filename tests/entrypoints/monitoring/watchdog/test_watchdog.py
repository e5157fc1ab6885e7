"""Decisions of several nodes' watchdogs, polled by the test: real datagrams and a real webhook."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from sm_train.entrypoints.base.sagemaker_paths import SageMakerPaths
from sm_train.entrypoints.job_interface.checkpoint_layout import (
    MARKER,
    CheckpointFile,
    CheckpointMarker,
    shard_file_name,
    step_folder_name,
)
from sm_train.entrypoints.job_interface.events import EventLog
from sm_train.entrypoints.job_interface.job_config import read_job_config
from sm_train.entrypoints.job_interface.node_description import NODE_VARIABLE
from sm_train.entrypoints.monitoring.alert_sinks import SLACK_VARIABLE, AlertDispatcher
from sm_train.entrypoints.monitoring.heartbeat import (
    ExitState,
    HeartbeatWriter,
    Phase,
    error_file,
    heartbeat_file,
)
from sm_train.entrypoints.monitoring.peers import PeerLink
from sm_train.entrypoints.monitoring.watchdog.local_ranks import NodeInfo
from sm_train.entrypoints.monitoring.watchdog.watchdog import Watchdog
from sm_train.entrypoints.records.upload_notes import UPLOADED_SUFFIX, UPLOADING_SUFFIX
from sm_train.toolkit.records.job_logs import parse_event

from tests.entrypoints.monitoring.peers_support import free_port
from tests.estimators.manifests.documents import config, environment, manifest, pods
from tests.support.cluster.training_jobs import priced_document
from tests.support.webhook_server import WebhookServer, webhook_server

NODES = 2


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now

    def nanoseconds(self) -> int:
        return round(self.now * 1e9)


class WatchedCluster:
    """Nodes with one process each, all with the same clock.

    Nothing is heard of the nodes in ``lost`` any more.
    """

    def __init__(
        self, base: Path, *, poll_seconds: float = 1e9, uploads: bool = True, **heartbeat: Any
    ) -> None:
        self.lost: set[int] = set()
        document = priced_document()
        document["8px"]["heartbeat"] |= {
            "min_timeout": 100,
            "max_timeout": 100,
            "on_stall": "warn",
        } | heartbeat
        (base / "job.json").write_text(json.dumps(document))
        self.settings = read_job_config(base / "job.json", "8px")
        self.clock, self.streams = Clock(), [io.StringIO() for _ in range(NODES)]
        address = ("127.0.0.1", free_port())
        self.writers: list[HeartbeatWriter] = []
        self.watchdogs: list[Watchdog] = []
        self.folders: list[Path] = []
        self.dispatchers: list[AlertDispatcher] = []
        for node, stream in enumerate(self.streams):
            folder = base / f"heartbeats-{node}"
            self.folders.append(folder)
            path = heartbeat_file(folder, 0)
            self.writers.append(
                HeartbeatWriter(path, rank=node, local_rank=0, clock=self.clock.nanoseconds)
            )
            events = EventLog(node=node, rank=node, stream=stream)
            dispatcher = AlertDispatcher(self.settings.alerts, events.warn, clock=self.clock)
            peers = PeerLink(
                "run", node, NODES, address, key=b"k", poll_seconds=poll_seconds, clock=self.clock
            )
            watchdog = Watchdog(
                self.settings,
                SageMakerPaths(base / f"algo-{node + 1}"),
                NodeInfo(node, NODES, 1),
                folder,
                events=events,
                dispatcher=dispatcher,
                peers=peers,
                uploads=uploads,
                clock=self.clock,
            )
            self.dispatchers.append(dispatcher)
            self.watchdogs.append(watchdog)

    def run(self, seconds: float, *running: int) -> None:
        """Advance the clock; the processes of ``running`` nodes beat, and every watchdog polls."""
        for _ in range(round(seconds)):
            self.clock.now += 1
            for node in running:
                self.writers[node].enter(Phase.STEP, 5)
            for node in reversed(range(NODES)):
                if node not in self.lost:
                    self.watchdogs[node].poll()

    def fail(self, node: int, error: str) -> None:
        """Let the node's process end with an exception."""
        error_file(self.folders[node], 0).write_text(error)
        self.writers[node].end(ExitState.FAILED)

    def events(self, node: int, code: str) -> list[dict[str, Any]]:
        lines = self.streams[node].getvalue().splitlines()
        return [
            event for line in lines if (event := parse_event(line)) and event.get("code") == code
        ]

    def newest_heartbeat(self, node: int) -> dict[str, Any]:
        events = map(parse_event, self.streams[node].getvalue().splitlines())
        return [event for event in events if event and event["kind"] == "heartbeat"][-1]


@pytest.fixture
def server() -> Iterator[WebhookServer]:
    with webhook_server() as running:
        yield running


@pytest.fixture
def start_cluster(
    tmp_path: Path, server: WebhookServer, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., WatchedCluster]:
    monkeypatch.setenv(SLACK_VARIABLE, server.address)
    monkeypatch.setenv("TRAINING_JOB_NAME", "tiny-8px-1")
    monkeypatch.setenv("AWS_REGION", "eu-west-1")

    def start(**heartbeat: Any) -> WatchedCluster:
        cluster = WatchedCluster(tmp_path, **heartbeat)
        cluster.run(5, 0, 1)
        return cluster

    return start


def test_stall_of_all_nodes_is_one_alert_from_the_first_node(
    start_cluster: Callable[..., WatchedCluster], server: WebhookServer
) -> None:
    cluster = start_cluster()
    cluster.run(10, 0)  # the second node falls silent first, and is behind
    cluster.run(105)
    [alert] = server.wait_for(1)
    assert alert["attachments"][0]["text"].count("no heartbeat for") == 1
    for node in range(NODES):
        [stall] = cluster.events(node, "stall")
        assert stall["node"] == node
    [stall] = cluster.events(0, "stall")
    assert (stall["blamed_rank"], stall["blamed_node"]) == (1, 1)
    cluster.run(5, 0, 1)
    _, resolved = server.wait_for(2)
    assert resolved["text"].startswith("[resolved]")
    for dispatcher in cluster.dispatchers:
        dispatcher.finish(1)
    assert len(server.received) == 2


def test_first_node_reports_the_stall_of_another(
    start_cluster: Callable[..., WatchedCluster], server: WebhookServer
) -> None:
    cluster = start_cluster()
    cluster.run(110, 0)
    [alert] = server.wait_for(1)
    text = alert["attachments"][0]["text"]
    assert text.startswith("node 1: no heartbeat for")
    assert "#/jobs/tiny-8px-1" in text
    assert "eu-west-1" in text
    # Two instances at $36 an hour for the 100 seconds of the timeout.
    assert "burned since: $2.0" in text
    cluster.run(3, 0, 1)
    assert server.wait_for(2)[1]["text"].startswith("[resolved]")


def test_failure_on_another_node_is_reported_once(
    start_cluster: Callable[..., WatchedCluster], server: WebhookServer
) -> None:
    cluster = start_cluster()
    cluster.writers[1].end(ExitState.FAILED)
    cluster.run(3, 0)
    cluster.writers[0].end(ExitState.FAILED)
    cluster.run(3)
    for watchdog in cluster.watchdogs:
        watchdog.finish()
    [alert] = server.wait_for(1)
    text = alert["attachments"][0]["text"]
    assert "node 1: rank 1 failed" in text
    assert "next: sm-train resume tiny" in text
    assert "burned" not in text


DISCONNECTED = "RuntimeError: pair.cc:547] Connection closed by peer [10.0.0.7]:11883"


@pytest.mark.parametrize(("lost", "survivor"), [(1, 0), (0, 1)])
def test_lost_node_is_named_and_not_a_survivor(
    start_cluster: Callable[..., WatchedCluster], server: WebhookServer, lost: int, survivor: int
) -> None:
    cluster = start_cluster(poll_seconds=1)
    cluster.lost.add(lost)
    cluster.fail(survivor, DISCONNECTED)
    cluster.run(12)
    [alert] = server.wait_for(1)
    text = alert["attachments"][0]["text"]
    assert f"node {lost} was lost: it has sent nothing for" in text
    assert f"worst: node {lost}\n" in text
    assert "Connection closed by peer" in text
    [event] = cluster.events(survivor, "node-lost")
    assert event["blamed_node"] == lost
    cluster.watchdogs[survivor].finish()
    assert len(server.received) == 1


def test_node_that_says_why_it_ended_was_not_lost(
    start_cluster: Callable[..., WatchedCluster], server: WebhookServer
) -> None:
    cluster = start_cluster(poll_seconds=1)
    cluster.fail(1, DISCONNECTED)
    cluster.run(1, 0)
    cluster.lost.add(1)
    cluster.run(20, 0)
    [alert] = server.wait_for(1)
    assert "node 1: rank 1 failed" in alert["attachments"][0]["text"]
    assert cluster.events(0, "node-lost") == []


def test_alerts_name_the_commands_of_the_jobs_platform(
    start_cluster: Callable[..., WatchedCluster],
    server: WebhookServer,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    [pod] = pods(manifest(config(), "trainjob"))
    monkeypatch.setenv(NODE_VARIABLE, environment(pod)[NODE_VARIABLE])
    cluster = start_cluster(poll_seconds=1)
    cluster.run(110)
    cluster.fail(0, "ValueError: bad")
    cluster.run(3)
    alerts = [alert["attachments"][0]["text"] for alert in server.wait_for(3)]
    stall, failure = alerts[0], next(text for text in alerts if "ValueError: bad" in text)
    name = "demo-256px"
    assert f"next: kubectl delete -n default trainjob/{name}" in stall
    assert f"kubectl apply -f {name}.yaml" in failure
    assert "sm-train" not in stall + failure


def test_long_stall_is_reported_again_with_its_cost(
    start_cluster: Callable[..., WatchedCluster], server: WebhookServer
) -> None:
    cluster = start_cluster()
    cluster.run(110)
    server.wait_for(1)
    cluster.clock.now += 1800
    cluster.run(15)
    _, reminder = server.wait_for(2)
    # Two instances at $36 an hour for half an hour and more.
    burned = float(reminder["attachments"][0]["text"].split("burned since: $")[1].split("\n")[0])
    assert 36 <= burned <= 40
    assert os.environ[SLACK_VARIABLE] not in "".join(
        stream.getvalue() for stream in cluster.streams
    )


def save(base: Path, node: int, step: int, *notes: str) -> None:
    """Save a checkpoint on a node, with upload notes on its files."""
    folder = base / f"algo-{node + 1}" / "checkpoints" / step_folder_name(step)
    folder.mkdir(parents=True)
    file = CheckpointFile(shard_file_name(node), 1, "digest")
    (folder / file.name).write_bytes(b"x")
    (folder / MARKER).write_text(CheckpointMarker(step, NODES, "same", (file,)).to_json())
    for name in (file.name, MARKER):
        for note in notes:
            (folder / f"{name}{note}").touch()


def test_checkpoints_that_cannot_be_written_are_an_alert(
    start_cluster: Callable[..., WatchedCluster], server: WebhookServer
) -> None:
    cluster = start_cluster(uploads=False)
    for count in (1, 2):
        for writer in cluster.writers:
            writer.report_failed_saves(count)
        cluster.run(5, 0, 1)
    assert server.received == []
    for writer in cluster.writers:
        writer.report_failed_saves(3)
    cluster.run(5, 0, 1)
    [alert] = server.wait_for(1)
    assert alert["text"].startswith("[critical] ")
    assert alert["text"].endswith("checkpoints cannot be written")
    assert "3 checkpoints in a row could not be written" in alert["attachments"][0]["text"]
    for writer in cluster.writers:
        writer.report_failed_saves(0)
    cluster.run(5, 0, 1)
    [_, resolved] = server.wait_for(2)
    assert resolved["text"].startswith("[resolved] ")


def test_checkpoints_that_a_node_does_not_upload_are_an_alert(
    tmp_path: Path, start_cluster: Callable[..., WatchedCluster], server: WebhookServer
) -> None:
    cluster = start_cluster()
    interval = cluster.settings.checkpoint.every_steps
    for node in range(NODES):
        save(tmp_path, node, interval, UPLOADED_SUFFIX)
    cluster.run(60, 0, 1)
    for count in (2, 3):
        save(tmp_path, 0, count * interval, UPLOADED_SUFFIX)
        save(tmp_path, 1, count * interval, UPLOADING_SUFFIX)
    cluster.run(900 - 60, 0, 1)
    assert cluster.events(1, "checkpoints-not-stored") == []
    for node, unstored in ((0, None), (1, pytest.approx(810, abs=40))):
        beat = cluster.newest_heartbeat(node)
        assert [step for step, _ in beat["saves"]] == [interval, 3 * interval]
        assert beat["unstored_seconds"] == unstored
    cluster.run(120, 0, 1)
    [event] = cluster.events(1, "checkpoints-not-stored")
    assert (event["step"], event["stored_step"]) == (3 * interval, interval)
    assert cluster.events(0, "checkpoints-not-stored") == []
    [alert] = server.wait_for(1)
    text = alert["attachments"][0]["text"]
    assert alert["text"].endswith("checkpoints are not stored")
    saved, stored = step_folder_name(3 * interval), step_folder_name(interval)
    assert f"node 1 has saved {saved}, and uploaded only {stored} for 15 min" in text
    assert f"last checkpoint: {saved}, not uploaded; newest uploaded: {stored}" in text

    for count in (2, 3):
        folder = tmp_path / "algo-2" / "checkpoints" / step_folder_name(count * interval)
        for name in (shard_file_name(1), MARKER):
            (folder / f"{name}{UPLOADED_SUFFIX}").touch()
    cluster.run(60, 0, 1)
    _, resolved = server.wait_for(2)
    assert resolved["text"].startswith("[resolved]")


def test_uploads_that_nothing_notes_are_unknown(
    tmp_path: Path, start_cluster: Callable[..., WatchedCluster], server: WebhookServer
) -> None:
    cluster = start_cluster()
    interval = cluster.settings.checkpoint.every_steps
    cluster.run(40, 0, 1)
    for count in (1, 2):
        save(tmp_path, 0, count * interval)
    cluster.run(900 + 60, 0, 1)
    [alert] = server.wait_for(1)
    text = alert["attachments"][0]["text"]
    assert "and nothing notes an upload for 15 min" in text
    assert "whether it is uploaded is unknown" in text


def test_rank_without_a_valid_record_is_reported_and_never_stops_the_job(
    start_cluster: Callable[..., WatchedCluster],
) -> None:
    """It is no evidence of silence: a torn read once ended jobs that made progress."""
    cluster = start_cluster(on_stall="kill")
    path = cluster.folders[1] / "heartbeat-0"
    whole = path.read_bytes()
    with path.open("r+b") as file:
        file.write(bytes(48))
    cluster.run(1, 0)
    assert not cluster.events(1, "heartbeat-invalid")
    cluster.run(40, 0)
    (event,) = cluster.events(1, "heartbeat-invalid")
    assert event["unread_rank"] == 1
    assert not cluster.events(1, "stall")
    with path.open("r+b") as file:
        file.write(whole[:48])
    cluster.run(2, 0, 1)
    assert not cluster.events(1, "stall")


def test_stall_needs_two_polls_that_say_the_same(
    start_cluster: Callable[..., WatchedCluster],
) -> None:
    cluster = start_cluster()
    silent = cluster.settings.heartbeat.max_timeout + 100
    cluster.watchdogs[0]._detector.resume(cluster.clock() + silent)
    cluster.clock.now += silent
    cluster.watchdogs[0].poll()
    assert not cluster.events(0, "stall")
    # The rank made progress between the two polls.
    cluster.writers[0].enter(Phase.STEP, 6)
    cluster.clock.now += 1
    cluster.watchdogs[0].poll()
    assert not cluster.events(0, "stall")


def test_a_folder_that_is_the_storage_needs_no_uploads(
    tmp_path: Path, start_cluster: Callable[..., WatchedCluster]
) -> None:
    """Slurm's nodes write their checkpoints where they stay."""
    cluster = start_cluster(uploads=False)
    interval = cluster.settings.checkpoint.every_steps
    for count in (1, 2):
        save(tmp_path, 0, count * interval)
    cluster.run(900 + 120, 0, 1)
    assert cluster.events(0, "checkpoints-not-stored") == []
