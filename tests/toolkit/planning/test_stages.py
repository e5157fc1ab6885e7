"""Speeds that a run's jobs expect, from the run file."""

from __future__ import annotations

from typing import Any

import pytest
from sm_train.cost.stage import CostStage, StageProgram
from sm_train.cost.throughput import Measurement, StageMeasurement
from sm_train.toolkit.planning.run_price import predicted_speeds, stages_to_price

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


def with_measurement(ran: StageProgram, **changes: Any) -> CostStage:
    """Return the stage of a run whose cluster has been measured at 1 it/s with a program."""
    stage = run_documents.stage(steps_per_second=None, instances=1)
    config = run_documents.config(stages=[stage], **changes)
    [planned] = config.stages
    measurement = Measurement(
        "one node",
        1.0,
        world_size=8,
        resolution=planned.resolution,
        effective_batch_size=128,
        instance_type=config.cluster.instance_type,
        per_device_batch_size=8,
        gradient_accumulation_steps=2,
        program=ran,
    )
    [priced] = stages_to_price(config, [StageMeasurement("", measurement)])
    return priced


def test_a_measured_speed_belongs_to_the_program_that_ran() -> None:
    """Encoders take a part of each step: the speed of a job with latents is none of one without."""
    with_latents, encoding = StageProgram(holds_latents=True), StageProgram(holds_latents=False)
    runs = {
        ran: {"data": {"uri": "s3://b-1/shards/", "latents": latents}}
        for ran, latents in ((with_latents, 256), (encoding, 0))
    }
    predicted = {
        ran: with_measurement(ran, **run).predicted_images_per_second for ran, run in runs.items()
    }
    for ran in runs:
        for planned, run in runs.items():
            found = with_measurement(ran, **run).speed
            assert found is not None
            assert found.basis == ("measured" if ran == planned else "scaled")
            assert found.steps_per_second == pytest.approx(predicted[planned] / predicted[ran])
        # A run file that states nothing about latents is no evidence against what ran.
        unstated = with_measurement(ran).speed
        assert unstated is not None
        assert (unstated.basis, unstated.steps_per_second) == ("measured", 1.0)
    assert predicted[with_latents] > 1.2 * predicted[encoding]


@pytest.mark.parametrize(
    "ran",
    [
        StageProgram(compiled=True),
        StageProgram(precision="fp32"),
        StageProgram(activation_checkpointing=True),
        StageProgram(sharding="full_shard"),
        StageProgram(text_encoders="cpu"),
    ],
    ids=lambda ran: "-".join(ran.known()),
)
def test_another_program_is_converted(ran: StageProgram) -> None:
    found = with_measurement(ran).speed
    assert found is not None
    assert found.basis == "scaled"
    assert "one node" in found.why


def test_what_an_image_decides_is_unknown_before_a_job_runs() -> None:
    """Nobody knows the PyTorch of a user's image: what its jobs have shown is no other program."""
    cluster = {"instance_type": "ml.p4de.24xlarge", "image": "registry.example.com/own:1"}
    for compiled in (True, False):
        ran = StageProgram(compiled=compiled, text_encoders="sharded")
        stage = with_measurement(ran, cluster=cluster, training={"compile": "auto"})
        assert stage.speed is not None
        assert (stage.speed.basis, stage.speed.steps_per_second) == ("measured", 1.0)
        assert stage.compiled is compiled
    stated = {"compile": True}
    other = with_measurement(StageProgram(compiled=False), cluster=cluster, training=stated)
    assert other.speed is not None
    assert other.speed.basis == "scaled"
    assert "with compiled: False" in other.speed.why


def test_what_the_measured_job_read_counts_for_every_conversion() -> None:
    """A run file that says nothing of latents is priced as the job ran, whatever else changes."""
    ran = StageProgram(holds_latents=True, reduce_dtype="fp32")
    stage = with_measurement(ran, training={"compile": False, "reduce_dtype": "bf16"})
    assert stage.holds_latents is True
    assert stage.encoder_flops_per_image == 0
    assert stage.speed is not None
    assert stage.speed.steps_per_second >= 1.0
