"""A rank of a real training job is killed: the others fail in their collective, but are not blamed.

The jobs run under torchrun with Gloo, some of them on two emulated nodes.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from sm_train.entrypoints.monitoring.alert_sinks import SLACK_VARIABLE
from sm_train.entrypoints.monitoring.heartbeat import (
    HeartbeatSample,
    launched_folders,
    open_readers,
)
from sm_train.toolkit.records.job_logs import parse_event

from tests.conftest import Cli
from tests.support.cluster.training_jobs import (
    Job,
    Processes,
    free_port,
    tiny_run,
    write_shards,
)
from tests.support.deadline import DEADLINE
from tests.support.webhook_server import WebhookServer, webhook_server

pytestmark = pytest.mark.integration


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[WebhookServer]:
    with webhook_server() as running:
        monkeypatch.setenv(SLACK_VARIABLE, running.address)
        yield running


@contextlib.contextmanager
def training(folder: Path, nodes: int, processes: int) -> Iterator[list[Processes]]:
    """Start a job that trains until it fails, with ``processes`` on each node."""
    port, hosts = str(free_port()), [f"algo-{node + 1}" for node in range(nodes)]
    with contextlib.ExitStack() as stack:
        running = []
        for node, host in enumerate(hosts):
            job = Job(folder / host, tiny_run(max_steps=10**6))
            write_shards(job.train_channel, shards=4, each=10)
            (job.base / "input" / "config").mkdir(parents=True)
            document = {"current_host": host, "hosts": hosts}
            (job.base / "input" / "config" / "resourceconfig.json").write_text(json.dumps(document))
            launch = ["--nnodes", str(nodes), "--node_rank", str(node)]
            launch += ["--master_addr", "127.0.0.1", "--master_port", port]
            running.append(stack.enter_context(job.start(processes, launch)))
        yield running


def ranks(node: Processes) -> dict[int, HeartbeatSample]:
    """Return the processes of one node by rank."""
    [folder] = launched_folders(node.process.pid)
    return {
        heartbeat.rank: heartbeat
        for heartbeat in (reader.sample() for reader in open_readers(folder))
        if heartbeat is not None
    }


@pytest.mark.parametrize(
    ("nodes", "processes", "killed"),
    [
        (1, 2, 1),
        # The process that started the watchdog.
        (1, 2, 0),
        pytest.param(1, 4, 2, marks=pytest.mark.slow),
        (2, 1, 1),
        pytest.param(2, 2, 3, marks=pytest.mark.slow),
        pytest.param(2, 2, 0, marks=pytest.mark.slow),
    ],
)
def test_killed_rank_is_named_in_alert_and_failure_reason(
    cli: Cli, tmp_path: Path, server: WebhookServer, nodes: int, processes: int, killed: int
) -> None:
    node = killed // processes
    with training(tmp_path, nodes, processes) as running:
        running[0].wait_for("step", step=3)
        os.kill(ranks(running[node])[killed].pid, signal.SIGKILL)
        outputs = ["".join(process.lines()) for process in running]
        assert all(process.process.wait(timeout=DEADLINE) for process in running)
    died = f"rank {killed} died without an error in "
    alerts = server.wait_for(1)
    assert [died in alert["attachments"][0]["text"] for alert in alerts] == [True], alerts
    assert (
        f"worst: node {killed // processes}, rank {killed}" in alerts[0]["attachments"][0]["text"]
    )
    # Every node that the platform could ask names the same rank.
    for number in range(nodes):
        failure = tmp_path / f"algo-{number + 1}" / "output" / "failure"
        assert died in failure.read_text(), outputs[number]
    logs = [tmp_path / f"algo-{number + 1}.log" for number in range(nodes)]
    for log, output in zip(logs, outputs, strict=True):
        log.write_text(output)
    diagnosis = json.loads(cli("diagnose", *logs, "--json").stdout)
    assert diagnosis["cause"] == "rank-died"
    assert diagnosis["first_failure"]["rank"] == killed
    events = [event for line in "".join(outputs).splitlines() if (event := parse_event(line))]
    deaths = [event for event in events if event.get("code") == "rank-died"]
    assert {event["rank_died"] for event in deaths if event["death"] != "terminated"} == {killed}
