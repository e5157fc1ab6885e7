"""The command that `status` suggests runs in an empty folder, with its region."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from sm_train.estimators.config.schema import RunConfig

from tests.conftest import Cli, clean_environment
from tests.support.cluster.stored_run import StoredRun
from tests.support.deadline import DEADLINE
from tests.support.run_documents import run, stage
from tests.toolkit.runs.run_lifecycle_support import FIRST, Laptop, laptop

__all__ = ["laptop"]

pytestmark = pytest.mark.integration

UNKNOWN = ("no such", "neither a run file", "not set", "Usage", "is not in", "Traceback")
"""What a command says that does not find the run, or its region."""


def run_as_printed(command: str, folder: Path, environment: dict[str, str]) -> str:
    """Run a command in an empty folder, without a terminal; return what it said."""
    folder.mkdir()
    program, *arguments = command.split()
    assert program == "sm-train"
    done = subprocess.run(
        [sys.executable, "-m", "sm_train.toolkit", *arguments],
        cwd=folder,
        env=clean_environment(folder) | environment,
        capture_output=True,
        text=True,
        timeout=DEADLINE,
        stdin=subprocess.DEVNULL,
        check=False,
    )
    return done.stdout + done.stderr


@pytest.mark.parametrize(
    ("status", "command"),
    [
        ({"status": "Failed", "reason": "AlgorithmError: exit 1"}, "diagnose"),
        ({"status": "Stopped"}, "resume"),
        ({"status": "Stopping"}, "status"),
    ],
)
def test_of_a_run_on_sagemaker(
    laptop: Laptop, tmp_path: Path, status: dict[str, Any], command: str
) -> None:
    """The machine has no default region: the run file names it."""
    del laptop.environment["AWS_DEFAULT_REGION"]
    laptop.sagemaker.log_event(FIRST, "start", ago=400)
    laptop.sagemaker.checkpoint("256px", 300)
    laptop.sagemaker.set_status(FIRST, **status)
    printed = laptop.json("--region", "us-east-1", "status", "demo")["next_command"]
    assert printed.startswith(f"sm-train --region us-east-1 {command} demo")
    said = run_as_printed(printed, tmp_path / "empty", laptop.environment)
    assert not [text for text in UNKNOWN if text in said], said


@pytest.mark.parametrize(
    ("age", "code", "command"), [(20.0, None, "watch"), (900.0, 1, "diagnose")]
)
def test_of_a_run_on_a_cluster(
    cli: Cli, tmp_path: Path, age: float, code: int | None, command: str
) -> None:
    document = run(stages=[stage("256px")])
    document["kubernetes"] = {"image": "registry.example.com/train:1"}
    place = tmp_path / "shared" / "demo" / "checkpoints"
    stored = StoredRun(place, RunConfig.model_validate(document))
    state: Any = "training" if code is None else "ended"
    stored.attempt(time.time() - age, states=(state, state), codes=(code, code))
    shown = cli("status", place, "--region", "us-east-1")
    assert shown.returncode == 0, shown.stderr
    [line] = [line for line in shown.stdout.splitlines() if line.startswith("next: ")]
    printed = line.removeprefix("next: ")
    assert printed == f"sm-train {command} {place}"
    said = run_as_printed(
        printed if command != "watch" else f"{printed} --once",
        tmp_path / "empty",
        {"AWS_DEFAULT_REGION": "us-east-1"},
    )
    assert not [text for text in UNKNOWN if text in said], said
