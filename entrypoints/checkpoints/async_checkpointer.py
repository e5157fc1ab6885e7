"""Checkpoints that are written in the background while training continues.

1. :meth:`AsyncCheckpointer.save_async` copies the state to host memory, overlapped with the next
   step's passes. A thread of each rank then writes that rank's share to disk. The copy stays in
   memory for rollbacks.
2. The thread communicates with nobody: SMDDP allows no second process group, and a collective of a
   thread could interleave with the training's. The trainer shares each rank's progress in the
   status that all ranks exchange now and then from the training thread.
3. When all ranks have written, :meth:`AsyncCheckpointer.commit` gathers names and digests of the
   files and writes the marker, which makes the checkpoint complete.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from sm_train.entrypoints.base.atomic_write import NOT_UPLOADED_SUFFIX, durable_folder
from sm_train.entrypoints.checkpoints import checkpoint_files
from sm_train.entrypoints.checkpoints.background import BackgroundWork, lower_priority
from sm_train.entrypoints.checkpoints.host_snapshot import HostSnapshot
from sm_train.entrypoints.checkpoints.sharded_tensors import ShardSpec, save_shards
from sm_train.entrypoints.checkpoints.stored_steps import StoredSteps
from sm_train.entrypoints.data_loading.shard_catalog import DataRank
from sm_train.entrypoints.distributed.local_shard import LocalShard
from sm_train.entrypoints.job_interface.checkpoint_layout import (
    CheckpointFile,
    shard_file_name,
    step_folder_name,
)
from sm_train.entrypoints.job_interface.events import EventLog

AllGatherObject = Callable[[Any], list[Any]]
"""Returns the value of every rank, in rank order."""


@dataclass(frozen=True)
class CheckpointRank:
    """This process among the writers; each node has a checkpoint folder of its own."""

    rank: int
    world_size: int
    node_rank: int
    local_rank: int
    local_world_size: int

    @classmethod
    def of(cls, data_rank: DataRank, rank: int, world_size: int) -> CheckpointRank:
        """Return the writer that is ``rank`` of ``world_size``, on its node as ``data_rank``."""
        node = (data_rank.node_rank, data_rank.local_rank, data_rank.local_world_size)
        return cls(rank, world_size, *node)

    @property
    def local_main(self) -> bool:
        """Whether this rank does what is done once on each node."""
        return self.local_rank == 0


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
    """Writes this rank's share of checkpoints below ``checkpoints``, one checkpoint at a time.

    A checkpoint is started by :meth:`save_async`, written by this rank's thread (:attr:`writing`),
    and then waits for :meth:`commit`, after which it is complete or abandoned. Until a rank
    commits, :attr:`step` is that of the pending checkpoint, the same on all ranks. The marker is
    the last file that is written, and it lists all others with their digests: a folder without one
    is not a checkpoint, whenever the job ends. Old checkpoints are removed when the next one is
    written, never the newest complete one, nor one that :class:`StoredSteps` protects.
    """

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
        stored: StoredSteps,
    ) -> None:
        self._checkpoints, self.rank = checkpoints, rank
        self._fingerprint, self._keep = fingerprint, keep
        self._events, self._all_gather, self._background = events, all_gather, background
        self.snapshot, self.stored = HostSnapshot(background), stored
        self._thread = ThreadPoolExecutor(1, "checkpoint", initializer=lower_priority)
        self._pending: _PendingCheckpoint | None = None
        self._committed: int | None = None
        self.failures = 0
        """Checkpoints that were abandoned since the newest complete one."""
        self.failure: str | None = None
        """The reason of the last of them."""

    def save_async(
        self,
        step: int,
        tensors: Mapping[ShardSpec, LocalShard],
        progress: Mapping[str, Any],
        files: Mapping[str, Callable[[Path], None]],
    ) -> None:
        """Start to copy this rank's share of ``tensors``, then write it and ``files``.

        Call :meth:`commit` before the next checkpoint.
        """
        assert self._pending is None
        started = time.monotonic()
        folder = self._checkpoints / step_folder_name(step)
        if self.rank.local_main:
            # An earlier attempt may have left a folder of this step, damaged since.
            checkpoint_files.invalidate(folder)
        background_blocked = self._background.blocked_seconds
        self.snapshot.take(step, tensors, progress)
        written = self._thread.submit(self._write, step, folder, dict(files))
        blocked = time.monotonic() - started
        self._pending = _PendingCheckpoint(
            step, folder, written, started, blocked, background_blocked
        )

    def _write(
        self, step: int, folder: Path, files: dict[str, Callable[[Path], None]]
    ) -> list[CheckpointFile]:
        """Write this rank's files, on the checkpoint thread."""
        durable_folder(folder)
        shards = shard_file_name(self.rank.rank)
        reusable = self._prune(step, folder, shards)
        share = self.snapshot.share()
        written = [checkpoint_files.write_file(folder, name, save) for name, save in files.items()]
        save = partial(save_shards, shards=share)
        return [*written, checkpoint_files.write_file(folder, shards, save, reusable)]

    def _prune(self, step: int, folder: Path, shards: str) -> Path | None:
        """Remove old checkpoints; keep one file of this rank, to be overwritten.

        Not when the previous checkpoint became complete here: its upload takes a while. The memory
        and disk blocks of a file are worth more than its content: see :func:`save_shards`.
        """
        reusable = folder / f".{shards}{NOT_UPLOADED_SUFFIX}"
        reusable.unlink(missing_ok=True)
        found = False
        # The node's first rank may still be writing the marker of the last commit.
        for old in checkpoint_files.surplus(
            self._checkpoints, self._keep, step, self._committed, self.stored.protected
        ):
            if self.rank.local_main:
                checkpoint_files.invalidate(old)
            # The node's other ranks do the same at about this time.
            with contextlib.suppress(OSError):
                if not found:
                    (old / shards).replace(reusable)
                    found = True
            if self.rank.local_main:
                checkpoint_files.remove(old)
        return reusable if found else None

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
        uploads = self.stored.own_uploads() if self.rank.local_main else None
        gathered = self._all_gather((outcome, uploads))
        outcomes = [outcome for outcome, _ in gathered]
        failures = [outcome for outcome in outcomes if isinstance(outcome, str)]
        all_files = [file for files in outcomes if isinstance(files, list) for file in files]
        if not failures and self.rank.local_main:
            try:
                self._complete(pending, all_files)
            except OSError as failure:
                failures = [_describe(failure)]
        if failures:
            self._abandon(pending, failures[0])
            return
        self._committed = pending.step
        self.failures, self.failure = 0, None
        self.stored.committed(pending.step, [uploads for _, uploads in gathered])
        if self.rank.rank == 0:
            self._log(pending, sum(file.bytes for file in all_files))

    def _complete(self, pending: _PendingCheckpoint, files: list[CheckpointFile]) -> None:
        """Write the marker, on every node: each has its own folder."""
        checkpoint_files.write_marker(
            pending.folder, pending.step, self.rank.world_size, self._fingerprint, files
        )

    def _log(self, pending: _PendingCheckpoint, size: int) -> None:
        writing = time.monotonic() - pending.started
        blocked = pending.blocked_seconds + self.snapshot.staging.seconds_on_stream
        blocked += self._background.blocked_seconds - pending.background_blocked_before
        self._events.write(
            "checkpoint",
            f"checkpoint at step {pending.step}: training paused for {blocked:.2f} s, "
            f"{size / 1e9:.2f} GB written in {writing:.1f} s",
            step=pending.step,
            stored_step=self.stored.newest,
            path=str(pending.folder),
            bytes=size,
            seconds=blocked,
            writing_seconds=writing,
        )

    def _abandon(self, pending: _PendingCheckpoint, failure: str) -> None:
        self.failures, self.failure = self.failures + 1, failure
        if self.rank.local_main:
            checkpoint_files.remove(pending.folder)
        if self.rank.rank == 0:
            message = (
                f"no checkpoint at step {pending.step}: {failure}; training continues, the "
                "previous checkpoint stays"
            )
            self._events.warn("checkpoint-failed", message, step=pending.step)


def _describe(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
