"""Background work ends before the weights change, and its failure is raised."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from sm_train.entrypoints.checkpoints.background import BackgroundWork
from sm_train.entrypoints.job_interface.job_config import read_job_config
from sm_train.entrypoints.training.train_state import TrainState
from torch import nn

from tests.support.cluster.training_jobs import tiny_run
from tests.support.deadline import DEADLINE
from tests.support.run_documents import write_job_file


def train_state(folder: Path) -> TrainState:
    path = write_job_file(folder, tiny_run(max_steps=9, ema_decay=0.9))
    torch.manual_seed(0)
    return TrainState(read_job_config(path, "8px"), nn.Linear(3, 2))


def step(state: TrainState) -> None:
    for parameter in state.parameters:
        parameter.grad = torch.ones_like(parameter)
    state.update(torch.ones(()))


def swap_ema(state: TrainState) -> None:
    with state.ema_weights():
        pass


@pytest.mark.parametrize("change", [step, swap_ema, TrainState.copy_ema_to_weights])
def test_weights_change_only_after_background_reads(
    tmp_path: Path, change: Callable[[TrainState], None]
) -> None:
    """A copy that is delayed sees the weights from before the change."""
    state = train_state(tmp_path)
    step(state)
    step(state)
    started, may_copy, copied = threading.Event(), threading.Event(), list[torch.Tensor]()

    def copy() -> None:
        started.set()
        assert may_copy.wait(DEADLINE)
        copied.extend(parameter.detach().clone() for parameter in state.parameters)

    before = [parameter.detach().clone() for parameter in state.parameters]
    state.background.run(copy)
    changing = threading.Thread(target=change, args=(state,))
    changing.start()
    assert started.wait(DEADLINE)
    assert changing.is_alive()
    assert all(map(torch.equal, before, state.parameters))
    may_copy.set()
    changing.join(DEADLINE)
    assert not changing.is_alive()
    assert all(map(torch.equal, before, copied))
    assert state.background.blocked_seconds > 0


def test_background_ema_equals_synchronous_ema(tmp_path: Path) -> None:
    state = train_state(tmp_path)
    expected = [parameter.detach().clone() for parameter in state.parameters]
    for number in range(5):
        step(state)
        decay = min(0.9, (1 + number) / (10 + number)) if number else 0.0
        for average, weight in zip(expected, state.parameters, strict=True):
            average.lerp_(weight.detach(), 1 - decay)
    state.copy_ema_to_weights()
    for average, weight in zip(expected, state.parameters, strict=True):
        torch.testing.assert_close(weight.detach(), average)


def test_work_runs_in_order_and_its_failure_is_raised_once() -> None:
    background, done = BackgroundWork(torch.device("cpu")), list[int]()
    for number in range(50):
        background.run(lambda number=number: done.append(number))  # type: ignore[misc]
    background.join()
    assert done == list(range(50))
    background.run(lambda: [][0])
    with pytest.raises(IndexError):
        background.join()
    background.join()
