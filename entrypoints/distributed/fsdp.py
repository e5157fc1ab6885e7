"""How a model is spread over processes: replicated by DDP, or split by FSDP2.

Accelerate wraps with DDP. It refuses FSDP2 on a CPU, so PyTorch's own ``fully_shard`` is called
here: one piece of code for GPUs and for tests.

======================  ===========================================================
``none``                every process has everything
``shard_grad_op``       gradients, AdamW and average are split; weights between steps too
``full_shard``          as that, and weights are gathered layer by layer, twice a pass
``hybrid_shard``        as that within a machine; machines replicate each other
======================  ===========================================================
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from accelerate import Accelerator
from sm_train.entrypoints.common.job_config import JobConfigError
from sm_train.entrypoints.distributed.local_shard import full_tensor
from torch import Tensor, nn

BLOCKS = (
    "BasicTransformerBlock",  # of PixArt
    "JointTransformerBlock",  # of Stable Diffusion 3
    "DownBlock2D",
    "CrossAttnDownBlock2D",
    "UpBlock2D",
    "CrossAttnUpBlock2D",
    "UNetMidBlock2DCrossAttn",
)
"""Diffusers' classes whose weights are gathered together."""


def shard(
    module: nn.Module, strategy: str, *, world_size: int, per_node: int, device: str, bf16: bool
) -> None:
    """Split the children of ``module`` among all processes, in place; ``none`` does nothing.

    In bf16 weights are gathered in that precision, and gradients are still summed in fp32.
    """
    if strategy == "none":
        return
    try:
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    except ImportError:
        raise JobConfigError(
            f"sharding: {strategy}: FSDP2 needs PyTorch 2.6, this is {torch.__version__}"
        ) from None
    from torch.distributed.device_mesh import init_device_mesh

    shape, names = mesh_shape(strategy, world_size, per_node)
    mesh = init_device_mesh(device, shape, mesh_dim_names=names)
    precision = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16 if bf16 else None,
        reduce_dtype=torch.float32,
        # Autocast decides for each layer; a timestep in bf16 would be another one.
        cast_forward_inputs=False,
    )
    options: dict[str, Any] = {
        "mesh": mesh,
        "mp_policy": precision,
        "reshard_after_forward": strategy != "shard_grad_op",
    }
    for child in module.children():
        for block in blocks(child):
            fully_shard(block, **options)
        fully_shard(child, **options)


def blocks(module: nn.Module) -> list[nn.Module]:
    """The outermost of :data:`BLOCKS` in ``module``: a U-Net's hold some of PixArt's class."""
    if type(module).__name__ in BLOCKS:
        return [module]
    return [block for child in module.children() for block in blocks(child)]


def mesh_shape(
    strategy: str, world_size: int, per_node: int
) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Processes along each dimension of the mesh; the last one is split along."""
    if strategy == "hybrid_shard" and world_size > per_node:
        return (world_size // per_node, per_node), ("replicate", "shard")
    return (world_size,), ("shard",)


def wrap(module: nn.Module, accelerator: Accelerator) -> nn.Module:
    """``module`` as it is called in training: with DDP around it unless it is split."""
    if is_sharded(module):
        return module
    wrapped: nn.Module = accelerator.prepare_model(module)
    return wrapped


def is_sharded(module: nn.Module) -> bool:
    return any(hasattr(one, "set_requires_gradient_sync") for one in module.children())


@contextlib.contextmanager
def no_sync(
    model: nn.Module, accelerator: Accelerator, *, whole_gradients: bool, whole_weights: bool
) -> Iterator[None]:
    """Backward passes inside keep to themselves what the last one sums over processes.

    Where weights are split and ``whole_gradients`` would take too much of the memory that this
    saves, they are summed within the split every time, and only over its replicas with the last.
    With ``whole_weights`` those that were gathered stay so until the last.
    """
    if not is_sharded(model):
        with accelerator.no_sync(model):
            yield
        return
    children: list[Any] = list(model.children())

    def switch(*, last: bool) -> None:
        for child in children:
            if whole_gradients:
                child.set_requires_gradient_sync(last)
            else:
                child.set_requires_all_reduce(last)
            if whole_weights:
                child.set_reshard_after_backward(last)

    switch(last=False)
    try:
        yield
    finally:
        switch(last=True)


def gradient_norm(parameters: Sequence[Tensor]) -> Tensor:
    """The norm of all gradients, over all processes where they are split; a scalar."""
    gradients = [one.grad for one in parameters if one.grad is not None]
    return full_tensor(torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients))))
