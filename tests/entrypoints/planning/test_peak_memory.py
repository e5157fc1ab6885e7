"""Planned memory is what PyTorch's trackers find in the product's steps, within 10 %.

The steps run on fake tensors (:mod:`tests.support.fake_gpu`): MemTracker follows a replicated
model, FSDPMemTracker a sharded one. Weights, AdamW's state, EMA and frozen components are included.
CUDA's context, NCCL's buffers, cuDNN's workspaces and fragmentation are not: a share of the GPU's
memory is left for them.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from sm_train.entrypoints.job_interface.job_config import LoraConfig
from sm_train.entrypoints.planning.memory import plan_preset

from tests.support.deadline import DEADLINE
from tests.support.fake_gpu import FakeRun, run_on_fake_gpu

NODE = 8


def planned_bytes(run: FakeRun) -> int:
    fixed, activations = planned_parts(run)
    return fixed + activations


def planned_parts(run: FakeRun) -> tuple[int, int]:
    """Return the bytes for any batch, and those of activations."""
    lora = LoraConfig(run.lora_rank, 1.0, None, 0.0) if run.lora_rank else None
    plan = plan_preset(
        run.preset,
        run.resolution,
        precision="bf16",
        lora=lora,
        modulation="gathered" if lora else "exchanged",
    )
    fixed = plan.fixed_bytes(
        ema=True,
        optimizer="adamw",
        strategy=run.sharding,
        world_size=run.world_size,
        per_node=NODE,
    )
    return fixed, plan.activation_bytes(
        run.per_device_batch_size, checkpointing=run.activation_checkpointing
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "run",
    [
        # The second micro-batch's activations and the gradients of the first exist at once.
        FakeRun("sd2", 256, 32, gradient_accumulation_steps=2),
        FakeRun("sd2", 512, 16, gradient_accumulation_steps=2),
        FakeRun("sdxl", 1024, 4, gradient_accumulation_steps=2, activation_checkpointing=True),
        FakeRun("mmdit-8b", 512, 4, sharding="full_shard", world_size=128),
        FakeRun(
            "mmdit-20b",
            1024,
            2,
            sharding="full_shard",
            activation_checkpointing=True,
            world_size=128,
        ),
    ],
    ids=lambda run: f"{run.preset} {run.resolution}px {run.sharding} {run.lora_rank}",
)
def test_peak_of_a_stage_is_planned_within_ten_percent(run: FakeRun) -> None:
    [report] = run_on_fake_gpu([replace(run, track_memory=True)], timeout=8 * DEADLINE).reports
    assert planned_bytes(run) == pytest.approx(report.peak_bytes["Total"], rel=0.1)


@pytest.mark.slow
@pytest.mark.parametrize(
    "run",
    [
        FakeRun("mmdit-2b", 512, 4, lora_rank=16),
        FakeRun("mmdit-8b", 512, 4, sharding="full_shard", world_size=128, lora_rank=16),
    ],
    ids=lambda run: f"{run.preset} {run.sharding}",
)
def test_an_adapters_states_are_planned_and_its_activations_are_not_underestimated(
    run: FakeRun,
) -> None:
    """The plan of activations is an upper bound of what any adapter of this kind keeps."""
    [report] = run_on_fake_gpu([replace(run, track_memory=True)], timeout=8 * DEADLINE).reports
    peak, (fixed, activations) = report.peak_bytes, planned_parts(run)
    used = peak["Activation"] + peak["Temp"]
    assert peak["Total"] - used == pytest.approx(fixed, rel=0.1)
    assert 0.5 * activations < used < activations
