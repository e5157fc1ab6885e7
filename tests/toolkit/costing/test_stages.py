"""Speeds that a run's jobs expect, from the run file."""

from __future__ import annotations

from typing import Any

from sm_train.toolkit.costing.stages import predicted_speeds

from tests.support import run_documents


def predicted(sharding: str, **training: Any) -> float:
    stage = run_documents.stage(
        steps_per_second=None, sharding=sharding, gradient_accumulation_steps=1
    )
    cluster = {"instance_type": "ml.g5.48xlarge", "backend": "nccl"}
    config = run_documents.config(stages=[stage], training=training, cluster=cluster)
    [speed] = predicted_speeds(config).values()
    return speed


def test_gradients_in_bf16_raise_the_expected_speed() -> None:
    """A node of this type sends 7.5 GB/s: gradients of 3.5 GB take longer than the compute."""
    for sharding in ("none", "full_shard", "hybrid_shard"):
        assert predicted(sharding, reduce_dtype="bf16") > 1.1 * predicted(sharding)
