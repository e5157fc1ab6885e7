"""Ctrl-C in a local run in containers at any moment, sent to the whole process group.

No container, network, process or partial file is left, and the same command resumes.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import psutil
import pytest
from sm_train.toolkit.records.local_folder import FINISHED_NAME

from tests.container.containers_support import docker, engine
from tests.support.deadline import DEADLINE
from tests.toolkit.commands.interrupts_support import (
    FEW,
    MANY,
    Finished,
    LongCommand,
    complete,
    files,
    interrupt,
    processes_in,
    started,
    write_run,
)

pytestmark = pytest.mark.integration

__all__ = ["engine"]


ARGUMENTS = ("submit", "run.yaml", "--local", "container", "--output", "run", "--nodes", "2")


@pytest.mark.slow
@pytest.mark.parametrize("times", [FEW, MANY])
def test_interrupted_containers_leave_nothing_and_resume(
    tmp_path: Path, engine: None, times: int
) -> None:
    done = f"run/8px/{FINISHED_NAME}"
    command = LongCommand(ARGUMENTS, write_run, files(done))
    finished = Finished.of(command, tmp_path)
    folder = finished.inputs
    for delay in finished.delays(times, seed=times):
        # The next one meets what this one left.
        interrupt(command, folder, delay)
        assert docker("ps", "-aq", "--filter", "label=com.docker.compose.project") == ""
        assert "sagemaker-local" not in docker("network", "ls")
        # A completed run would end at once.
        (folder / done).unlink(missing_ok=True)
    complete(command, folder)
    assert command.result(folder) == finished.result


@pytest.mark.slow
def test_interrupt_while_containers_are_created_leaves_none(tmp_path: Path, engine: None) -> None:
    """docker compose requests them in a process of its own, which must end first."""
    write_run(tmp_path)
    with started(LongCommand(ARGUMENTS, lambda folder: None, files()), tmp_path) as process:
        deadline = time.monotonic() + DEADLINE
        while "sagemaker-local" not in docker("network", "ls"):
            assert time.monotonic() < deadline
        os.killpg(process.pid, signal.SIGINT)
        _, stderr = process.communicate(timeout=DEADLINE)
        assert process.returncode == 130, stderr
        psutil.wait_procs(processes_in(tmp_path), timeout=DEADLINE)
    assert docker("ps", "-aq", "--filter", "label=com.docker.compose.project") == ""
    assert "sagemaker-local" not in docker("network", "ls")
