"""The monitor's decisions over several machines, looked at by hand: real datagrams and webhook."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from sm_train.entrypoints.common.events import EventLog
from sm_train.entrypoints.common.job_config import read_job_config
from sm_train.entrypoints.common.sagemaker_paths import SageMakerPaths
from sm_train.entrypoints.monitoring.alert_sinks import SLACK_VARIABLE, AlertDispatcher
from sm_train.entrypoints.monitoring.heartbeat import (
    ExitState,
    HeartbeatWriter,
    Phase,
    heartbeat_file,
)
from sm_train.entrypoints.monitoring.peers import PeerLink
from sm_train.entrypoints.monitoring.watchdog import NodeInfo, Watchdog
from sm_train.toolkit.jobs.events import parse_event

from tests.entrypoints.monitoring.test_peers import free_port
from tests.support.cluster.training_jobs import priced_document
from tests.support.webhook_server import Hook, webhook

NODES = 2


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now

    def nanoseconds(self) -> int:
        return round(self.now * 1e9)


class Cluster:
    """Machines with one process each, all with one clock; the first is at number 0."""

    def __init__(self, base: Path, **heartbeat: Any) -> None:
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
        self.pulses, self.monitors, self.deliveries = [], [], []
        for node, stream in enumerate(self.streams):
            folder = base / f"pulses-{node}"
            path = heartbeat_file(folder, 0)
            self.pulses.append(
                HeartbeatWriter(path, rank=node, local_rank=0, clock=self.clock.nanoseconds)
            )
            events = EventLog(node=node, rank=node, stream=stream)
            delivery = AlertDispatcher(self.settings.alerts, events.warn, clock=self.clock)
            neighbours = PeerLink("run", node, NODES, address, look_seconds=10**9, clock=self.clock)
            monitor = Watchdog(
                self.settings,
                SageMakerPaths(base / f"algo-{node + 1}"),
                NodeInfo(node, NODES, 1),
                folder,
                events=events,
                delivery=delivery,
                neighbours=neighbours,
                clock=self.clock,
            )
            self.deliveries.append(delivery)
            self.monitors.append(monitor)

    def look(self, seconds: float, *moving: int) -> None:
        """Time passes; the processes of ``moving`` machines beat, and every monitor looks."""
        for _ in range(round(seconds)):
            self.clock.now += 1
            for node in moving:
                self.pulses[node].enter(Phase.STEP, 5)
            for monitor in reversed(self.monitors):
                monitor.look()

    def events(self, node: int, code: str) -> list[dict[str, Any]]:
        lines = self.streams[node].getvalue().splitlines()
        return [one for line in lines if (one := parse_event(line)) and one.get("code") == code]


@pytest.fixture
def hook() -> Iterator[Hook]:
    with webhook() as one:
        yield one


@pytest.fixture
def cluster(tmp_path: Path, hook: Hook, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Cluster]:
    monkeypatch.setenv(SLACK_VARIABLE, hook.address)
    monkeypatch.setenv("TRAINING_JOB_NAME", "tiny-8px-1")
    monkeypatch.setenv("AWS_REGION", "eu-west-1")

    def make(**heartbeat: Any) -> Cluster:
        made = Cluster(tmp_path, **heartbeat)
        made.look(5, 0, 1)
        return made

    return make


def test_a_stall_of_all_machines_is_told_once_and_by_the_first(
    cluster: Callable[..., Cluster], hook: Hook
) -> None:
    job = cluster()
    job.look(10, 0)  # the second falls silent first, and is behind
    job.look(105)
    [alert] = hook.wait_for(1)
    assert alert["attachments"][0]["text"].count("no sign for") == 1
    for node in range(NODES):
        [stall] = job.events(node, "stall")
        assert stall["node"] == node
    [seen] = job.events(0, "stall")
    assert (seen["blamed_rank"], seen["blamed_node"]) == (1, 1)
    job.look(5, 0, 1)
    _, resolved = hook.wait_for(2)
    assert resolved["text"].startswith("[resolved]")
    for delivery in job.deliveries:
        delivery.finish(1)
    assert len(hook.taken) == 2


def test_the_first_machine_speaks_for_another_that_stalls_alone(
    cluster: Callable[..., Cluster], hook: Hook
) -> None:
    job = cluster()
    job.look(110, 0)
    [alert] = hook.wait_for(1)
    text = alert["attachments"][0]["text"]
    assert text.startswith("node 1: no sign for")
    assert "#/jobs/tiny-8px-1" in text
    assert "eu-west-1" in text
    # Two machines at $36 an hour for the 100 seconds of its limit.
    assert "burned since: $2.0" in text
    job.look(3, 0, 1)
    assert hook.wait_for(2)[1]["text"].startswith("[resolved]")


def test_a_failure_elsewhere_is_told_once(cluster: Callable[..., Cluster], hook: Hook) -> None:
    job = cluster()
    job.pulses[1].end(ExitState.FAILED)
    job.look(3, 0)
    job.pulses[0].end(ExitState.FAILED)
    job.look(3)
    for monitor in job.monitors:
        monitor.finish()
    [alert] = hook.wait_for(1)
    text = alert["attachments"][0]["text"]
    assert "node 1: rank 1 failed" in text
    assert "next: sm-train resume tiny" in text
    assert "burned" not in text


def test_a_long_stall_is_told_again_with_what_it_has_cost(
    cluster: Callable[..., Cluster], hook: Hook
) -> None:
    job = cluster()
    job.look(110)
    hook.wait_for(1)
    job.clock.now += 1800
    job.look(15)
    _, again = hook.wait_for(2)
    # Two machines at $36 an hour for half an hour and more.
    burned = float(again["attachments"][0]["text"].split("burned since: $")[1].split("\n")[0])
    assert 36 <= burned <= 40
    assert os.environ[SLACK_VARIABLE] not in "".join(one.getvalue() for one in job.streams)
