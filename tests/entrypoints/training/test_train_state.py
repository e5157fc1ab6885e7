"""A step of the learner is PyTorch's own, clipping and AdamW, or none."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from sm_train.entrypoints.common.job_config import read_job_config
from sm_train.entrypoints.distributed.fsdp import gradient_norm
from sm_train.entrypoints.training import train_state
from sm_train.entrypoints.training.train_state import TrainState
from torch import nn

from tests.support.cluster.training_jobs import tiny_run
from tests.support.run_documents import write_job_file


def learner(folder: Path) -> TrainState:
    path = write_job_file(folder, tiny_run(max_steps=9, learning_rate=0.1))
    torch.manual_seed(0)
    return TrainState(read_job_config(path, "8px"), nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)))


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("size", [1e-3, 1.0, 1e3])
def test_gradients_are_clipped_as_pytorch_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: float, *, fused: bool
) -> None:
    """Whether AdamW does it on its way or, before PyTorch 2.4 on a CPU, it is done for it."""
    monkeypatch.setattr(train_state, "_fused_available", lambda device: fused)
    trained = learner(tmp_path)
    by_hand = [one.detach().clone().requires_grad_() for one in trained.parameters]
    optimizer = torch.optim.AdamW(by_hand, lr=0.1, weight_decay=0.01)
    for _ in range(3):
        for one, other in zip(trained.parameters, by_hand, strict=True):
            one.grad = size * torch.randn_like(one)
            other.grad = one.grad.clone()
        norm = gradient_norm(trained.parameters)
        assert float(trained.update(norm)) == 0.0
        torch.testing.assert_close(norm, nn.utils.clip_grad_norm_(by_hand, 1.0))
        optimizer.step()
        for one, other in zip(trained.parameters, by_hand, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
def test_what_is_no_number_teaches_nothing(tmp_path: Path, wrong: float) -> None:
    trained = learner(tmp_path)
    before = [one.detach().clone() for one in trained.parameters]
    for one in trained.parameters:
        one.grad = torch.ones_like(one)
    gradient = trained.parameters[0].grad
    assert gradient is not None
    gradient[0, 0] = wrong
    assert float(trained.update(gradient_norm(trained.parameters))) == 1.0
    assert all(map(torch.equal, before, trained.parameters))
    # The step counts, and its gradients are gone.
    assert trained.step == 1
    assert all(one.grad is None for one in trained.parameters)
