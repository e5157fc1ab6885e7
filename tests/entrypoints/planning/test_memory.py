"""Plans of states and activations, and published figures that they reproduce."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from sm_train.entrypoints.job_interface.job_config import OptimizerConfig
from sm_train.entrypoints.models.components import read_preset
from sm_train.entrypoints.models.trained_network import Network
from sm_train.entrypoints.planning.memory import plan_preset
from sm_train.entrypoints.training.optimizers import build_optimizers

GIB = 2**30


@pytest.mark.parametrize(("resolution", "tflop"), [(256, 0.543), (512, 2.413), (1024, 14.03)])
def test_sd2_has_its_published_flops(resolution: int, tflop: float) -> None:
    plan = plan_preset("sd2", resolution, precision="bf16")
    assert plan.training_flops_per_image / 1e12 == pytest.approx(tflop, rel=0.01)
    assert plan.parameters == 865_910_724


@pytest.mark.parametrize(
    ("preset", "strategy", "world_size", "weights", "fits_80_gb"),
    [
        ("sd2", "none", 32, 3.2, True),
        ("mmdit-8b", "none", 32, 30.0, False),
        ("mmdit-8b", "full_shard", 32, 0.9, True),
        ("mmdit-20b", "none", 128, 72.6, False),
        ("mmdit-20b", "shard_grad_op", 128, 0.6, True),
        ("mmdit-20b", "full_shard", 128, 0.6, True),
        ("mmdit-20b", "hybrid_shard", 128, 9.1, True),
    ],
)
def test_states_by_sharding_strategy(
    preset: str, strategy: str, world_size: int, weights: float, *, fits_80_gb: bool
) -> None:
    plan = plan_preset(preset, 256, precision="bf16")
    states = plan.state_bytes(ema=True, strategy=strategy, world_size=world_size, per_node=8)
    assert states.weights / GIB == pytest.approx(weights, abs=0.1)
    assert states.optimizer == 2 * states.weights
    assert (states.total < 80 * GIB) == fits_80_gb
    without = plan.state_bytes(ema=False, strategy=strategy, world_size=world_size, per_node=8)
    assert states.total - without.total == states.ema == states.weights


def test_full_shard_gathers_two_neighboring_blocks_and_one_blocks_gradients() -> None:
    plan = plan_preset("sd2", 256, precision="bf16")
    blocks = plan.fsdp_block_parameters
    assert sum(blocks) < plan.parameters
    pair = max(first + second for first, second in pairwise(blocks))
    states = plan.state_bytes(ema=True, strategy="full_shard", world_size=8, per_node=8)
    assert states.gathered == 2 * pair + (2 + 4) * max(blocks)


def test_activations_are_at_least_those_of_encoding() -> None:
    plan = plan_preset("sd2", 1024, precision="bf16")
    per_image = plan.activation_bytes(2, checkpointing=True) // 2
    # A norm's input and output, a convolution's output, and its two inputs, all in fp32.
    assert per_image == plan.encoding_bytes == pytest.approx(20 * 128 * 1024**2, rel=1e-6)
    in_bf16 = plan_preset("sd2", 1024, precision="bf16", vae_precision="bf16")
    assert in_bf16.encoding_bytes == pytest.approx(14 * 128 * 1024**2, rel=1e-6)
    # Two images of a million pixels are encoded together, and no more.
    planned = [plan.activation_bytes(images, checkpointing=True) for images in (1, 2, 3, 100)]
    assert planned[0] == per_image
    assert planned[1] == planned[2] == 2 * per_image
    assert planned[3] > 2 * per_image
    on_pixels = plan_preset("digits", 16, precision="fp32")
    assert on_pixels.activation_bytes(6) == 6 * on_pixels.activation_bytes(1)


def test_optimizer_state_is_that_of_the_optimizer() -> None:
    plan = plan_preset("dit-xl", 512, precision="bf16")
    sizes = {
        name: plan.state_bytes(ema=True, optimizer=name).optimizer / plan.parameters
        for name in ("adamw", "adamw8bit", "adafactor", "muon", "own:Optimizer")
    }
    assert sizes["adamw"] == sizes["own:Optimizer"] == 8
    # A byte for each moment, and a scale of 4 bytes for each 256 numbers.
    assert sizes["adamw8bit"] == pytest.approx(2 * (1 + 4 / 256), rel=0.01)
    assert sizes["adafactor"] < 0.01
    # Nearly all weights of a transformer are matrices of its blocks.
    assert sizes["muon"] == pytest.approx(4, rel=0.05)
    with_adafactor = plan.checkpoint_bytes(ema=True, optimizer="adafactor")
    assert with_adafactor == pytest.approx(8 * plan.parameters, rel=0.01)


@pytest.mark.parametrize("optimizer", ["adamw", "adafactor", "muon"])
def test_planned_optimizer_state_equals_the_real_one(optimizer: str) -> None:
    weights = {
        name: torch.zeros(parameter.shape, requires_grad=True)
        for name, parameter in Network(
            read_preset("tiny-mmdit")["network"], None, 4
        ).module.named_parameters()
    }
    settings = OptimizerConfig(optimizer, None, None, 0.01, None, {})
    optimizers = build_optimizers(settings, weights, 1e-3, sharded=False)
    for weight in weights.values():
        weight.grad = torch.zeros_like(weight)
    for built in optimizers:
        built.step()
    kept = sum(
        value.numel() * 4
        for built in optimizers
        for state in built.state.values()
        for value in state.values()
        if value.dim()
    )
    plan = plan_preset("tiny-mmdit", 32, precision="fp32")
    assert plan.state_bytes(ema=True, optimizer=optimizer).optimizer == kept


@pytest.mark.parametrize(
    ("precision", "vae_precision", "factor"),
    [("bf16", "bf16", 1), ("bf16", "fp32", 2), ("tf32", "fp32", 1), ("fp32", "fp32", 1)],
)
def test_encoders_take_what_pytorch_counts(precision: str, vae_precision: str, factor: int) -> None:
    """Stable Diffusion 2 at 512 px: an independent count (benchmarks/data/speeds.csv)."""
    plan = plan_preset("sd2", 512, precision=precision, vae_precision=vae_precision)
    text = 45_127_233_536
    expected = 1.162e12 - text
    assert plan.encoder_flops_per_image - text == pytest.approx(factor * expected, rel=1e-3)
