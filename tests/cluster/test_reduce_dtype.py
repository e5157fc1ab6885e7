"""Gradients that are summed in bf16: as good as bf16 allows, with DDP and FSDP2."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.cluster.training_jobs import (
    Job,
    gradient_norms,
    losses,
    tiny_run,
    write_shards,
)

BF16_ROUNDING = 2.0**-8
"""Largest relative error of one rounding to bf16, which has 8 significant bits."""


def train(folder: Path, sharding: str, reduce_dtype: str) -> Job:
    settings = {"preset": "tiny-mmdit", "per_device_batch_size": 2, "caption_dropout": 0.0}
    return Job(
        folder,
        tiny_run(max_steps=3, sharding=sharding, reduce_dtype=reduce_dtype, **settings),  # type: ignore[arg-type]
    )


@pytest.mark.slow
@pytest.mark.parametrize("sharding", ["none", "full_shard"])
def test_bf16_sums_differ_by_their_rounding(tmp_path: Path, sharding: str) -> None:
    norms, first_losses = [], []
    for reduce_dtype in ("fp32", "bf16"):
        job = train(tmp_path / reduce_dtype, sharding, reduce_dtype)
        write_shards(job.train_channel, shards=2, each=2)
        code, events, text = job.run(2)
        assert code == 0, text
        norms.append(gradient_norms(events)[1])
        first_losses.append(losses(events)[1])
    assert first_losses[0] == first_losses[1]
    # Errors of single gradients cancel in the norm.
    assert norms[1] == pytest.approx(norms[0], rel=BF16_ROUNDING)
    assert norms[1] != norms[0]
