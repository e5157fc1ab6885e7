"""Data parallelism: replicate a model by DDP, or shard it by FSDP2.

Accelerate wraps with DDP. It rejects FSDP2 on a CPU, so PyTorch's ``fully_shard`` is called here
directly: the same code runs on GPUs and in tests.

======================  ===========================================================
``none``                every process holds everything
``shard_grad_op``       gradients, AdamW and EMA are sharded; weights between steps too
``full_shard``          in addition, weights are gathered layer by layer, twice a pass
``hybrid_shard``        as ``full_shard`` within a node; nodes replicate each other
======================  ===========================================================
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedDataParallelKwargs
from sm_train.entrypoints.distributed.local_shard import full_tensor
from sm_train.entrypoints.job_interface.job_config import JobConfigError
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

BLOCKS = (
    "BasicTransformerBlock",  # of PixArt
    "JointTransformerBlock",  # of Stable Diffusion 3
    "DownBlock2D",
    "CrossAttnDownBlock2D",
    "UpBlock2D",
    "CrossAttnUpBlock2D",
    "UNetMidBlock2DCrossAttn",
)
"""Class names in diffusers of the blocks that are each gathered as one unit."""

_MODULATION = ("AdaLayerNorm", "SD35AdaLayerNorm")
"""Prefixes of diffusers' classes whose ``linear`` modulates the tokens of a block."""

TEXT_BLOCKS = ("T5Block", "CLIPEncoderLayer")
"""The same in transformers, of frozen text encoders."""


def ddp_options() -> DistributedDataParallelKwargs:
    """Return DDP's options: each step runs one graph with all trained parameters."""
    return DistributedDataParallelKwargs(gradient_as_bucket_view=True, static_graph=True)


def shard(
    module: nn.Module,
    strategy: str,
    *,
    world_size: int,
    per_node: int,
    device: str,
    bf16: bool,
    reduce_bf16: bool,
    gather_modulation: bool = True,
) -> None:
    """Shard the children of ``module`` over all processes, in place; ``none`` does nothing.

    With ``bf16`` weights are gathered in that precision, with ``reduce_bf16`` gradients are summed
    in it, otherwise in fp32. Without ``gather_modulation`` the layers that modulate blocks exchange
    vectors instead of weights (:mod:`sharded_linear`); it needs PyTorch 2.7.
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
        reduce_dtype=torch.bfloat16 if reduce_bf16 else torch.float32,
        # Autocast casts in each layer. Casting all inputs here would round timesteps to bf16.
        cast_forward_inputs=False,
    )
    options: dict[str, Any] = {
        "mesh": mesh,
        "mp_policy": precision,
        "reshard_after_forward": strategy != "shard_grad_op",
    }
    if not gather_modulation:
        from sm_train.entrypoints.distributed.sharded_linear import shard_linears

        shard_linears(modulation_layers(module), module, mesh)
        options["ignored_params"] = {
            parameter
            for layer in modulation_layers(module).values()
            for parameter in layer.parameters()
        }
    # Blocks before their parent: fully_shard takes the parameters that are not yet in a group.
    for child in module.children():
        units = in_order_of_execution(blocks(child))
        for block in units:
            fully_shard(block, **options)
        fully_shard(child, **options)
        _prefetch([child, *units])


def _prefetch(units: Sequence[Any]) -> None:
    """Let each unit start the gather of the next one before its own arithmetic, in both passes.

    FSDP2 itself starts it when the CPU reaches the next unit, which is late if the CPU is busy.
    """
    for unit, following in pairwise(units):
        unit.set_modules_to_forward_prefetch([following])
        following.set_modules_to_backward_prefetch([unit])


def modulation_layers(module: nn.Module) -> dict[str, nn.Linear]:
    """Return the linear layers, by name, that modulate blocks by the timestep and the caption.

    They map one vector of each image, not its tokens.
    """
    in_blocks = {layer for block in blocks(module) for layer in block.modules()}
    return {
        f"{name}.linear": parent.linear
        for name, parent in module.named_modules()
        if type(parent).__name__.startswith(_MODULATION) and parent in in_blocks
    }


def in_order_of_execution(units: Sequence[nn.Module]) -> list[nn.Module]:
    """Sort blocks: a U-Net defines its middle after the way up."""
    return sorted(units, key=lambda unit: ("Mid" in type(unit).__name__) + 2 * _is_up(unit))


def _is_up(unit: nn.Module) -> bool:
    return "UpBlock" in type(unit).__name__


def shard_frozen(module: nn.Module, *, world_size: int, per_node: int, device: str) -> None:
    """Shard the blocks and embeddings of a frozen ``module`` over the processes of each node.

    Each pass gathers them one after the other, over the links inside the node. ``module`` itself is
    no unit, so its few other weights stay whole: FSDP2 would change its class, by whose name
    transformers 5 looks up which outputs it returns.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    ranks = min(per_node, world_size)
    names = ("replicate", "shard")
    mesh = init_device_mesh(device, (world_size // ranks, ranks), mesh_dim_names=names)["shard"]
    layers = blocks(module, TEXT_BLOCKS)
    in_layers = {child for layer in layers for child in layer.modules()}
    tables = [child for child in module.modules() if isinstance(child, nn.Embedding)]
    for unit in (*layers, *(table for table in tables if table not in in_layers)):
        # One at a time: a GPU never holds all of them.
        fully_shard(unit.to(device), mesh=mesh, reshard_after_forward=True)


def blocks(module: nn.Module, names: Sequence[str] = BLOCKS) -> list[nn.Module]:
    """Return the outermost blocks in ``module``; those of a U-Net contain inner ones.

    ``names`` are their class names.
    """
    if type(module).__name__ in names:
        return [module]
    return [block for child in module.children() for block in blocks(child, names)]


def mesh_shape(
    strategy: str, world_size: int, per_node: int
) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Return the sizes and names of the device mesh's dimensions; the last one is sharded."""
    if strategy == "hybrid_shard" and world_size > per_node:
        return (world_size // per_node, per_node), ("replicate", "shard")
    return (world_size,), ("shard",)


def wrap(module: nn.Module, accelerator: Accelerator, *, reduce_bf16: bool) -> nn.Module:
    """Return ``module`` for training: wrapped by DDP unless it is sharded.

    With ``reduce_bf16`` DDP sums gradients in bf16; weights and AdamW receive fp32 gradients.
    """
    if is_sharded(module):
        return module
    wrapped: nn.Module = accelerator.prepare_model(module)
    if isinstance(wrapped, DistributedDataParallel):
        # Buffers are constants that all ranks compute. DDP would broadcast them before every pass:
        # 226 MB of position embeddings for mmdit-2b.
        wrapped.broadcast_buffers = False
        if reduce_bf16:
            # DDP accepts the hook itself on GPUs only.
            wrapped.register_comm_hook(
                None, lambda state, bucket: default_hooks.bf16_compress_hook(state, bucket)
            )
    return wrapped


def sharded_modules(module: nn.Module) -> list[nn.Module]:
    """Return the submodules that FSDP gathers as units, each before those inside it."""
    return [
        submodule
        for submodule in module.modules()
        if hasattr(submodule, "set_requires_gradient_sync")
    ]


def exchanging_layers(module: nn.Module) -> list[nn.Module]:
    """Return the layers whose forward pass exchanges vectors (:mod:`sharded_linear`)."""
    return [layer for layer in module.modules() if hasattr(layer, "shard_group")]


def is_sharded(module: nn.Module) -> bool:
    return any(hasattr(child, "set_requires_gradient_sync") for child in module.children())


@contextlib.contextmanager
def no_sync(
    model: nn.Module, accelerator: Accelerator, *, unsharded_grads: bool, unsharded_weights: bool
) -> Iterator[None]:
    """Skip the sum of gradients over processes for the backward passes inside.

    The first backward pass outside sums what has accumulated. For a sharded model,
    ``unsharded_grads`` keeps full gradients on every process until then; without it, each pass
    reduce-scatters within the shard group and only the sum over replicas is deferred, which needs
    less memory. ``unsharded_weights`` keeps gathered weights until then, too.
    """
    if not is_sharded(model):
        with accelerator.no_sync(model):
            yield
        return
    children: list[Any] = list(model.children())

    def set_last_backward(last: bool) -> None:
        for child in children:
            if unsharded_grads:
                child.set_requires_gradient_sync(last)
            else:
                child.set_requires_all_reduce(last)
            if unsharded_weights:
                child.set_reshard_after_backward(last)

    set_last_backward(False)
    try:
        yield
    finally:
        set_last_backward(True)


def gradient_norm(parameters: Sequence[Tensor]) -> Tensor:
    """Return the norm of all gradients, over all processes if they are sharded; a scalar."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    return full_tensor(torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients))))
