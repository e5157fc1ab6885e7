"""The layers that a LoRA adapter extends and the weights that it adds, without PyTorch.

A layer's name is its path inside the innermost block, such as ``attn1.to_q``, or its whole path if
it is in no block. A target is such a name or its last parts, as in PEFT: ``to_q``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from sm_train.entrypoints.job_interface.job_config import JobConfigError, LoraConfig

LORA_FILE = "pytorch_lora_weights.safetensors"
"""The file that diffusers' ``load_lora_weights`` looks for in a folder."""

PEFT_FILE, PEFT_CONFIG = "adapter_model.safetensors", "adapter_config.json"
"""The files that PEFT's ``PeftModel.from_pretrained`` looks for in a folder."""

TRAINS_TEXT_ENCODER = (
    "the preset trains its text encoder from random weights, which an adapter cannot; use a preset "
    "with a pretrained text encoder"
)
"""Why a preset with ``train_text_encoder`` takes no adapter, with the fix."""

_ATTENTION = ("to_q", "to_k", "to_v", "to_out.0")

DEFAULT_TARGETS = {
    "UNet2DConditionModel": _ATTENTION,
    "PixArtTransformer2DModel": _ATTENTION,
    # Both streams, image and text, as in diffusers' train_dreambooth_lora_sd3.py (read 2026-11).
    "SD3Transformer2DModel": (
        *_ATTENTION,
        "add_q_proj",
        "add_k_proj",
        "add_v_proj",
        "to_add_out",
    ),
}
"""Layers that are extended unless the run file names others, by network class."""

_IN_BLOCK = re.compile(
    r".*\b(?:transformer_blocks|attentions|resnets|downsamplers|upsamplers)\.\d+\."
)

LayerSizes = Mapping[str, Sequence[Sequence[int]]]
"""Name of a layer → inputs and outputs of one weight row and column, and how many layers have
them. A convolution's inputs include its kernel."""


def layer_name(path: str) -> str:
    """Return the name of the layer at ``path`` in a network."""
    return _IN_BLOCK.sub("", path)


def is_targeted(name: str, targets: Iterable[str]) -> bool:
    """Return whether one of ``targets`` is the layer ``name`` or its last parts."""
    return any(name == target or name.endswith(f".{target}") for target in targets)


def targets_of(lora: LoraConfig, class_name: str) -> tuple[str, ...]:
    """Return the adapter's targets in a network of diffusers' ``class_name``."""
    return DEFAULT_TARGETS[class_name] if lora.targets is None else lora.targets


def require_targets(lora: LoraConfig, class_name: str, layers: Iterable[str]) -> None:
    """Check that each target is among the network's ``layers``.

    Raises:
        JobConfigError: one is not.
    """
    names = sorted(set(layers))
    for target in targets_of(lora, class_name):
        if not any(is_targeted(name, [target]) for name in names):
            raise JobConfigError(
                f"model.lora.targets: {target!r} is no layer of {class_name}; it has "
                f"{', '.join(names)}"
            )


def adapter_shapes(
    lora: LoraConfig, class_name: str, layers: LayerSizes
) -> list[tuple[tuple[int, int], int]]:
    """Return the shape of each weight that the adapter adds, and how many have it.

    Raises:
        JobConfigError: a target is no layer of the network.
    """
    require_targets(lora, class_name, layers)
    targets = targets_of(lora, class_name)
    shapes: list[tuple[tuple[int, int], int]] = []
    for name, sizes in layers.items():
        if is_targeted(name, targets):
            for inputs, outputs, count in sizes:
                shapes += [((lora.rank, inputs), count), ((outputs, lora.rank), count)]
    return shapes
