"""Prepares a model for training: checkpoint activations, compile, shard, initialize."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from accelerate import Accelerator
from sm_train.cost.speed_model import ActivationCheckpointing, TextEncoderPlacement
from sm_train.entrypoints.distributed.fsdp import shard
from sm_train.entrypoints.job_interface.job_config import (
    JobConfig,
    JobConfigError,
    Modulation,
    choose_compile,
)
from sm_train.entrypoints.models.builder import ModelComponents
from sm_train.entrypoints.models.components import UNET
from sm_train.entrypoints.models.fp8_layers import use_fp8
from sm_train.entrypoints.planning.memory import plan_job
from sm_train.entrypoints.training.compilation import compile_repeated
from torch import nn
from torch.utils.checkpoint import checkpoint


@dataclass(frozen=True)
class ParallelPlan:
    """How a model is prepared, from the run file and the hardware. Part of the start event."""

    sharding: str
    activation_checkpointing: ActivationCheckpointing
    compile: bool
    channels_last: bool
    text_encoder_bf16: bool
    frozen_weights_bf16: bool
    unsharded_grad_accumulation: bool
    compile_reason: str = "training.compile"
    sharding_reason: str = "stages[].sharding"
    modulation: Modulation = "gathered"
    text_encoders: TextEncoderPlacement = "replicated"
    text_encoders_reason: str = "training.text_encoders"

    @classmethod
    def choose(
        cls,
        config: JobConfig,
        component: str,
        world_size: int,
        local_world_size: int,
        gpu_memory: int | None,
    ) -> ParallelPlan:
        """Return the plan for a network that is saved as ``component``.

        ``gpu_memory`` is the memory of each rank's GPU in bytes, None on a CPU.
        """
        gpu = gpu_memory is not None
        sharding = config.stage.sharding if world_size > 1 else "none"
        memory = plan_job(config, world_size, local_world_size, gpu_memory, torch.__version__)
        compiling = choose_compile(
            config.training.compile,
            gpu=gpu,
            pytorch=torch.__version__,
            shapes_vary=config.data.aspect_buckets,
            adapter=config.model.lora is not None,
        )
        return cls(
            sharding,
            config.stage.activation_checkpointing,
            compiling.compiled,
            # Tensor cores convolve faster with channels innermost. Sharded weights must be
            # contiguous: there convolutions transpose them as needed.
            channels_last=gpu and component == UNET and sharding == "none",
            # Autocast computes in bf16 anyway, and a T5 of 4.7 billion weights takes 9 GB
            # instead of 19.
            text_encoder_bf16=gpu and config.training.bf16,
            # As diffusers' LoRA scripts store them. FSDP2 gathers fp32 shards in bf16.
            frozen_weights_bf16=gpu
            and config.training.bf16
            and config.model.lora is not None
            and sharding == "none",
            unsharded_grad_accumulation=memory.unsharded_gradients,
            modulation=memory.modulation,
            text_encoders=memory.text_encoders.placement,
            text_encoders_reason=memory.text_encoders.reason,
            compile_reason=compiling.reason,
            sharding_reason=config.stage.sharding_reason if world_size > 1 else "one process",
        )


def gpu_memory(device: torch.device) -> int | None:
    """Return a GPU's memory in bytes; None for a CPU."""
    if device.type != "cuda":
        return None
    return int(torch.cuda.get_device_properties(device).total_memory)


def parallelize(
    plan: ParallelPlan,
    config: JobConfig,
    components: ModelComponents,
    accelerator: Accelerator,
    local_world_size: int,
) -> nn.Module:
    """Return the trained module with its initial weights, on the accelerator's device.

    The network is on the meta device before. It is sharded first and its weights are filled in
    after that, so no rank ever holds all weights of a sharded network.
    """
    device, network = accelerator.device, components.network
    module = components.trained_module()
    if plan.activation_checkpointing == "selective":
        checkpoint_every_second(network)
    elif plan.activation_checkpointing:
        network.enable_gradient_checkpointing()
    if config.training.precision == "fp8":
        use_fp8(network, device)
    if plan.compile:
        compile_repeated(network, one_shape=not config.data.aspect_buckets)
    shard(
        module,
        plan.sharding,
        world_size=accelerator.num_processes,
        per_node=local_world_size,
        device=device.type,
        bf16=config.training.bf16,
        reduce_bf16=config.training.reduce_dtype == "bf16",
        gather_modulation=plan.modulation == "gathered",
    )
    components.network_init.materialize(device, config.training.seed)
    module.to(device)
    if plan.frozen_weights_bf16:
        for parameter in module.parameters():
            if not parameter.requires_grad:
                parameter.data = parameter.data.to(torch.bfloat16)
    if plan.channels_last:
        network.to(memory_format=torch.channels_last)
    return module.train()


def checkpoint_every_second(network: Any) -> None:
    """Recompute the activations of every second layer that diffusers can recompute.

    Layers of one class alternate, in the order of the first pass: a U-Net calls its residual blocks
    between other layers.

    Raises:
        JobConfigError: this version of diffusers takes no function for it.
    """
    counts: Counter[type] = Counter()
    recomputed: dict[Any, bool] = {}

    def run(layer: Any, *arguments: Any) -> Any:
        if layer not in recomputed:
            counts[type(layer)] += 1
            recomputed[layer] = counts[type(layer)] % 2 == 1
        if recomputed[layer]:
            return checkpoint(layer.__call__, *arguments, use_reentrant=False)
        return layer(*arguments)

    try:
        network.enable_gradient_checkpointing(run)
    except TypeError:
        raise JobConfigError(
            "activation_checkpointing: selective: needs a newer diffusers than that of this image; "
            "write true or false, or use the newest framework_version"
        ) from None
