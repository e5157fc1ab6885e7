"""FLOP, parameters and kept activations are those that PyTorch counts on the real network."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from diffusers import UNet2DConditionModel
from sm_train.entrypoints.memory_plan import PRESETS, plan_preset
from sm_train.entrypoints.unet_plan import UnplannedModelError, plan_unet
from torch.utils.flop_counter import FlopCounterMode


def unet_config(preset: str) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((PRESETS / f"{preset}.json").read_text())["unet"]
    return config


def counted(config: dict[str, Any], side: int) -> tuple[int, int, int]:
    """Parameters, forward FLOP, and elements that autograd keeps, attention's scores left out.

    A GPU's fused attention never keeps the scores, the meta device's does.
    """
    kept: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept.setdefault(tensor.untyped_storage()._cdata, tensor)
        return tensor

    with torch.device("meta"):
        unet = UNet2DConditionModel(**config).train()
        image = torch.empty(1, config["in_channels"], side, side)
        caption = torch.empty(1, 77, config["cross_attention_dim"])
        with (
            FlopCounterMode(display=False) as flops,
            torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor),
        ):
            unet(image, torch.zeros(1), caption)
    weights = {weight.untyped_storage()._cdata for weight in unet.parameters()}
    areas = {(side >> level) ** 2 for level in range(len(config["block_out_channels"]))}

    def is_scores(shape: torch.Size) -> bool:
        # (batch ·) heads × queries × keys; an image of as many pixels has more channels than heads.
        heads = shape[-3] if len(shape) in (3, 4) else 32
        return heads < 32 and shape[-2] in areas and shape[-1] in (shape[-2], 77)

    elements = sum(
        tensor.untyped_storage().nbytes() // tensor.element_size()
        for storage, tensor in kept.items()
        if storage not in weights and not is_scores(tensor.shape)
    )
    return sum(weight.numel() for weight in unet.parameters()), flops.get_total_flops(), elements


@pytest.mark.parametrize(
    ("preset", "side", "tolerance"), [("sd2", 32, 0.03), ("sd2", 64, 0.02), ("digits", 16, 0.1)]
)
def test_the_plan_is_what_pytorch_counts(preset: str, side: int, tolerance: float) -> None:
    config = unet_config(preset)
    parameters, forward, kept = counted(config, side)
    plan = plan_unet(config, side)
    assert plan.parameters == parameters
    assert 2 * plan.multiply_adds == forward
    # Small tensors that are shared or split otherwise; least where images are large.
    assert plan.kept + plan.kept_by_norms == pytest.approx(kept, rel=tolerance)


@pytest.mark.parametrize(("resolution", "tflop"), [(256, 0.543), (512, 2.413), (1024, 14.03)])
def test_sd2_costs_its_published_flop(resolution: int, tflop: float) -> None:
    plan = plan_preset("sd2", resolution, precision="bf16", ema=True)
    assert plan.training_flops_per_image / 1e12 == pytest.approx(tflop, rel=0.01)
    assert plan.parameters == 865_910_724
    # Weights, gradients, two moments and the average in fp32, and a copy of the weights in bf16.
    assert plan.state_bytes == 22 * 865_910_724


def test_what_is_not_counted_is_refused_by_name() -> None:
    with pytest.raises(UnplannedModelError, match="addition_embed_type"):
        plan_unet(unet_config("sd2") | {"addition_embed_type": "text_time"}, 64)
    with pytest.raises(UnplannedModelError, match="AttnDownBlock2D"):
        plan_unet(unet_config("sd2") | {"down_block_types": ["AttnDownBlock2D"] * 4}, 64)
