"""Puts a model where it learns: split, filled, checkpointed, compiled, as the run file says."""

from __future__ import annotations

import torch
from accelerate import Accelerator
from sm_train.entrypoints.models import Parts
from sm_train.entrypoints.networks import UNET
from sm_train.entrypoints.parallel import blocks, shard
from sm_train.entrypoints.settings import Settings
from torch import nn


def place(settings: Settings, parts: Parts, accelerator: Accelerator, per_node: int) -> nn.Module:
    """What is trained, with its first weights, on the accelerator's device.

    ``per_node`` processes share a machine. The network has no memory before it is split.
    """
    device, network = accelerator.device, parts.network
    stage, training = settings.stage, settings.training
    module = parts.trained()
    strategy = stage.sharding if accelerator.num_processes > 1 else "none"
    if stage.activation_checkpointing:
        network.enable_gradient_checkpointing()
    if training.compile:
        for block in blocks(network):
            # Block by block, so that gradients are summed while the backward pass goes on.
            block.compile()
    shard(
        module,
        strategy,
        world_size=accelerator.num_processes,
        per_node=per_node,
        device=device.type,
        bf16=training.precision == "bf16",
    )
    parts.built.fill(device, training.seed)
    module.to(device)
    if parts.built.part == UNET and device.type == "cuda" and strategy == "none":
        # Tensor cores convolve faster with channels innermost.
        # Split weights must be contiguous; their convolutions turn them as they need.
        network.to(memory_format=torch.channels_last)
    return module.train()


def place_frozen(settings: Settings, parts: Parts, device: torch.device) -> None:
    """What does not learn; text encoders in half precision where autocast computes so anyway.

    A T5 of 4.7 billion weights takes 9 GB of every GPU instead of 19.
    """
    half = device.type == "cuda" and settings.training.precision == "bf16"
    for module in parts.frozen():
        module.to(device)
        if half and module is not parts.vae:
            module.to(torch.bfloat16)
