"""Ctrl-C in a local run in containers at any moment, sent to the whole process group.

No container, network, process or partial file is left, and the same command resumes.
"""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path

import psutil
import pytest
import yaml
from sm_train.toolkit.jobs.local_folder import FINISHED_NAME

from tests.container.test_containers import docker, engine
from tests.support.cluster.training_jobs import tiny_run, write_shards
from tests.support.deadline import DEADLINE
from tests.toolkit.commands.test_interrupts import (
    FEW,
    MANY,
    LongCommand,
    complete,
    files,
    interrupt,
    processes_in,
    started,
)

__all__ = ["engine"]


def write_run(folder: Path, max_steps: int) -> None:
    write_shards(folder / "shards", shards=2, each=8)
    document = tiny_run(max_steps=max_steps, checkpoint_every=2).model_dump(mode="json")
    document["data"]["local"] = "shards"
    (folder / "run.yaml").write_text(yaml.safe_dump(document))


@pytest.mark.slow
@pytest.mark.parametrize("times", [FEW, MANY])
def test_interrupted_containers_leave_nothing_and_resume(
    tmp_path: Path, engine: None, times: int
) -> None:
    finished = f"run/8px/{FINISHED_NAME}"
    command = LongCommand(
        ("submit", "run.yaml", "--local", "container", "--output", "run", "--nodes", "2"),
        lambda folder: write_run(folder, max_steps=6),
        files(finished),
    )
    reference, folder = tmp_path / "reference", tmp_path / "interrupted"
    for one in (reference, folder):
        one.mkdir()
        command.write_inputs(one)
    seconds = complete(command, reference)
    moments = random.Random(times)
    for _ in range(times):
        # The next one meets what this one left.
        interrupt(command, folder, moments.uniform(0, seconds))
        assert docker("ps", "-aq", "--filter", "label=com.docker.compose.project") == ""
        assert "sagemaker-local" not in docker("network", "ls")
        # A completed run would end at once.
        (folder / finished).unlink(missing_ok=True)
    complete(command, folder)
    assert command.result(folder) == command.result(reference) != {}


@pytest.mark.slow
def test_interrupt_while_containers_are_created_leaves_none(tmp_path: Path, engine: None) -> None:
    """docker compose requests them in a process of its own, which must end first."""
    write_run(tmp_path, max_steps=6)
    arguments = ("submit", "run.yaml", "--local", "container", "--output", "run", "--nodes", "2")
    with started(LongCommand(arguments, lambda folder: None, files()), tmp_path) as process:
        deadline = time.monotonic() + DEADLINE
        while "sagemaker-local" not in docker("network", "ls"):
            assert time.monotonic() < deadline
        os.killpg(process.pid, signal.SIGINT)
        _, stderr = process.communicate(timeout=DEADLINE)
        assert process.returncode == 130, stderr
        psutil.wait_procs(processes_in(tmp_path), timeout=DEADLINE)
    assert docker("ps", "-aq", "--filter", "label=com.docker.compose.project") == ""
    assert "sagemaker-local" not in docker("network", "ls")
