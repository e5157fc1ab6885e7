"""Ctrl-C in commands that talk to AWS and to the Hub, at any moment."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import Aws, Cli
from tests.support.models.components import published, safetensors
from tests.support.models.hub_server import hub_server
from tests.toolkit.commands.interrupts_support import (
    FEW,
    MANY,
    Finished,
    LongCommand,
    complete,
    files,
    interrupt,
    interrupt_in_a_row,
    interrupt_repeatedly,
)
from tests.toolkit.runs.run_lifecycle_support import FIRST, Laptop

pytestmark = pytest.mark.integration


def no_inputs(folder: Path) -> None:
    """Create nothing: the command reads none."""


CLIENTS = [("watch", "demo"), ("watch", "demo", "--dry-run"), ("logs", "demo", "--follow")]


@pytest.mark.slow
@pytest.mark.parametrize("times", [1, pytest.param(MANY, marks=pytest.mark.slow)])
def test_interrupted_clients_end_without_a_traceback(
    cli: Cli, aws: Aws, tmp_path: Path, times: int
) -> None:
    """Three moments of the three commands, or many of each."""
    laptop = Laptop(cli, aws, tmp_path)
    laptop.sagemaker.set_status(FIRST, "InProgress", "Training", seconds=600)
    laptop.sagemaker.log_event(FIRST, "step", ago=20, step=10, steps_per_second=1.8, loss=0.25)
    status = LongCommand(("status", "demo"), no_inputs, files(), environment=laptop.environment)
    finished = Finished(status, tmp_path, 2 * complete(status, tmp_path), {})
    for seed, arguments in enumerate(CLIENTS):
        command = LongCommand(arguments, no_inputs, files(), environment=laptop.environment)
        for delay in finished.delays(times, seed):
            interrupt(command, tmp_path, delay)
    complete(status, tmp_path)


@pytest.mark.parametrize("times", [FEW, pytest.param(MANY, marks=pytest.mark.slow)])
def test_interrupted_copy_of_a_model_leaves_nothing_and_resumes(tmp_path: Path, times: int) -> None:
    name = "org/model"
    with hub_server() as hub:
        hub.repositories[name] = published("tiny-sd2")
        weights = "unet/diffusion_pytorch_model.safetensors"
        hub.repositories[name][weights] = safetensors(weight=(500, 1000))
        command = LongCommand(
            ("fetch-model", name, "model"),
            no_inputs,
            files("model"),
            atomic=True,
            environment=hub.environment(str(tmp_path / "hf")),
        )
        if times == FEW:
            interrupt_in_a_row(Finished.of(command, tmp_path), times)
        else:
            interrupt_repeatedly(command, tmp_path, times)
