"""What goes on beside a step's passes is over before the weights change, and says what fails."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from sm_train.entrypoints.common.background import BackgroundWork
from sm_train.entrypoints.common.job_config import read_job_config
from sm_train.entrypoints.training.train_state import TrainState
from torch import nn

from tests.support.cluster.training_jobs import tiny_run
from tests.support.run_documents import write_job_file

PATIENCE = 30.0


def learner(folder: Path) -> TrainState:
    path = write_job_file(folder, tiny_run(max_steps=9, ema_decay=0.9))
    torch.manual_seed(0)
    return TrainState(read_job_config(path, "8px"), nn.Linear(3, 2))


def step(of: TrainState) -> None:
    for one in of.parameters:
        one.grad = torch.ones_like(one)
    of.update(torch.ones(()))


def swap(of: TrainState) -> None:
    with of.ema_weights():
        pass


@pytest.mark.parametrize("change", [step, swap, TrainState.copy_ema_to_weights])
def test_weights_wait_for_what_still_reads_them(
    tmp_path: Path, change: Callable[[TrainState], None]
) -> None:
    """A copy that is held up is of the weights as they were."""
    trained = learner(tmp_path)
    step(trained)
    step(trained)
    begun, may_copy, copied = threading.Event(), threading.Event(), list[torch.Tensor]()

    def copy() -> None:
        begun.set()
        assert may_copy.wait(PATIENCE)
        copied.extend(one.detach().clone() for one in trained.parameters)

    before = [one.detach().clone() for one in trained.parameters]
    trained.background.run(copy)
    changing = threading.Thread(target=change, args=(trained,))
    changing.start()
    assert begun.wait(PATIENCE)
    assert changing.is_alive()
    assert all(map(torch.equal, before, trained.parameters))
    may_copy.set()
    changing.join(PATIENCE)
    assert not changing.is_alive()
    assert all(map(torch.equal, before, copied))
    assert trained.background.blocked_seconds > 0


def test_the_average_is_what_it_is_without_a_thread(tmp_path: Path) -> None:
    trained = learner(tmp_path)
    expected = [one.detach().clone() for one in trained.parameters]
    for number in range(5):
        step(trained)
        decay = min(0.9, (1 + number) / (10 + number)) if number else 0.0
        for average, weight in zip(expected, trained.parameters, strict=True):
            average.lerp_(weight.detach(), 1 - decay)
    trained.copy_ema_to_weights()
    for average, weight in zip(expected, trained.parameters, strict=True):
        torch.testing.assert_close(weight.detach(), average)


def test_work_is_done_in_order_and_its_failure_is_raised() -> None:
    beside, done = BackgroundWork(torch.device("cpu")), list[int]()
    for number in range(50):
        beside.run(lambda number=number: done.append(number))  # type: ignore[misc]
    beside.join()
    assert done == list(range(50))
    beside.run(lambda: [][0])
    with pytest.raises(IndexError):
        beside.join()
    # It was told once.
    beside.join()
