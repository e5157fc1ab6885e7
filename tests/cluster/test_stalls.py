"""Stalls and deaths of real processes: detected in time, explained, reported and killed."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import psutil
import pytest
from sm_train.entrypoints.job_interface.node_description import MACHINE_VARIABLE
from sm_train.entrypoints.monitoring.alert_sinks import SLACK_VARIABLE

from tests.support.cluster.network_namespaces import (
    INTERFACE,
    NetworkNamespaces,
    network_namespaces,
    unavailable_reason,
)
from tests.support.cluster.stalls_support import STALL_TIMEOUT, Host, WatchedJob
from tests.support.cluster.training_jobs import free_port
from tests.support.deadline import DEADLINE
from tests.support.webhook_server import webhook_server

pytestmark = pytest.mark.integration


@pytest.mark.parametrize(
    ("fault", "phase", "frame"),
    [("gil", "step", ("stacks.txt", "fail")), ("read", "data", ("workers.txt", "read_forever"))],
)
def test_stalled_process_is_detected_explained_and_killed(
    tmp_path: Path, fault: str, phase: str, frame: tuple[str, str]
) -> None:
    """Hold the GIL in the main thread, or hang a loader worker in a read."""
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    # Open for writing, so that the worker's open returns and its read hangs.
    hold = os.open(fifo, os.O_RDWR)
    with WatchedJob(tmp_path, [fault], "kill", {"READ": str(fifo)}) as job:
        process = psutil.Process(job.processes[0].pid)
        stall = job.wait_for(code="stall", kind="warning")
        children = process.children(recursive=True)
        assert stall["phase"] == phase
        # The limit is above its floor if the steps before were slow.
        assert STALL_TIMEOUT <= stall["limit_seconds"] <= stall["silent_seconds"]
        assert stall["blamed_rank"] == 0
        suffix, function = frame
        assert function in job.report_text(stall, suffix)
        assert "State:" in job.report_text(stall, "system.txt")
        assert job.wait_for(kind="error")["code"] == "stall"
        assert job.processes[0].wait(timeout=DEADLINE) == -signal.SIGKILL
        assert "no heartbeat for" in (tmp_path / "output" / "failure").read_text()
        # No child outlives it: not the watchdog, which would keep the output open, nor a worker.
        list(job.lines())
        assert psutil.wait_procs(children, timeout=DEADLINE)[1] == []
    os.close(hold)


def test_unread_output_blocks_training_but_not_the_watchdog(tmp_path: Path) -> None:
    with webhook_server() as server:
        variables = {SLACK_VARIABLE: server.address}
        with WatchedJob(tmp_path, ["go-on"], "kill", variables, full_output=True) as job:
            assert job.processes[0].wait(timeout=DEADLINE) == -signal.SIGKILL
            [alert] = server.wait_for(1)
            assert "no heartbeat for" in alert["attachments"][0]["text"]
            assert "sm-train resume tiny" in alert["attachments"][0]["text"]


def test_alerts_of_a_stall_arrive_once_slack_is_back(tmp_path: Path) -> None:
    with webhook_server() as down:
        pass
    with WatchedJob(tmp_path, ["go-on"], "warn", {SLACK_VARIABLE: down.address}) as job:
        job.wait_until_learned()
        # A killed watchdog is replaced by one that reads the same durations.
        [watchdog] = psutil.Process(job.processes[0].pid).children()
        watchdog.kill()
        assert any("restarting it" in line for line in job.lines())
        job.wait_until_learned()
        os.kill(job.processes[0].pid, signal.SIGSTOP)
        stall = job.wait_for(code="stall")
        assert stall["reason"] == "rank 0 is stopped (SIGSTOP)"
        assert not stall["ends"]
        os.kill(job.processes[0].pid, signal.SIGCONT)
        job.wait_for(code="stall-resolved")
        with webhook_server(down.port) as up:
            first, second = up.wait_for(2)
        assert "training has stalled" in first["text"]
        text = first["attachments"][0]["text"]
        assert "no heartbeat for" in text
        assert "node 0, rank 0" in text
        assert "burned since: $0.0" in text
        assert "last checkpoint: step-00000040" in text
        assert "sm-train stop" in text
        assert second["text"].startswith("[resolved]")
        assert down.address not in job.text


def test_killed_process_is_reported_at_once(tmp_path: Path) -> None:
    with webhook_server() as server:
        # What a pod's variable says: the name by which `kubectl cordon` knows the machine.
        variables = {SLACK_VARIABLE: server.address, MACHINE_VARIABLE: "gpu-07"}
        with WatchedJob(tmp_path, ["go-on", "go-on"], "kill", variables) as job:
            job.wait_until_learned()
            os.kill(job.processes[1].pid, signal.SIGKILL)
            died = job.wait_for(code="rank-died")
            assert died["rank_died"] == 1
            [alert] = server.wait_for(1)
            assert "rank 1 died without an error" in alert["attachments"][0]["text"]
            assert "node 0 (gpu-07), rank 1" in alert["attachments"][0]["text"]


def test_process_that_fails_at_once_is_reported(tmp_path: Path) -> None:
    with webhook_server() as server:
        with WatchedJob(tmp_path, ["raise"], "kill", {SLACK_VARIABLE: server.address}) as job:
            list(job.lines())
        [alert] = server.wait_for(1)
        assert "rank 0 failed" in alert["attachments"][0]["text"]


def test_watchdog_of_a_killed_attempt_leaves_the_next_one_watched(tmp_path: Path) -> None:
    """Elastic agents start the next attempt while that watchdog may still be sending its alerts."""
    launch = {"MASTER_PORT": str(free_port())}
    with WatchedJob(tmp_path / "first", ["go-on"], "kill", launch) as first:
        first.wait_until_learned()
        [watchdog] = psutil.Process(first.processes[0].pid).children()
        watchdog.suspend()
        first.processes[0].kill()
        launch["TORCHELASTIC_RESTART_COUNT"] = "1"
        with WatchedJob(tmp_path / "second", ["go-on"], "kill", launch) as second:
            second.wait_until_learned()
            watchdog.resume()
            assert "rank 0 died" in "".join(first.lines())
            assert second.heartbeats.exists()
            assert not first.heartbeats.exists()


def test_successful_run_leaves_nothing_behind(tmp_path: Path) -> None:
    with WatchedJob(tmp_path, ["none", "none"], "kill") as job:
        text = "".join(job.lines())
        assert [process.wait() for process in job.processes] == [0, 0]
    assert text.count(f"healthy, {job.heartbeats}") == 2
    assert "stall" not in text
    assert "died" not in text
    assert not job.heartbeats.exists()


def test_stopped_rank_is_the_culprit_and_training_resumes(tmp_path: Path) -> None:
    """SIGSTOP one of two: the other hangs in the all-reduce, but is not the culprit."""
    with WatchedJob(tmp_path, ["reduce", "reduce"], "warn") as job:
        job.wait_until_learned()
        stopped = job.processes[1]
        stopped.send_signal(signal.SIGSTOP)
        stall = job.wait_for(code="stall")
        stopped.send_signal(signal.SIGCONT)
        assert (stall["blamed_rank"], stall["blamed_node"]) == (1, 0)
        assert stall["limit_seconds"] >= STALL_TIMEOUT
        names = [name.partition("rank-")[2] for name in stall["files"] if "stacks" in name]
        assert names == ["00000-stacks.txt", "00001-stacks.txt"]
        assert "all_reduce" in job.report_text(stall, "rank-00000-stacks.txt")
        assert "reduce" in job.report_text(stall, "rank-00001-stacks.txt")
        assert job.wait_for(code="stall-resolved")["step"] > stall["step"]


def host_in(namespaces: NetworkNamespaces, base: Path, node: int) -> Host:
    """Return the host of ``node``, with its own folder, in its network namespace."""
    folder = base / f"algo-{node + 1}"
    (folder / "input" / "config").mkdir(parents=True)
    document = {"current_host": f"algo-{node + 1}", "hosts": ["algo-1", "algo-2"]}
    (folder / "input" / "config" / "resourceconfig.json").write_text(json.dumps(document))
    variables = {
        "MASTER_ADDR": namespaces.address(0),
        "GLOO_SOCKET_IFNAME": INTERFACE,
        "GROUP_RANK": str(node),
    }
    return Host(folder, namespaces.prefix(node), variables)


@pytest.mark.slow
def test_cut_cable_is_reported_from_both_ends_and_resolved(tmp_path: Path) -> None:
    if reason := unavailable_reason():
        pytest.skip(reason)
    with network_namespaces(2) as namespaces:
        hosts = [host_in(namespaces, tmp_path, node) for node in range(2)]
        with WatchedJob(tmp_path, ["reduce", "reduce"], "warn", hosts=hosts) as job:
            job.wait_until_learned(nodes=2)
            namespaces.set_up(0, up=False)
            stalls = [job.wait_for(code="stall") for _ in hosts]
            assert {stall["node"]: stall["blamed_node"] for stall in stalls} == {0: 1, 1: 0}
            assert all("has sent nothing for" in stall["reason"] for stall in stalls)
            namespaces.set_up(0, up=True)
            resumed = {job.wait_for(code="stall-resolved")["node"] for _ in hosts}
            assert resumed == {0, 1}
