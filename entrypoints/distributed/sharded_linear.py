"""Linear layers of one row per image whose sharded weights stay where they are.

The layers that modulate a block by timestep and caption hold a third of an MMDiT's weights and take
a thousandth of its arithmetic: for each image they map one vector. FSDP2 would gather their weights
for every block and pass. Here the ranks of a shard group exchange the vectors instead: each rank
computes its rows of the output for the images of all, and sends every rank its part.

For B images of K inputs on each of R ranks, of N outputs in all:

    forward   gather x (B, K) → (R·B, K); multiply by the own rows (N/R, K); all-to-all → (B, N)
    backward  all-to-all of dy (B, N) → (R·B, N/R); dW of the own rows for all images, complete;
              dx (R·B, K) reduce-scattered → (B, K)

With replicas (hybrid_shard) the backward pass also gathers x and dy over them, so dW needs no
all-reduce. All ranks have equally many images, as data parallelism has. The sums are divided by the
world size, as FSDP2 divides.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.nn import functional as F  # noqa: N812  the usual name


class ShardedLinear(nn.Linear):
    """A linear layer whose parameters are DTensors, sharded by rows as FSDP2 does.

    ``shard_group`` and ``replica_group`` name process groups. They are not those of FSDP2, whose
    gathers of whole blocks would delay these small messages.
    """

    shard_group: str
    replica_group: str

    def forward(self, input: Tensor) -> Tensor:
        device = input.device.type
        if torch.is_autocast_enabled(device):
            input = input.to(torch.get_autocast_dtype(device))
        weight, bias = (
            parameter.to_local() if isinstance(parameter, DTensor) else parameter
            for parameter in (self.weight, self.bias)
        )
        output: Tensor = _apply(
            input, weight, bias, self.out_features, self.shard_group, self.replica_group
        )
        return output


def shard_linears(layers: dict[str, nn.Linear], network: nn.Module, mesh: DeviceMesh) -> None:
    """Replace ``layers`` of the network, by name, by :class:`ShardedLinear` on ``mesh``.

    The network is on the meta device. All ranks call this together.
    """
    shard_group, replica_group = _groups(mesh)
    last = mesh.ndim - 1
    placements = [Replicate()] * last + [Shard(0)]
    for name, layer in layers.items():
        parent, _, attribute = name.rpartition(".")
        with torch.device("meta"):
            sharded = ShardedLinear(layer.in_features, layer.out_features)
        sharded.shard_group, sharded.replica_group = shard_group, replica_group
        for kind, parameter in layer.named_parameters():
            rows = _rows(parameter.shape[0], mesh.size(last))[mesh.get_local_rank(last)]
            local = parameter.new_empty(rows, *parameter.shape[1:])
            whole = DTensor.from_local(
                local, mesh, placements, shape=parameter.shape, stride=parameter.stride()
            )
            sharded.register_parameter(kind, nn.Parameter(whole))
        setattr(network.get_submodule(parent), attribute, sharded)


def _groups(mesh: DeviceMesh) -> tuple[str, str]:
    """Return the names of new groups of the ranks that shard, and of those that replicate."""
    # The mesh numbers ranks by rows: the shards of a replica follow each other.
    shards, ranks = mesh.size(mesh.ndim - 1), range(dist.get_world_size())
    names = []
    for groups in (
        [[*ranks[first : first + shards]] for first in ranks[::shards]],
        [[*ranks[shard::shards]] for shard in range(shards)],
    ):
        group, _ = dist.new_subgroups_by_enumeration(groups)  # type: ignore[no-untyped-call]
        names.append(group.group_name)
    return names[0], names[1]


def _rows(count: int, ranks: int) -> list[int]:
    """Return how many of ``count`` rows each rank has, as torch.chunk and FSDP2 divide them."""
    each = -(-count // ranks)
    return [max(0, min(each, count - rank * each)) for rank in range(ranks)]


def _group(name: str) -> dist.ProcessGroup:
    resolve: Any = torch._C._distributed_c10d._resolve_process_group
    group: dist.ProcessGroup = resolve(name)
    return group


@torch.library.custom_op("sm_train::sharded_linear", mutates_args=())
def _apply(
    input: Tensor,
    weight: Tensor,
    bias: Tensor,
    outputs: int,
    shard_group: str,
    replica_group: str,
) -> Tensor:
    """Return the layer's output (B, N) for ``input`` (B, K); one operator for torch.compile."""
    group = _group(shard_group)
    gathered = _gather(input, group)
    own = F.linear(gathered, weight.to(input.dtype), bias.to(input.dtype))
    rows = _rows(outputs, group.size())
    images = len(input)
    received = input.new_empty(images * outputs)
    dist.all_to_all_single(
        received,
        own.reshape(-1),
        [images * count for count in rows],
        [images * own.shape[1]] * group.size(),
        group=group,
    )
    parts = torch.split(received, [images * count for count in rows])
    return torch.cat([part.view(images, -1) for part in parts if len(part)], dim=1)


def _output_shape(
    input: Tensor,
    weight: Tensor,
    bias: Tensor,
    outputs: int,
    shard_group: str,
    replica_group: str,
) -> Tensor:
    return input.new_empty(len(input), outputs)


@torch.library.custom_op("sm_train::sharded_linear_backward", mutates_args=())
def _backward(
    gradient: Tensor, input: Tensor, weight: Tensor, shard_group: str, replica_group: str
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of the input (B, K), of the own rows of the weight, and of the bias."""
    group, replicas = _group(shard_group), _group(replica_group)
    rows, images = _rows(gradient.shape[1], group.size()), len(gradient)
    own = len(weight)
    received = gradient.new_empty(group.size() * images * own)
    dist.all_to_all_single(
        received,
        torch.cat([part.reshape(-1) for part in torch.split(gradient, rows, dim=1)]),
        [images * own] * group.size(),
        [images * count for count in rows],
        group=group,
    )
    of_own_rows = received.view(group.size() * images, own)
    of_inputs = of_own_rows @ weight.to(gradient.dtype)
    input_gradient = torch.empty_like(input)
    dist.reduce_scatter_tensor(input_gradient, of_inputs, group=group)
    inputs = _gather(_gather(input, group), replicas).float()
    outputs = _gather(of_own_rows, replicas).float()
    world_size = group.size() * replicas.size()
    return input_gradient, outputs.T @ inputs / world_size, outputs.sum(0) / world_size


def _gradient_shapes(
    gradient: Tensor, input: Tensor, weight: Tensor, shard_group: str, replica_group: str
) -> tuple[Tensor, Tensor, Tensor]:
    weight_gradient = weight.new_empty(weight.shape, dtype=torch.float32)
    return (
        torch.empty_like(input),
        weight_gradient,
        weight.new_empty(len(weight), dtype=torch.float32),
    )


def _gather(rows: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the rows of all ranks of the group, in their order."""
    gathered = rows.new_empty(group.size() * len(rows), *rows.shape[1:])
    dist.all_gather_into_tensor(gathered, rows.contiguous(), group=group)
    return gathered


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    input, weight, _, _, ctx.shard_group, ctx.replica_group = inputs
    ctx.save_for_backward(input, weight)


def _differentiate(context: Any, gradient: Tensor) -> tuple[Any, ...]:
    input, weight = context.saved_tensors
    gradients = _backward(
        gradient.contiguous(), input, weight, context.shard_group, context.replica_group
    )
    return (*gradients, None, None, None)


_apply.register_fake(_output_shape)
_backward.register_fake(_gradient_shapes)
_apply.register_autograd(_differentiate, setup_context=_setup_context)
