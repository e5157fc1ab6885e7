"""The part of a tensor that this process holds; the tensor may be sharded along its rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


@dataclass(frozen=True)
class LocalShard:
    """Rows of a tensor from ``start`` on, sharing its memory.

    ``num_replicas`` processes hold these rows; this one has the replica ``replica_index``. Its rank
    in ``replica_group`` is that index; None is the group of all processes. The rows are shard
    ``shard_index`` of ``num_shards``.
    """

    tensor: Tensor
    start: int
    num_replicas: int
    replica_index: int
    replica_group: ProcessGroup | None = None
    shard_index: int = 0
    num_shards: int = 1

    @property
    def rows(self) -> Any:
        """Index that selects this shard from the full tensor."""
        if not self.tensor.dim():
            return ...
        return slice(self.start, self.start + self.tensor.shape[0])

    def broadcast(self, source: int) -> None:
        """Overwrite every replica with that of index ``source``; a collective of the replicas."""
        import torch.distributed as dist

        group = self.replica_group or dist.group.WORLD
        assert group is not None
        # Weights in channels-last order are not contiguous, which not every backend accepts.
        contiguous = self.tensor.contiguous()
        dist.broadcast(contiguous, dist.get_global_rank(group, source), group=group)
        if contiguous is not self.tensor:
            self.tensor.copy_(contiguous)


def local_shard(tensor: Tensor) -> LocalShard:
    """Return this process's shard of ``tensor``; every process holds an unsharded tensor whole."""
    if not is_dtensor(tensor):
        return LocalShard(tensor, 0, *_world())
    dtensor: Any = tensor
    start, num_replicas, replica_index, replica_group = 0, 1, 0, None
    shard_index, num_shards = 0, 1
    # One placement per dimension of the device mesh: sharded within a node, replicated across.
    for dimension, placement in enumerate(dtensor.placements):
        size = dtensor.device_mesh.size(dimension)
        local_rank = dtensor.device_mesh.get_local_rank(dimension)
        if placement.is_shard():
            # FSDP2 splits dimension 0 as torch.chunk does: equal chunks of ceil(rows / size),
            # the last ones smaller or empty.
            start = min(tensor.shape[0], local_rank * -(-tensor.shape[0] // size))
            shard_index, num_shards = local_rank, size
        else:
            num_replicas, replica_index = size, local_rank
            replica_group = dtensor.device_mesh.get_group(dimension)
    return LocalShard(
        to_local(tensor),
        start,
        num_replicas,
        replica_index,
        replica_group,
        shard_index,
        num_shards,
    )


def to_local(tensor: Tensor) -> Tensor:
    """Return the local rows of a sharded tensor, sharing its memory, else the tensor."""
    if not is_dtensor(tensor):
        return tensor
    dtensor: Any = tensor
    with torch.no_grad():
        local: Tensor = dtensor.to_local()
    return local


def is_dtensor(tensor: Tensor) -> bool:
    # By its method: the module of the class differs before PyTorch 2.5.
    return hasattr(tensor, "full_tensor")


def full_tensor(tensor: Tensor) -> Tensor:
    """Return the full tensor; a collective over its processes if it is sharded."""
    dtensor: Any = tensor
    full: Tensor = dtensor.full_tensor() if is_dtensor(tensor) else tensor
    return full.detach()


def _world() -> tuple[int, int]:
    """Return the world size and this process's rank."""
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized()):
        return 1, 0
    return dist.get_world_size(), dist.get_rank()
