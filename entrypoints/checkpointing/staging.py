"""A copy of the state in host memory, so that training goes on while it is written."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from sm_train.entrypoints.checkpointing.sharded_tensors import ShardSpec
from torch import Tensor


class HostStaging:
    """Buffers that are allocated once and filled again for each checkpoint.

    On a GPU the copies run on the training's own stream, in front of the next step's kernels: the
    host does not wait for them. Their memory is page-locked, which lets them run at bus speed.
    """

    def __init__(self) -> None:
        self._buffers: dict[ShardSpec, Tensor] = {}
        self._events: tuple[torch.cuda.Event, torch.cuda.Event] | None = None

    @torch.no_grad()
    def stage(self, tensors: Mapping[ShardSpec, Tensor]) -> None:
        """Begin to copy ``tensors``; those of the snapshot before are overwritten."""
        for box, tensor in tensors.items():
            if box not in self._buffers:
                self._buffers[box] = torch.empty(
                    tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda
                )
        if any(tensor.is_cuda for tensor in tensors.values()):
            self._events = _event(), _event()
            self._events[0].record()
        buffers = [self._buffers[box] for box in tensors]
        torch._foreach_copy_(buffers, list(tensors.values()), non_blocking=True)
        if self._events is not None:
            self._events[1].record()

    def tensors(self) -> dict[ShardSpec, Tensor]:
        """The copies, once they are there; may be called from another thread."""
        if self._events is not None:
            self._events[1].synchronize()
        return dict(self._buffers)

    @property
    def seconds_on_stream(self) -> float:
        """How long the training's stream was held up by the copies; they must be there."""
        if self._events is None:
            return 0.0
        begun, copied = self._events
        return float(begun.elapsed_time(copied)) / 1e3


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
