"""What a preset needs of a GPU: FLOP an image, and bytes of states and activations.

Without PyTorch, so that a laptop can plan with it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sm_train.entrypoints.unet_plan import plan_unet

PRESETS = Path(__file__).parent / "presets"

_FP32 = 4
_STATES = {"weights": _FP32, "gradients": _FP32, "adamw": 2 * _FP32, "ema": _FP32}


@dataclass(frozen=True)
class ModelPlan:
    """A preset at one resolution. Bytes are of one GPU under DDP, which splits nothing."""

    parameters: int
    training_flops_per_image: int
    state_bytes: int
    activation_bytes_per_image: int


def plan_preset(name: str, resolution: int, *, precision: str, ema: bool) -> ModelPlan:
    """The plan of the preset called ``name`` for images of ``resolution`` pixels.

    States are in fp32: weights, gradients, both moments of AdamW and, with ``ema``, the average;
    bf16 autocast adds a copy of the weights. The frozen parts are not counted.

    Raises:
        UnplannedModelError: the preset's network is not one that is counted.
    """
    preset = json.loads((PRESETS / f"{name}.json").read_text(encoding="utf-8"))
    unet = plan_unet(preset["unet"], resolution // _downsampling(preset))
    bytes_each = sum(size for state, size in _STATES.items() if ema or state != "ema")
    if precision == "bf16":
        bytes_each += 2
    return ModelPlan(
        parameters=unet.parameters,
        training_flops_per_image=unet.training_flops,
        state_bytes=bytes_each * unet.parameters,
        activation_bytes_per_image=unet.activation_bytes(precision),
    )


def _downsampling(preset: Mapping[str, Any]) -> int:
    """Pixels of an image's side for one of the network's input: 1 without an autoencoder."""
    vae = preset.get("vae")
    return 1 if vae is None else int(2 ** (len(vae["block_out_channels"]) - 1))
