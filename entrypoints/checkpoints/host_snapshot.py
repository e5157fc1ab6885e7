"""A copy of the training state in host memory: what a checkpoint is written from, and what a
rollback restores.

Each rank keeps its own share only, as in its file of the checkpoint. On SageMaker the other ranks'
files of a running job are out of reach: every node has its own checkpoint folder, and nothing is
downloaded from S3 after the start. So a rollback reads no file. Each replica of a shard restores
its share and broadcasts it to the other replicas; a shard that no other rank holds needs no
communication.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future
from functools import partial
from typing import Any

import torch
from sm_train.entrypoints.checkpoints.background import BackgroundWork
from sm_train.entrypoints.checkpoints.sharded_tensors import ShardSpec, partition_by_size
from sm_train.entrypoints.distributed.local_shard import LocalShard
from torch import Tensor


class HostStaging:
    """Host buffers for a copy of the state, allocated once and reused by each checkpoint.

    On a GPU the copies run on the training's own stream, before the next step's kernels, so the
    CPU does not wait for them. The buffers are page-locked for copies at full bus speed.
    """

    def __init__(self) -> None:
        self._buffers: dict[ShardSpec, Tensor] = {}
        self._events: tuple[torch.cuda.Event, torch.cuda.Event] | None = None

    @torch.no_grad()
    def stage(self, tensors: Mapping[ShardSpec, Tensor]) -> None:
        """Start to copy ``tensors``, overwriting the previous copies."""
        self._buffers = {spec: self._buffer(spec, tensor) for spec, tensor in tensors.items()}
        if any(tensor.is_cuda for tensor in tensors.values()):
            self._events = _timing_event(), _timing_event()
            self._events[0].record()
        buffers = [self._buffers[spec] for spec in tensors]
        torch._foreach_copy_(buffers, list(tensors.values()), non_blocking=True)
        if self._events is not None:
            self._events[1].record()

    def _buffer(self, spec: ShardSpec, tensor: Tensor) -> Tensor:
        """Return the buffer of the previous copy, if it fits."""
        buffer = self._buffers.get(spec)
        if buffer is not None and (buffer.shape, buffer.dtype) == (tensor.shape, tensor.dtype):
            return buffer
        return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)

    def tensors(self) -> dict[ShardSpec, Tensor]:
        """Wait for the copies and return them; may be called from another thread."""
        if self._events is not None:
            self._events[1].synchronize()
        return dict(self._buffers)

    @property
    def seconds_on_stream(self) -> float:
        """Seconds for which the copies occupied the training's stream; call it after they end."""
        if self._events is None:
            return 0.0
        started, ended = self._events
        return float(started.elapsed_time(ended)) / 1e3


def _timing_event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


class HostSnapshot:
    """This rank's share of the state after optimizer step ``step``; None before the first one.

    ``progress`` holds the counters that belong to the state and are the same on all ranks.
    """

    def __init__(self, background: BackgroundWork) -> None:
        self.step: int | None = None
        self.progress: Mapping[str, Any] = {}
        self.staging = HostStaging()
        self._background = background
        self._writers: dict[ShardSpec, int] = {}
        self._copied: Future[None] | None = None

    def take(
        self, step: int, tensors: Mapping[ShardSpec, LocalShard], progress: Mapping[str, Any]
    ) -> None:
        """Start to copy this rank's share of ``tensors`` in the background.

        Ranks that hold replicas of the same shards divide them.
        """
        self._writers = _assign_writers(tensors)
        share = {
            spec: tensors[spec].tensor
            for spec, writer in self._writers.items()
            if writer == tensors[spec].replica_index
        }
        self._copied = self._background.run(partial(self.staging.stage, share))
        self.step, self.progress = step, dict(progress)

    def share(self) -> dict[ShardSpec, Tensor]:
        """Wait for the copies and return them; may be called from another thread."""
        if self._copied is not None:
            self._copied.result()
        return self.staging.tensors()

    @torch.no_grad()
    def load_into(self, targets: Mapping[ShardSpec, LocalShard]) -> None:
        """Overwrite ``targets``, some or all of the tensors of the snapshot.

        A collective: all ranks pass the same names in the same order.
        """
        share = self.share()
        for spec, target in targets.items():
            if not target.tensor.numel():
                continue
            if spec in share:
                target.tensor.copy_(share[spec])
            if target.num_replicas > 1:
                target.broadcast(self._writers[spec])


def _assign_writers(tensors: Mapping[ShardSpec, LocalShard]) -> dict[ShardSpec, int]:
    """Return which replica of each shard that is not empty writes it, by its replica index.

    All replicas compute the same assignment from the same sizes, without communication.
    """
    replicated: dict[tuple[int, int], dict[ShardSpec, int]] = {}
    for spec, shard in tensors.items():
        if size := shard.tensor.numel() * shard.tensor.element_size():
            replicas = (shard.num_replicas, shard.replica_index)
            replicated.setdefault(replicas, {})[spec] = size
    return {
        spec: writer
        for (num_replicas, _), sizes in replicated.items()
        for writer, specs in enumerate(partition_by_size(sizes, num_replicas))
        for spec in specs
    }
