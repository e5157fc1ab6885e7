"""Plans of states and activations, and published figures that they reproduce."""

from __future__ import annotations

from itertools import pairwise

import pytest
from sm_train.entrypoints.planning.memory import plan_preset

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
    assert states.adamw == 2 * states.weights
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
    # Two inputs of 2 bytes, a convolution's output, and the next norm's input and output in fp32.
    assert per_image == plan.encoding_bytes == pytest.approx(14 * 128 * 1024**2, rel=1e-6)
    # Two images of a million pixels are encoded together, and no more.
    planned = [plan.activation_bytes(images, checkpointing=True) for images in (1, 2, 3, 100)]
    assert planned[0] == per_image
    assert planned[1] == planned[2] == 2 * per_image
    assert planned[3] > 2 * per_image
    on_pixels = plan_preset("digits", 16, precision="fp32")
    assert on_pixels.activation_bytes(6) == 6 * on_pixels.activation_bytes(1)
