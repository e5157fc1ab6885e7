"""Speeds that a run's jobs expect, from the run file."""

from __future__ import annotations

from typing import Any

from sm_train.toolkit.costing.stages import predicted_speeds, stages_to_price

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


def bases(stated: dict[str, Any], other: dict[str, Any]) -> list[str | None]:
    """Return the bases of a stated speed, and of a stage at the same resolution without one."""
    stages = [
        run_documents.stage("a", **stated),
        run_documents.stage("b", steps_per_second=None, **other),
    ]
    priced = stages_to_price(run_documents.config(stages=stages))
    return [stage.speed and stage.speed.basis for stage in priced]


def test_a_stated_speed_belongs_to_one_key_of_the_work() -> None:
    """For other work it is converted by the speed model, and is no measurement of it."""
    assert bases({}, {}) == ["stated", "measured"]
    for other in (
        {"activation_checkpointing": True},
        {"sharding": "full_shard"},
        {"activation_checkpointing": True, "instances": 8},
    ):
        assert bases({}, other) == ["stated", "scaled"]
        assert bases(other, other) == ["stated", "measured"]
