"""What is kept of a stall, from this very process and from stand-ins for PyTorch's recorder."""

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
from sm_train.entrypoints.monitoring.stack_dump import answer_signal
def sleep_like_a_log():
    print("asleep", flush=True)
    time.sleep(1000)
answer_signal(Path(sys.argv[1]))
sleep_like_a_log()
"""


@pytest.fixture
def sleeper(tmp_path: Path) -> Iterator[int]:
    """A process that answers the signal, into ``answer``."""
    command = [sys.executable, "-c", SLEEPER, str(tmp_path / "answer")]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield process.pid
        process.kill()


def test_stacks_come_from_outside_or_else_from_within(
    tmp_path: Path, sleeper: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = tmp_path / "answer"
    os.kill(sleeper, signal.SIGSTOP)
    assert "sleep_like_a_log" in stacks(sleeper, answer)
    assert answer.read_text() == ""
    os.kill(sleeper, signal.SIGCONT)
    # Where py-spy is not there, the process is asked.
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "in sleep_like_a_log" in stacks(sleeper, answer)
    assert "no stacks" in stacks(sleeper, None)
    assert "no stacks" in stacks(2**22 + 1, answer)


class Recorder(threading.Thread):
    """Waits at a pipe, as PyTorch does, and dumps in two parts."""

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


def test_everything_is_kept_under_names_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pulses, prefix = tmp_path / "pulses", tmp_path / "nccl-"
    HeartbeatWriter(heartbeat_file(pulses, 0), rank=11, local_rank=0)
    events_file(pulses, 0).write_text("SMT {}\n")
    sign = HeartbeatReader(heartbeat_file(pulses, 0)).sign()
    Recorder(prefix, 11)
    for name in ("TORCH_NCCL_DEBUG_INFO_PIPE_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"):
        monkeypatch.setenv(name, str(prefix))
    kept = {}
    for stamp in ("early", "late"):
        found = collect(
            tmp_path / "checkpoints", [sign], node=2, pulses=pulses, stamp=stamp, story="why\n"
        )
        kept[stamp] = {name.removeprefix(f"{stamp}-node-002-"): name for name in found.files}
    assert found.folder == tmp_path / "checkpoints" / "stalls" / "step-00000000"
    early, late = kept["early"], kept["late"]
    assert {"what.txt", "machine.txt", "events-0.log", "rank-00011-stacks.txt"} <= set(early)
    this = "test_everything_is_kept_under_names_of_its_own"
    assert this in (found.folder / early["rank-00011-stacks.txt"]).read_text()
    assert (found.folder / early["rank-00011-nccl"]).read_text() == "first second"
    # The recorder has gone; nothing is overwritten.
    assert "rank-00011-nccl" not in late
    assert len(list(found.folder.iterdir())) == len(early) + len(late)


def test_what_nvidias_tools_say_is_kept_also_where_they_fail_or_hang(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With stand-ins: a lost GPU, a finding, and a command that does not answer."""
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
    HeartbeatWriter(heartbeat_file(tmp_path / "pulses", 0), rank=0, local_rank=0)
    sign = HeartbeatReader(heartbeat_file(tmp_path / "pulses", 0)).sign()
    found = collect(
        tmp_path, [sign], node=0, pulses=tmp_path / "pulses", stamp="now", story="why\n"
    )
    told = (found.folder / "now-node-000-machine.txt").read_text()
    assert "$ nvidia-smi (exit 15)\nUnable to determine the device handle: GPU is lost" in told
    assert "$ dcgmi health --check\nOverall Health | health --check: Failure" in told
    dmon = "$ dcgmi dmon --field-id 150,155,202,203,230,311,395 --count 1"
    assert f"{dmon}\nTimeoutExpired" in told
    assert "State:" in told


def test_what_hangs_or_fails_is_given_up(capfd: pytest.CaptureFixture[str]) -> None:
    never = threading.Event()
    assert call_with_timeout(0.05, lambda: never.wait() and 1, 2) == 2
    assert call_with_timeout(5, lambda: 1 // 0, 2) == 2
    assert "ZeroDivisionError" in capfd.readouterr().err
    assert call_with_timeout(5, lambda: 1, 2) == 1


def test_a_voice_never_waits_for_its_reader() -> None:
    read, write = os.pipe()
    voice = NonBlockingStdout(os.fdopen(write, "w"))
    for _ in range(100):
        voice.write("x" * 4096)
    voice.finish(0.05)
    with os.fdopen(read) as reader:
        assert len(reader.read(100 * 4096)) == 100 * 4096
    spoken = io.StringIO()
    voice = NonBlockingStdout(spoken)
    voice.write("word")
    voice.finish(5)
    assert spoken.getvalue() == "word"
