"""Puts a model where it learns: split, filled, checkpointed, compiled, as the run file says."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from accelerate import Accelerator
from sm_train.entrypoints.common.job_config import JobConfig
from sm_train.entrypoints.distributed.fsdp import blocks, shard
from sm_train.entrypoints.models.builder import ModelComponents
from sm_train.entrypoints.models.network import UNET
from sm_train.entrypoints.planning.gradient_memory import keeps_whole_gradients
from torch import nn


@dataclass(frozen=True)
class ParallelPlan:
    """What is done to a model, chosen by the run file and by what is there."""

    sharding: str
    activation_checkpointing: bool
    compile: bool
    channels_last: bool
    text_encoder_bf16: bool
    unsharded_grad_accumulation: bool

    @classmethod
    def choose(
        cls, settings: JobConfig, part: str, processes: int, per_node: int, gpu_memory: int | None
    ) -> ParallelPlan:
        """For a network that is saved as ``part``, trained by ``processes``.

        ``per_node`` of them share a machine. ``gpu_memory`` are the bytes of each one's GPU, None
        where it has none.
        """
        gpu = gpu_memory is not None
        sharding = settings.stage.sharding if processes > 1 else "none"
        return cls(
            sharding,
            settings.stage.activation_checkpointing,
            settings.training.compile,
            # Tensor cores convolve faster with channels innermost. Split weights must be
            # contiguous: there convolutions turn them as they need.
            channels_last=gpu and part == UNET and sharding == "none",
            # Autocast computes so anyway; a T5 of 4.7 billion weights takes 9 GB instead of 19.
            text_encoder_bf16=gpu and settings.training.precision == "bf16",
            unsharded_grad_accumulation=keeps_whole_gradients(
                settings, processes, per_node, gpu_memory
            ),
        )


def gpu_memory(device: torch.device) -> int | None:
    """Bytes of a GPU; None of a CPU."""
    if device.type != "cuda":
        return None
    return int(torch.cuda.get_device_properties(device).total_memory)


def parallelize(
    placing: ParallelPlan,
    settings: JobConfig,
    parts: ModelComponents,
    accelerator: Accelerator,
    per_node: int,
) -> nn.Module:
    """What is trained, with its first weights, on the accelerator's device.

    ``per_node`` processes share a machine. The network has no memory before it is split.
    """
    device, network = accelerator.device, parts.network
    module = parts.trained()
    if placing.activation_checkpointing:
        network.enable_gradient_checkpointing()
    if placing.compile:
        for block in blocks(network):
            # Block by block, so that gradients are summed while the backward pass goes on.
            block.compile()
    shard(
        module,
        placing.sharding,
        world_size=accelerator.num_processes,
        per_node=per_node,
        device=device.type,
        bf16=settings.training.precision == "bf16",
    )
    parts.built.fill(device, settings.training.seed)
    module.to(device)
    if placing.channels_last:
        network.to(memory_format=torch.channels_last)
    return module.train()


def move_frozen(placing: ParallelPlan, parts: ModelComponents, device: torch.device) -> None:
    """What does not learn."""
    for module in parts.frozen():
        module.to(device)
        if placing.text_encoder_bf16 and module is not parts.vae:
            module.to(torch.bfloat16)
