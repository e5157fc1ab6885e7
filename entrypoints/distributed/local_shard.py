"""What a process owns of a tensor that may be split among processes along its rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class LocalShard:
    """``part`` are the rows from ``start`` on; it shares the whole tensor's memory.

    ``copies`` processes have these rows; this one has the copy numbered ``copy``.
    """

    part: Tensor
    start: int
    copies: int
    copy: int

    @property
    def rows(self) -> Any:
        """What cuts the part out of the whole tensor."""
        if not self.part.dim():
            return ...
        return slice(self.start, self.start + self.part.shape[0])


def local_shard(tensor: Tensor) -> LocalShard:
    """This process's part of ``tensor``; a tensor that is not split is all processes' own.

    FSDP2 splits the first dimension as ``torch.chunk`` does: equal chunks, the last ones smaller or
    empty.
    """
    if not is_dtensor(tensor):
        return LocalShard(tensor, 0, *_world())
    split: Any = tensor
    start, copies, copy = 0, 1, 0
    for dimension, placement in enumerate(split.placements):
        size = split.device_mesh.size(dimension)
        place = split.device_mesh.get_local_rank(dimension)
        if placement.is_shard():
            start = min(tensor.shape[0], place * -(-tensor.shape[0] // size))
        else:
            copies, copy = size, place
    return LocalShard(to_local(tensor), start, copies, copy)


def to_local(tensor: Tensor) -> Tensor:
    """The part alone."""
    if not is_dtensor(tensor):
        return tensor
    split: Any = tensor
    with torch.no_grad():
        part: Tensor = split.to_local()
    return part


def is_dtensor(tensor: Tensor) -> bool:
    # By what it can do: before PyTorch 2.5 the class is elsewhere.
    return hasattr(tensor, "full_tensor")


def full_tensor(tensor: Tensor) -> Tensor:
    """The whole tensor; where it is split, all its processes must ask for it."""
    split: Any = tensor
    found: Tensor = split.full_tensor() if is_dtensor(tensor) else tensor
    return found.detach()


def _world() -> tuple[int, int]:
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized()):
        return 1, 0
    return dist.get_world_size(), dist.get_rank()
