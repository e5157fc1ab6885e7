"""A training step equals PyTorch's clipping and AdamW, or is skipped."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from sm_train.entrypoints.distributed.fsdp import gradient_norm
from sm_train.entrypoints.job_interface.job_config import read_job_config
from sm_train.entrypoints.training import optimizers
from sm_train.entrypoints.training.train_state import TrainState
from torch import nn

from tests.support.cluster.training_jobs import tiny_run
from tests.support.run_documents import write_job_file


def train_state(folder: Path) -> TrainState:
    path = write_job_file(folder, tiny_run(max_steps=9, learning_rate=0.1))
    torch.manual_seed(0)
    return TrainState(read_job_config(path, "8px"), nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)))


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("size", [1e-3, 1.0, 1e3])
def test_update_equals_pytorch_clipping_and_adamw(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: float, *, fused: bool
) -> None:
    """With clipping fused into AdamW, and without, as on a CPU before PyTorch 2.4."""
    monkeypatch.setattr(optimizers, "_fused_available", lambda device: fused)
    state = train_state(tmp_path)
    reference = [weight.detach().clone().requires_grad_() for weight in state.parameters]
    optimizer = torch.optim.AdamW(reference, lr=0.1, weight_decay=0.01)
    for _ in range(3):
        for weight, expected in zip(state.parameters, reference, strict=True):
            weight.grad = size * torch.randn_like(weight)
            expected.grad = weight.grad.clone()
        norm = gradient_norm(state.parameters)
        assert float(state.update(norm)) == 0.0
        torch.testing.assert_close(norm, nn.utils.clip_grad_norm_(reference, 1.0))
        optimizer.step()
        for weight, expected in zip(state.parameters, reference, strict=True):
            torch.testing.assert_close(weight, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("nonfinite", [float("nan"), float("inf")])
def test_nonfinite_gradient_skips_update(tmp_path: Path, nonfinite: float) -> None:
    state = train_state(tmp_path)
    before = [weight.detach().clone() for weight in state.parameters]
    for weight in state.parameters:
        weight.grad = torch.ones_like(weight)
    gradient = state.parameters[0].grad
    assert gradient is not None
    gradient[0, 0] = nonfinite
    assert float(state.update(gradient_norm(state.parameters))) == 1.0
    assert all(map(torch.equal, before, state.parameters))
    # The step counts, and its gradients are cleared.
    assert state.step == 1
    assert all(weight.grad is None for weight in state.parameters)
