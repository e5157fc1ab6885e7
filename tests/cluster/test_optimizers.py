"""A killed run resumes bit for bit with any optimizer, schedule and loss, sharded or not."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.support.capabilities import link_optional_package
from tests.support.cluster.training_jobs import Job, shard_digests, tiny_run, write_shards

pytestmark = pytest.mark.integration

USER_CODE = """
import math

import torch


class Signum(torch.optim.Optimizer):
    '''The sign of a momentum, with state of each kind: of a weight's shape, of another shape, a
    number for each weight, and one for all.'''

    def __init__(self, weights, lr, decay):
        super().__init__(weights, {"lr": lr, "scale": 1.0})
        self._decay = decay

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            group["scale"] *= self._decay
            for weight in group["params"]:
                state = self.state[weight]
                state["steps"] = state.get("steps", 0) + 1
                mean = weight.grad.double().sum().reshape(1)
                state["mean"] = 0.9 * state.get("mean", torch.zeros_like(mean)) + 0.1 * mean
                momentum = state.setdefault("momentum", torch.zeros_like(weight))
                momentum.lerp_(weight.grad, 0.1)
                size = group["lr"] * group["scale"] / math.sqrt(state["steps"])
                weight.add_((momentum + 1e-3 * state["mean"].float()).sign(), alpha=-size)


def huber(prediction, target):
    losses = torch.nn.functional.huber_loss(prediction, target.target, reduction="none")
    return losses.mean(dim=(1, 2, 3))


def triangle(step, max_steps, period):
    return 0.1 + abs(step % period - period / 2) / period
"""

SIGNUM = {
    "optimizer": {"name": "user_code:Signum", "options": {"decay": 0.9}},
    "lr_schedule": {"name": "user_code:triangle", "options": {"period": 4}},
    "objective": "user_code:huber",
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("processes", "settings"),
    [
        (2, {"optimizer": "muon", "lr_schedule": "wsd"}),
        (2, {**SIGNUM, "sharding": "full_shard"}),
        pytest.param(2, SIGNUM, marks=pytest.mark.slow),
        pytest.param(2, {"preset": "tiny-sdxl"}, marks=pytest.mark.slow),
        pytest.param(2, {"preset": "tiny-dit"}, marks=pytest.mark.slow),
        pytest.param(
            3, {"optimizer": "adafactor", "lr_schedule": "cosine"}, marks=pytest.mark.slow
        ),
        pytest.param(2, {"precision": "fp8", "sharding": "full_shard"}, marks=pytest.mark.slow),
        pytest.param(2, {"text_encoders": "sharded"}, marks=pytest.mark.slow),
        pytest.param(2, {"text_encoders": "cpu"}, marks=pytest.mark.slow),
        pytest.param(2, {"optimizer": "adamw8bit"}, marks=pytest.mark.slow),
        pytest.param(
            3, {"optimizer": "adamw8bit", "sharding": "full_shard"}, marks=pytest.mark.slow
        ),
        pytest.param(
            2, {"optimizer": "adamw8bit", "sharding": "shard_grad_op"}, marks=pytest.mark.slow
        ),
    ],
)
def test_killed_run_resumes_bit_for_bit(
    tmp_path: Path, processes: int, settings: dict[str, Any]
) -> None:
    def job(name: str) -> Job:
        config = tiny_run(
            **({"preset": "tiny-mmdit"} | settings),
            max_steps=24,
            checkpoint_every=6,
            caption_dropout=0.3,
        )
        created = Job(tmp_path / name, config)
        (created.bundle / "user_code.py").write_text(USER_CODE)
        if settings.get("optimizer") == "adamw8bit":
            link_optional_package("bitsandbytes", created.bundle)
        if settings.get("precision") == "fp8":
            link_optional_package("torchao", created.bundle)
        write_shards(created.train_channel, shards=2, each=12)
        return created

    uninterrupted = job("uninterrupted")
    with uninterrupted.start(processes) as running:
        expected = running.wait_for("end", reason="done")
        assert running.process.wait() == 0
    killed = job("killed")
    with killed.start(processes) as running:
        running.wait_for("checkpoint", step=6)
        os.kill(running.workers()[1], signal.SIGKILL)
    with killed.start(processes) as running:
        assert running.wait_for("start")["resumed_from_step"] >= 6
        assert running.wait_for("end")["step"] == expected["step"]
        assert running.process.wait() == 0
    assert shard_digests(killed, 24) == shard_digests(uninterrupted, 24)
