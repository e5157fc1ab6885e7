"""Helpers of the tests of interrupts, which other tests use as well."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import cycle
from pathlib import Path

import psutil
import yaml

from tests.conftest import clean_environment
from tests.support.cluster import torch_server
from tests.support.cluster.training_jobs import tiny_run, write_shards
from tests.support.deadline import DEADLINE

PROGRAM = (
    "import signal, sys\n"
    # The parent of the tests (nohup, a shell) may ignore it, and children inherit that.
    "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
    "from sm_train.toolkit.cli import main\n"
    "main(sys.argv[1:])\n"
)


FEW, MANY = 3, 50


ENDING_SIGNALS = (signal.SIGTERM, signal.SIGINT)


@dataclass(frozen=True)
class LongCommand:
    """A command, what it reads, and the files that are equal however often it was interrupted.

    An ``atomic`` command writes all of its result or nothing; another one resumes.
    """

    arguments: tuple[str, ...]
    write_inputs: Callable[[Path], object]
    result: Callable[[Path], dict[str, bytes]]
    atomic: bool = False
    program: str = PROGRAM
    forked: bool = False
    """Whether a process that has imported PyTorch is forked, in place of a new interpreter."""
    environment: dict[str, str] = field(default_factory=dict)


def write_run(folder: Path, max_steps: int = 6) -> None:
    """Write shards and the run file of a short local run."""
    write_shards(folder / "shards", shards=2, each=8)
    document = tiny_run(max_steps=max_steps, checkpoint_every=2).model_dump(mode="json")
    document["data"]["local"] = "shards"
    (folder / "run.yaml").write_text(yaml.safe_dump(document))


def files(*names: str) -> Callable[[Path], dict[str, bytes]]:
    """Return a function that reads those of these files and folders that exist."""

    def read(folder: Path) -> dict[str, bytes]:
        paths: list[Path] = []
        for path in map(folder.joinpath, names):
            paths += path.rglob("*") if path.is_dir() else [path]
        found = [path for path in paths if path.is_file()]
        return {path.relative_to(folder).as_posix(): path.read_bytes() for path in found}

    return read


class ForkedCommand:
    """A command in a fork of a process that has imported PyTorch, as a started process."""

    def __init__(self, command: LongCommand, folder: Path) -> None:
        script = folder / ".command.py"
        script.write_text(command.program)
        environment = clean_environment(folder) | command.environment
        self._process = torch_server.start(
            [str(script), *command.arguments], cwd=folder, env=environment
        )
        self.pid = self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.returncode

    def wait(self, timeout: float | None = None) -> int:
        return self._process.wait(timeout)

    def communicate(self, timeout: float | None = None) -> tuple[None, str]:
        output = self._process.stdout.read()
        self.wait(timeout)
        return None, output


@contextmanager
def started(command: LongCommand, folder: Path) -> Iterator[subprocess.Popen[str] | ForkedCommand]:
    """Start the command in a process group of its own; end what a failed test leaves of it."""
    process = ForkedCommand(command, folder) if command.forked else _start(command, folder)
    try:
        yield process
    finally:
        for remaining in processes_in(folder):
            remaining.kill()
        process.communicate()


def _start(command: LongCommand, folder: Path) -> subprocess.Popen[str]:
    # If the parent of the tests ignores it, so would the child until its program runs; a handler
    # is not inherited.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    return subprocess.Popen(
        [sys.executable, "-c", command.program, *command.arguments],
        cwd=folder,
        env=clean_environment(folder) | command.environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def processes_in(folder: Path) -> list[psutil.Process]:
    """Return the processes of the command that still run, by their working directory."""
    found = []
    for process in psutil.process_iter(["cwd", "status"]):
        inside = str(process.info["cwd"] or "").startswith(f"{folder}")
        if inside and process.info["status"] != psutil.STATUS_ZOMBIE:
            found.append(process)
    return found


def complete(command: LongCommand, folder: Path) -> float:
    """Run the command to its end; return its seconds."""
    begin = time.monotonic()
    with started(command, folder) as process:
        _, stderr = process.communicate(timeout=5 * DEADLINE)
        assert process.returncode == 0, stderr
    return time.monotonic() - begin


def interrupt(
    command: LongCommand, folder: Path, delay: float, number: int = signal.SIGINT
) -> bool:
    """Send a signal after ``delay`` seconds; return whether the command has completed by then."""
    with started(command, folder) as process:
        try:
            process.wait(timeout=delay)
        except subprocess.TimeoutExpired:
            # A fork has no group of its own yet in its first moment.
            with suppress(ProcessLookupError):
                os.killpg(process.pid, number)
        _, stderr = process.communicate(timeout=DEADLINE)
        # Until the command has caught the signal for the first time, Python itself ends by it.
        assert process.returncode in (0, 128 + number, -number, 1), stderr
        assert "memory" not in stderr
        assert process.returncode != 1 or "KeyboardInterrupt" in stderr, stderr
        # init reaps processes whose parent has ended a moment after they did.
        psutil.wait_procs(processes_in(folder), timeout=DEADLINE)
        assert processes_in(folder) == []
    # A download continues from the hidden folder *.fetch; nothing else remains.
    partial = [
        path
        for path in folder.rglob("*")
        if path.suffix in (".part", ".tmp") and ".fetch/" not in f"{path}"
    ]
    assert partial == []
    return process.returncode == 0


@dataclass(frozen=True)
class Finished:
    """What a command reads, and what it writes in ``seconds`` if nothing interrupts it."""

    command: LongCommand
    inputs: Path
    seconds: float
    result: dict[str, bytes]

    @classmethod
    def of(cls, command: LongCommand, tmp_path: Path) -> Finished:
        """Complete the command in a folder of its own."""
        inputs, reference = tmp_path / "inputs", tmp_path / "reference"
        inputs.mkdir()
        command.write_inputs(inputs)
        shutil.copytree(inputs, reference, symlinks=True)
        seconds = complete(command, reference)
        result = command.result(reference)
        assert result
        return cls(command, inputs, seconds, result)

    def delays(self, times: int, seed: int) -> Iterator[float]:
        """Yield random moments of the command."""
        moments = random.Random(seed)
        return (moments.uniform(0, self.seconds) for _ in range(times))


def interrupt_in_a_row(finished: Finished, times: int, seed: int = 0) -> None:
    """Interrupt at random moments, each of which meets what the one before left; then complete."""
    command = finished.command
    folder = finished.inputs.with_name(f"interrupted-{seed}")
    shutil.copytree(finished.inputs, folder, symlinks=True)
    for delay, number in zip(finished.delays(times, seed), cycle(ENDING_SIGNALS), strict=False):
        if interrupt(command, folder, delay, number):
            break
        assert not command.atomic or command.result(folder) in ({}, finished.result)
    else:
        complete(command, folder)
    assert command.result(folder) == finished.result
    shutil.rmtree(folder)


def interrupt_repeatedly(command: LongCommand, tmp_path: Path, times: int) -> None:
    """Interrupt twice in a row at ``times`` pairs of random moments."""
    finished = Finished.of(command, tmp_path)
    for number in range(times):
        interrupt_in_a_row(finished, 2, seed=number)
