"""Which layers of a network compute in fp8, and what converts them."""

from __future__ import annotations

import torch
from sm_train.entrypoints.distributed.fsdp import blocks, modulation_layers
from sm_train.entrypoints.job_interface.job_config import JobConfigError
from torch import nn

FP8_MULTIPLE = 16
"""Sizes of a matrix product in fp8 are multiples of 16 (cuBLAS documentation, 8-bit floating point
data types)."""

_CAPABILITY = (8, 9)
"""The first compute capability whose matrix products take fp8 (CUDA C++ programming guide)."""


def use_fp8(network: nn.Module, device: torch.device) -> None:
    """Let :func:`fp8_layers` compute in fp8; weights, names and shapes stay.

    Each product scales its factors by their largest numbers (torchao's dynamic scaling of whole
    tensors), so there is no state to save. On a CPU torchao emulates it in higher precision.

    Raises:
        JobConfigError: the GPU has no fp8, torchao is not installed, or no layer can use it.
    """
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < _CAPABILITY:
        name = torch.cuda.get_device_name(device)
        raise JobConfigError(f"training.precision: fp8: {name} has no fp8; write bf16")
    layers = {*fp8_layers(network).values()}
    if not layers:
        raise JobConfigError(
            "training.precision: fp8: no layer of the network can use it; write bf16"
        )
    try:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    except ImportError:
        raise JobConfigError(
            "training.precision: fp8: needs torchao, which this image lacks; write bf16"
        ) from None
    convert_to_float8_training(
        network,
        config=Float8LinearConfig(emulate=device.type != "cuda"),
        module_filter_fn=lambda module, _: module in layers,
    )


def fp8_layers(network: nn.Module) -> dict[str, nn.Linear]:
    """Return the linear layers of the network's blocks that compute in fp8, by name.

    Left out are layers outside of blocks, which map from and to other spaces, layers with one row
    for each image (modulation, time embeddings), whose products are too small to gain, and sizes
    that no fp8 kernel takes.
    """
    per_image = {*modulation_layers(network).values()}
    in_blocks = {layer for block in blocks(network) for layer in block.modules()}
    return {
        name: layer
        for name, layer in network.named_modules()
        if type(layer) is nn.Linear
        and layer in in_blocks
        and layer not in per_image
        and not name.endswith("time_emb_proj")
        and layer.in_features % FP8_MULTIPLE == 0
        and layer.out_features % FP8_MULTIPLE == 0
    }
