"""Stalls and deaths of real processes: found in time, explained, told, and ended."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest
from sm_train.entrypoints.monitoring.alert_sinks import SLACK_VARIABLE
from sm_train.toolkit.jobs.events import parse_event

from tests.support.cluster.training_jobs import free_port, priced_document
from tests.support.webhook_server import webhook

LIMIT = 1
DEADLINE = 60.0


def heartbeat(on_stall: str, *, limit: int = LIMIT) -> dict[str, Any]:
    return {
        "min_timeout": limit,
        "max_timeout": 30,
        "on_stall": on_stall,
        "interval": 1,
        "metrics_interval": 10,
    }


def fill(pipe: int) -> None:
    """So that the next one to write waits until somebody reads."""
    os.set_blocking(pipe, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(pipe, b"x" * 1024)
    os.set_blocking(pipe, True)


@dataclass(frozen=True)
class Host:
    """Where one process runs: ``command`` goes before its own."""

    base: Path
    command: tuple[str, ...] = ()
    variables: dict[str, str] = field(default_factory=dict)


class Watched:
    """Processes that train nothing, and everything they say; of one machine unless told."""

    def __init__(
        self,
        base: Path,
        faults: list[str],
        on_stall: str,
        variables: dict[str, str] | None = None,
        hosts: list[Host] | None = None,
        *,
        full: bool = False,
    ) -> None:
        self.base = base
        document = priced_document()
        document["8px"]["heartbeat"] = heartbeat(on_stall)
        (base / "job.json").write_text(json.dumps(document))
        (base / "checkpoints" / "step-00000040").mkdir(parents=True)
        (base / "checkpoints" / "step-00000040" / "complete.json").touch()
        read, write = os.pipe()
        if full:
            fill(write)
        port = str(free_port())
        self.pulses = Path(f"/dev/shm/sm-train-{os.getuid()}-{os.getpid()}-{port}-0")
        self.processes = []
        for rank, fault in enumerate(faults):
            host = hosts[rank] if hosts else Host(base)
            environment = {
                **os.environ,
                "SAGEMAKER_BASE_DIR": str(host.base),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": port,
                "WORLD_SIZE": str(len(faults)),
                "GLOO_SOCKET_IFNAME": "lo",
                "RANK": str(rank),
                "LOCAL_RANK": "0" if hosts else str(rank),
                "LOCAL_WORLD_SIZE": "1" if hosts else str(len(faults)),
                **(variables or {}),
                **host.variables,
            }
            command = [*host.command, sys.executable, "-m", "tests.support.cluster.faulty_process"]
            command += [str(base / "job.json"), fault]
            self.processes.append(
                subprocess.Popen(command, env=environment, stdout=write, stderr=write)
            )
        os.close(write)
        self._output = os.fdopen(read, errors="replace")
        self.text = ""
        self._watchdog = threading.Timer(DEADLINE, self._end)
        self._watchdog.start()

    def __enter__(self) -> Watched:
        return self

    def __exit__(self, *_: object) -> None:
        self._watchdog.cancel()
        self._end()
        self._output.close()

    def _end(self) -> None:
        for process in self.processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                for one in psutil.Process(process.pid).children(recursive=True):
                    one.kill()
            process.kill()
            process.wait()

    def lines(self) -> Iterator[str]:
        for line in self._output:
            self.text += line
            yield line

    def wait_for(self, **fields: Any) -> dict[str, Any]:
        for line in self.lines():
            event = parse_event(line)
            if event and fields.items() <= event.items():
                return event
        raise AssertionError(f"no {fields} in:\n{self.text}")

    def wait_until_learned(self, nodes: int = 1) -> None:
        """Until every machine's monitor knows what a step takes."""
        known = set()
        for line in self.lines():
            event = parse_event(line)
            if event and event["kind"] == "heartbeat" and event["limit_seconds"] <= LIMIT:
                known.add(event["node"])
            if len(known) == nodes:
                return

    def evidence(self, event: dict[str, Any], ending: str) -> str:
        """What the event's files with this ending hold."""
        folder = self.base / "checkpoints" / event["evidence"]
        return "\n".join(
            (folder / name).read_text() for name in event["files"] if name.endswith(ending)
        )


@pytest.mark.parametrize(
    ("fault", "section", "seen"),
    [("gil", "step", ("stacks.txt", "fail")), ("read", "data", ("workers.txt", "read_for_ever"))],
)
def test_a_process_that_cannot_speak_is_found_explained_and_ended(
    tmp_path: Path, fault: str, section: str, seen: tuple[str, str]
) -> None:
    """A main thread that holds the GIL; a loader worker in a read that never returns."""
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    # Open for writing, so that the worker's open returns and its read hangs.
    hold = os.open(fifo, os.O_RDWR)
    with Watched(tmp_path, [fault], "end", {"READ": str(fifo)}) as watched:
        workers = psutil.Process(watched.processes[0].pid)
        stall = watched.wait_for(code="stall", kind="warning")
        family = workers.children(recursive=True)
        assert stall["section"] == section
        assert stall["limit_seconds"] == LIMIT
        assert LIMIT <= stall["silent_seconds"] < 5 * LIMIT
        assert stall["blamed_rank"] == 0
        ending, function = seen
        assert function in watched.evidence(stall, ending)
        assert "State:" in watched.evidence(stall, "machine.txt")
        assert watched.wait_for(kind="error")["code"] == "stall"
        assert watched.processes[0].wait(timeout=30) == -signal.SIGKILL
        assert "no sign for" in (tmp_path / "output" / "failure").read_text()
        # Nobody outlives it: not the monitor, whose output would end the loop, nor a worker.
        list(watched.lines())
        assert psutil.wait_procs(family, timeout=30)[1] == []
    os.close(hold)


def test_output_that_nobody_reads_hangs_the_job_but_not_its_monitor(tmp_path: Path) -> None:
    with webhook() as hook:
        variables = {SLACK_VARIABLE: hook.address}
        with Watched(tmp_path, ["go-on"], "end", variables, full=True) as watched:
            assert watched.processes[0].wait(timeout=DEADLINE) == -signal.SIGKILL
            [alert] = hook.wait_for(1)
            assert "no sign for" in alert["attachments"][0]["text"]
            assert "sm-train resume tiny" in alert["attachments"][0]["text"]


def test_slack_is_down_for_the_whole_stall_and_then_up(tmp_path: Path) -> None:
    with webhook() as down:
        pass
    with Watched(tmp_path, ["go-on"], "report", {SLACK_VARIABLE: down.address}) as watched:
        watched.wait_until_learned()
        # Whatever kills the monitor, there is another one, which knows as much.
        [monitor] = psutil.Process(watched.processes[0].pid).children()
        monitor.kill()
        assert any("it is started again" in line for line in watched.lines())
        watched.wait_until_learned()
        os.kill(watched.processes[0].pid, signal.SIGSTOP)
        stall = watched.wait_for(code="stall")
        assert stall["reason"] == "rank 0 is stopped (SIGSTOP)"
        assert not stall["ends"]
        os.kill(watched.processes[0].pid, signal.SIGCONT)
        watched.wait_for(code="stall-resolved")
        with webhook(down.port) as up:
            first, second = up.wait_for(2)
        assert "training has stalled" in first["text"]
        told = first["attachments"][0]["text"]
        assert "no sign for" in told
        assert "node 0, rank 0" in told
        assert "burned since: $0.0" in told
        assert "last checkpoint: step-00000040" in told
        assert "sm-train stop" in told
        assert second["text"].startswith("[resolved]")
        assert down.address not in watched.text


def test_a_killed_process_is_told_at_once(tmp_path: Path) -> None:
    with webhook() as hook:
        variables = {SLACK_VARIABLE: hook.address}
        with Watched(tmp_path, ["go-on", "go-on"], "end", variables) as watched:
            watched.wait_until_learned()
            os.kill(watched.processes[1].pid, signal.SIGKILL)
            died = watched.wait_for(code="rank-died")
            assert died["rank_died"] == 1
            [alert] = hook.wait_for(1)
            assert "rank 1 died without a word" in alert["attachments"][0]["text"]


def test_a_failed_process_is_told_even_when_it_fails_at_once(tmp_path: Path) -> None:
    with webhook() as hook:
        with Watched(tmp_path, ["raise"], "end", {SLACK_VARIABLE: hook.address}) as watched:
            list(watched.lines())
        [alert] = hook.wait_for(1)
        assert "rank 0 failed" in alert["attachments"][0]["text"]


def test_a_run_that_ends_well_leaves_nothing_behind(tmp_path: Path) -> None:
    with Watched(tmp_path, ["none", "none"], "end") as watched:
        lines = watched.lines()
        text = next(lines)
        assert watched.pulses.exists()
        text += "".join(lines)
        assert [process.wait() for process in watched.processes] == [0, 0]
    assert text.count("healthy") == 2
    assert "stall" not in text
    assert "died" not in text
    assert not watched.pulses.exists()


def test_a_stopped_rank_is_blamed_and_training_goes_on(tmp_path: Path) -> None:
    """SIGSTOP one of two: the other hangs in the all-reduce, of which it is not to blame."""
    with Watched(tmp_path, ["reduce", "reduce"], "report") as watched:
        watched.wait_until_learned()
        stopped = watched.processes[1]
        stopped.send_signal(signal.SIGSTOP)
        stall = watched.wait_for(code="stall")
        stopped.send_signal(signal.SIGCONT)
        assert (stall["blamed_rank"], stall["blamed_node"]) == (1, 0)
        assert stall["limit_seconds"] == LIMIT
        names = [name.partition("rank-")[2] for name in stall["files"] if "stacks" in name]
        assert names == ["00000-stacks.txt", "00001-stacks.txt"]
        assert "all_reduce" in watched.evidence(stall, "rank-00000-stacks.txt")
        assert "reduce" in watched.evidence(stall, "rank-00001-stacks.txt")
        assert watched.wait_for(code="stall-resolved")["step"] > stall["step"]


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[list[Host]]:
    """Two network namespaces with a cable between them; skips where that is not allowed."""
    spaces = [f"sm-train-{os.getpid()}-{number}" for number in range(2)]
    try:
        try:
            for space in spaces:
                ip("netns", "add", space)
            ends = (
                "cable",
                "netns",
                spaces[0],
                "type",
                "veth",
                "peer",
                "cable",
                "netns",
                spaces[1],
            )
            ip("link", "add", *ends)
            for number, space in enumerate(spaces):
                ip("-n", space, "addr", "add", f"10.77.0.{number + 1}/24", "dev", "cable")
                ip("-n", space, "link", "set", "cable", "up")
                ip("-n", space, "link", "set", "lo", "up")
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(f"no network namespaces here: {getattr(error, 'stderr', error)}")
        yield [host(tmp_path, number, space) for number, space in enumerate(spaces)]
    finally:
        for space in spaces:
            with contextlib.suppress(OSError, subprocess.CalledProcessError):
                ip("netns", "del", space)


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)


def host(base: Path, number: int, space: str) -> Host:
    config = base / f"algo-{number + 1}" / "input" / "config"
    config.mkdir(parents=True)
    document = {"current_host": f"algo-{number + 1}", "hosts": ["algo-1", "algo-2"]}
    (config / "resourceconfig.json").write_text(json.dumps(document))
    variables = {
        "MASTER_ADDR": "10.77.0.1",
        "GLOO_SOCKET_IFNAME": "cable",
        "GROUP_RANK": str(number),
    }
    return Host(base / f"algo-{number + 1}", ("ip", "netns", "exec", space), variables)


def test_a_cut_cable_is_named_from_both_ends_and_mended(
    tmp_path: Path, machines: list[Host]
) -> None:
    with Watched(tmp_path, ["reduce", "reduce"], "report", hosts=machines) as watched:
        watched.wait_until_learned(nodes=2)
        cable = ("-n", machines[0].command[-1], "link", "set", "cable")
        ip(*cable, "down")
        stalls = [watched.wait_for(code="stall") for _ in machines]
        assert {stall["node"]: stall["blamed_node"] for stall in stalls} == {0: 1, 1: 0}
        assert all("has not been heard of" in stall["reason"] for stall in stalls)
        ip(*cable, "up")
        goes_on = {watched.wait_for(code="stall-resolved")["node"] for _ in machines}
        assert goes_on == {0, 1}
