"""Checkpoints that are written in the background while training continues.

1. :meth:`AsyncCheckpointer.save_async` copies the state to host memory, overlapped with the next
   step's passes. A thread of each rank then writes that rank's share to disk.
2. The thread communicates with nobody: SMDDP allows no second process group, and a collective of a
   thread could interleave with the training's. The trainer shares each rank's progress in the
   status that all ranks exchange now and then from the training thread.
3. When all ranks have written, :meth:`AsyncCheckpointer.commit` gathers names and digests of the
   files and writes the marker, which makes the checkpoint complete.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from sm_train.entrypoints.checkpointing import manifest
from sm_train.entrypoints.checkpointing.sharded_tensors import (
    ShardSpec,
    partition_by_size,
    save_shards,
)
from sm_train.entrypoints.common.background import BackgroundWork
from sm_train.entrypoints.common.checkpoint_layout import (
    MARKER,
    CheckpointFile,
    shard_file_name,
    step_folder_name,
)
from sm_train.entrypoints.common.events import EventLog
from sm_train.entrypoints.distributed.local_shard import LocalShard
from torch import Tensor

AllGatherObject = Callable[[Any], list[Any]]
"""Returns the value of every rank, in rank order."""


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
        for spec, tensor in tensors.items():
            if spec not in self._buffers:
                self._buffers[spec] = torch.empty(
                    tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda
                )
        if any(tensor.is_cuda for tensor in tensors.values()):
            self._events = _timing_event(), _timing_event()
            self._events[0].record()
        buffers = [self._buffers[spec] for spec in tensors]
        torch._foreach_copy_(buffers, list(tensors.values()), non_blocking=True)
        if self._events is not None:
            self._events[1].record()

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


@dataclass(frozen=True)
class CheckpointRank:
    """This process's rank among the writers; ``local_main`` is true on one rank of each node."""

    rank: int
    world_size: int
    local_main: bool


@dataclass(frozen=True)
class _PendingCheckpoint:
    step: int
    folder: Path
    files: Future[list[CheckpointFile]]
    started: float
    blocked_seconds: float
    """How long training paused so far, apart from waiting for background work."""
    background_blocked_before: float
    """:attr:`BackgroundWork.blocked_seconds` when the checkpoint started."""


class AsyncCheckpointer:
    """Writes this rank's share of checkpoints below ``checkpoints``, one checkpoint at a time."""

    def __init__(
        self,
        checkpoints: Path,
        rank: CheckpointRank,
        *,
        fingerprint: str,
        keep: int,
        events: EventLog,
        all_gather: AllGatherObject,
        background: BackgroundWork,
    ) -> None:
        self._checkpoints, self._rank = checkpoints, rank
        self._fingerprint, self._keep = fingerprint, keep
        self._events, self._all_gather, self._background = events, all_gather, background
        self._staging = HostStaging()
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        self._pending: _PendingCheckpoint | None = None

    def save_async(
        self,
        step: int,
        tensors: Mapping[ShardSpec, LocalShard],
        files: Mapping[str, Callable[[Path], None]],
    ) -> None:
        """Start to copy this rank's share of ``tensors``, then write it and ``files``.

        Ranks that hold replicas of the same shards divide them. Call :meth:`commit` before the
        next checkpoint.
        """
        assert self._pending is None
        started = time.monotonic()
        folder = self._checkpoints / step_folder_name(step)
        if self._rank.local_main:
            # An earlier attempt may have left a folder of this step, damaged since.
            manifest.invalidate(folder)
        background_blocked = self._background.blocked_seconds
        share = {spec: tensors[spec].tensor for spec in _rank_share(tensors)}
        copied = self._background.run(partial(self._staging.stage, share))
        written = self._thread.submit(self._write, folder, dict(files), copied)
        blocked = time.monotonic() - started
        self._pending = _PendingCheckpoint(
            step, folder, written, started, blocked, background_blocked
        )

    def _write(
        self, folder: Path, files: dict[str, Callable[[Path], None]], copied: Future[None]
    ) -> list[CheckpointFile]:
        """Write this rank's files, on the checkpoint thread."""
        copied.result()
        folder.mkdir(parents=True, exist_ok=True)
        staged = self._staging.tensors()
        files[shard_file_name(self._rank.rank)] = lambda path: save_shards(path, staged)
        return [manifest.write_file(folder, name, save) for name, save in files.items()]

    @property
    def step(self) -> int | None:
        """The step of the uncommitted checkpoint; None if there is none."""
        return None if self._pending is None else self._pending.step

    @property
    def writing(self) -> bool:
        """Whether this rank is still writing."""
        return self._pending is not None and not self._pending.files.done()

    def wait(self) -> None:
        """Block training until this rank has written."""
        if self._pending is not None:
            started = time.monotonic()
            self._pending.files.exception()
            blocked = self._pending.blocked_seconds + time.monotonic() - started
            self._pending = replace(self._pending, blocked_seconds=blocked)

    def commit(self) -> None:
        """Complete the checkpoint, or abandon it with a warning if a rank failed to write.

        A collective: all ranks call it after the same step, when none is writing any more.
        """
        assert self._pending is not None
        pending, self._pending = self._pending, None
        error = pending.files.exception()
        # Each rank contributes the list of its files or, as a string, the reason of its failure.
        outcome = pending.files.result() if error is None else _describe(error)
        outcomes = self._all_gather(outcome)
        failures = [outcome for outcome in outcomes if isinstance(outcome, str)]
        all_files = [file for files in outcomes if isinstance(files, list) for file in files]
        if not failures and self._rank.local_main:
            try:
                self._complete(pending, all_files)
            except OSError as failure:
                failures = [_describe(failure)]
        if failures:
            self._abandon(pending, failures[0])
        elif self._rank.rank == 0:
            self._log(pending, sum(file.bytes for file in all_files))

    def _complete(self, pending: _PendingCheckpoint, files: list[CheckpointFile]) -> None:
        """Write the marker and prune old checkpoints, on every node: each has its own folder."""
        manifest.write_marker(
            pending.folder, pending.step, self._rank.world_size, self._fingerprint, files
        )
        manifest.prune(self._checkpoints, self._keep)

    def _log(self, pending: _PendingCheckpoint, size: int) -> None:
        writing = time.monotonic() - pending.started
        blocked = pending.blocked_seconds + self._staging.seconds_on_stream
        blocked += self._background.blocked_seconds - pending.background_blocked_before
        self._events.write(
            "checkpoint",
            f"checkpoint at step {pending.step}: training paused for {blocked:.2f} s, "
            f"{size / 1e9:.2f} GB written in {writing:.1f} s",
            step=pending.step,
            path=str(pending.folder),
            bytes=size,
            seconds=blocked,
            writing_seconds=writing,
        )

    def _abandon(self, pending: _PendingCheckpoint, failure: str) -> None:
        # Another node may have completed the folder if the nodes share it.
        if self._rank.local_main and not (pending.folder / MARKER).exists():
            shutil.rmtree(pending.folder, ignore_errors=True)
        if self._rank.rank == 0:
            message = (
                f"no checkpoint at step {pending.step}: {failure}; training continues, the "
                "previous checkpoint stays"
            )
            self._events.warn("checkpoint-failed", message, step=pending.step)


def _rank_share(tensors: Mapping[ShardSpec, LocalShard]) -> list[ShardSpec]:
    """Return the shards that this rank writes: those that no other rank holds, and its share of
    the replicated ones.

    All replicas compute the same partition from the same sizes, without communication.
    """
    replicated: dict[tuple[int, int], dict[ShardSpec, int]] = {}
    for spec, shard in tensors.items():
        if size := shard.tensor.numel() * shard.tensor.element_size():
            replicas = (shard.num_replicas, shard.replica_index)
            replicated.setdefault(replicas, {})[spec] = size
    return [
        spec
        for (num_replicas, replica_index), sizes in replicated.items()
        for spec in partition_by_size(sizes, num_replicas)[replica_index]
    ]


def _describe(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
