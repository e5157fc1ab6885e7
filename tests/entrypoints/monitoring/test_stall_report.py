"""Stall reports of this very process, with a fake of PyTorch's flight recorder."""

from __future__ import annotations

import io
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from sm_train.entrypoints.monitoring.heartbeat import (
    HeartbeatReader,
    HeartbeatWriter,
    events_file,
    heartbeat_file,
)
from sm_train.entrypoints.monitoring.stack_dump import stacks
from sm_train.entrypoints.monitoring.stall_report import collect
from sm_train.entrypoints.monitoring.timeouts import NonBlockingStdout, call_with_timeout

SLEEPER = """
import sys, time
from pathlib import Path
from sm_train.entrypoints.monitoring.stack_dump import register_stack_dump
def sleep_like_a_log():
    print("asleep", flush=True)
    time.sleep(1000)
register_stack_dump(Path(sys.argv[1]))
sleep_like_a_log()
"""


@pytest.fixture
def sleeper(tmp_path: Path) -> Iterator[int]:
    """Start a process that dumps its stacks to ``dump`` on the signal; yields its pid."""
    command = [sys.executable, "-c", SLEEPER, str(tmp_path / "dump")]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield process.pid
        process.kill()


def test_stacks_come_from_py_spy_or_else_from_a_signal(
    tmp_path: Path, sleeper: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    dump = tmp_path / "dump"
    os.kill(sleeper, signal.SIGSTOP)
    assert "sleep_like_a_log" in stacks(sleeper, dump)
    assert dump.read_text() == ""
    os.kill(sleeper, signal.SIGCONT)
    # Without py-spy, the process dumps its stacks itself.
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "in sleep_like_a_log" in stacks(sleeper, dump)
    assert "no stacks" in stacks(sleeper, None)
    assert "no stacks" in stacks(2**22 + 1, dump)


class Recorder(threading.Thread):
    """Waits at a pipe, as PyTorch does, and writes its dump in two parts."""

    def __init__(self, prefix: Path, rank: int) -> None:
        super().__init__(daemon=True)
        self._dump = Path(f"{prefix}{rank}")
        pipe = f"{prefix}{rank}.pipe"
        os.mkfifo(pipe)
        self._pipe = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
        self.start()

    def run(self) -> None:
        select.select([self._pipe], [], [])
        with self._dump.open("w") as file:
            for part in ("first ", "second"):
                file.write(part)
                file.flush()
                time.sleep(0.05)
        os.close(self._pipe)


def test_reports_are_written_under_unique_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    heartbeats, prefix = tmp_path / "heartbeats", tmp_path / "nccl-"
    HeartbeatWriter(heartbeat_file(heartbeats, 0), rank=11, local_rank=0)
    events_file(heartbeats, 0).write_text("SMT {}\n")
    sample = HeartbeatReader(heartbeat_file(heartbeats, 0)).sample()
    Recorder(prefix, 11)
    for name in ("TORCH_NCCL_DEBUG_INFO_PIPE_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"):
        monkeypatch.setenv(name, str(prefix))
    reports = {}
    for timestamp in ("early", "late"):
        report = collect(
            tmp_path / "checkpoints",
            [sample],
            node=2,
            heartbeats=heartbeats,
            timestamp=timestamp,
            summary="why\n",
        )
        prefix_length = len(f"{timestamp}-node-002-")
        reports[timestamp] = {name[prefix_length:]: name for name in report.files}
    assert report.folder == tmp_path / "checkpoints" / "stalls" / "step-00000000"
    early, late = reports["early"], reports["late"]
    assert {"summary.txt", "system.txt", "events-0.log", "rank-00011-stacks.txt"} <= set(early)
    own_frame = "test_reports_are_written_under_unique_names"
    assert own_frame in (report.folder / early["rank-00011-stacks.txt"]).read_text()
    assert (report.folder / early["rank-00011-nccl"]).read_text() == "first second"
    # The recorder has ended; nothing is overwritten.
    assert "rank-00011-nccl" not in late
    assert len(list(report.folder.iterdir())) == len(early) + len(late)


def test_output_of_nvidia_tools_is_kept_even_if_they_fail_or_hang(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fake a lost GPU, a health finding, and a command that hangs."""
    tools = tmp_path / "bin"
    tools.mkdir()
    for name, script in {
        "nvidia-smi": "echo 'Unable to determine the device handle: GPU is lost'; exit 15",
        "dcgmi": """[ "$1" = dmon ] && exec sleep 1000; echo "Overall Health | $1 $2: Failure" """,
    }.items():
        (tools / name).write_text(f"#!/bin/sh\n{script}\n")
        (tools / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tools}:{os.environ['PATH']}")
    monkeypatch.setattr("sm_train.entrypoints.monitoring.stall_report._COMMAND_SECONDS", 1.0)
    HeartbeatWriter(heartbeat_file(tmp_path / "heartbeats", 0), rank=0, local_rank=0)
    sample = HeartbeatReader(heartbeat_file(tmp_path / "heartbeats", 0)).sample()
    report = collect(
        tmp_path,
        [sample],
        node=0,
        heartbeats=tmp_path / "heartbeats",
        timestamp="now",
        summary="why\n",
    )
    text = (report.folder / "now-node-000-system.txt").read_text()
    assert "$ nvidia-smi (exit 15)\nUnable to determine the device handle: GPU is lost" in text
    assert "$ dcgmi health --check\nOverall Health | health --check: Failure" in text
    dmon = "$ dcgmi dmon --field-id 150,155,202,203,230,311,395 --count 1"
    assert f"{dmon}\nTimeoutExpired" in text
    assert "State:" in text


def test_call_that_hangs_or_fails_returns_the_default(capfd: pytest.CaptureFixture[str]) -> None:
    never = threading.Event()
    assert call_with_timeout(0.05, lambda: never.wait() and 1, 2) == 2
    assert call_with_timeout(5, lambda: 1 // 0, 2) == 2
    assert "ZeroDivisionError" in capfd.readouterr().err
    assert call_with_timeout(5, lambda: 1, 2) == 1


def test_stdout_never_waits_for_its_reader() -> None:
    read, write = os.pipe()
    stdout = NonBlockingStdout(os.fdopen(write, "w"))
    for _ in range(100):
        stdout.write("x" * 4096)
    stdout.finish(0.05)
    with os.fdopen(read) as reader:
        assert len(reader.read(100 * 4096)) == 100 * 4096
    stream = io.StringIO()
    stdout = NonBlockingStdout(stream)
    stdout.write("word")
    stdout.finish(5)
    assert stream.getvalue() == "word"
