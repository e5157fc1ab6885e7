"""Checkpoints that training does not wait for.

A checkpoint begins with a copy of the state in host memory, which is made beside the next step's
passes; a thread of each process then writes its own part, while training goes on. The threads speak
to nobody (SMDDP allows no second process group beside its own, and a collective of theirs would get
between the training's): what became of them goes into the status that all processes share now and
then anyway, from the training's thread. When all have written, the processes gather the names and
digests of their files, and the marker that makes the checkpoint complete comes last.
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

from sm_train.entrypoints.checkpointing import manifest
from sm_train.entrypoints.checkpointing.sharded_tensors import (
    ShardSpec,
    partition_by_size,
    save_shards,
)
from sm_train.entrypoints.checkpointing.staging import HostStaging
from sm_train.entrypoints.common.background import BackgroundWork
from sm_train.entrypoints.common.checkpoint_layout import (
    MARKER,
    CheckpointFile,
    shard_file_name,
    step_folder_name,
)
from sm_train.entrypoints.common.events import EventLog
from sm_train.entrypoints.distributed.local_shard import LocalShard

AllGatherObject = Callable[[list[Any]], list[Any]]
"""Joins a list of every process to one, the same on all."""


@dataclass(frozen=True)
class CheckpointRank:
    """Who writes: ``rank`` of ``world_size``; one process of each machine is its ``host_main``."""

    rank: int
    world_size: int
    host_main: bool


@dataclass(frozen=True)
class _PendingCheckpoint:
    step: int
    folder: Path
    files: Future[list[CheckpointFile]]
    started: float
    blocked: float
    """Seconds for which training stood still, without what it waited for the copy."""
    waited_before: float
    """What :class:`BackgroundWork` had waited when it began."""


class AsyncCheckpointer:
    """Writes the checkpoints of one process below ``checkpoints``, one at a time."""

    def __init__(
        self,
        checkpoints: Path,
        place: CheckpointRank,
        *,
        fingerprint: str,
        keep: int,
        events: EventLog,
        gather: AllGatherObject,
        beside: BackgroundWork,
    ) -> None:
        self._checkpoints, self._place = checkpoints, place
        self._fingerprint, self._keep = fingerprint, keep
        self._events, self._gather, self._beside = events, gather, beside
        self._snapshot = HostStaging()
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        self._pending: _PendingCheckpoint | None = None

    def save_async(
        self,
        step: int,
        tensors: Mapping[ShardSpec, LocalShard],
        files: Mapping[str, Callable[[Path], None]],
    ) -> None:
        """Copy this process's share of ``tensors``, and write it and ``files`` in the background.

        Processes that have the same piece share such pieces out. :meth:`commit` must be called
        before the next.
        """
        assert self._pending is None
        started = time.monotonic()
        folder = self._checkpoints / step_folder_name(step)
        if self._place.host_main:
            # An attempt before this one may have left a folder, damaged since, of this step.
            manifest.invalidate(folder)
        waited = self._beside.blocked_seconds
        own = {box: tensors[box].tensor for box in _share(tensors)}
        copied = self._beside.run(partial(self._snapshot.stage, own))
        written = self._thread.submit(self._write, folder, dict(files), copied)
        blocked = time.monotonic() - started
        self._pending = _PendingCheckpoint(step, folder, written, started, blocked, waited)

    def _write(
        self, folder: Path, files: dict[str, Callable[[Path], None]], copied: Future[None]
    ) -> list[CheckpointFile]:
        copied.result()
        folder.mkdir(parents=True, exist_ok=True)
        copies = self._snapshot.tensors()
        files[shard_file_name(self._place.rank)] = lambda path: save_shards(path, copies)
        return [manifest.write_file(folder, name, save) for name, save in files.items()]

    @property
    def step(self) -> int | None:
        """The step whose checkpoint is not concluded; None where there is none."""
        return None if self._pending is None else self._pending.step

    @property
    def writing(self) -> bool:
        """Whether this process still writes."""
        return self._pending is not None and not self._pending.files.done()

    def wait(self) -> None:
        """Until this process has written: training stands still."""
        if self._pending is not None:
            started = time.monotonic()
            self._pending.files.exception()
            waited = self._pending.blocked + time.monotonic() - started
            self._pending = replace(self._pending, blocked=waited)

    def commit(self) -> None:
        """Complete the checkpoint, or give it up and say so.

        Called by all processes after the same step, when none writes any more.
        """
        assert self._pending is not None
        pending, self._pending = self._pending, None
        error = pending.files.exception()
        found = self._gather([pending.files.result() if error is None else _told(error)])
        failures = [one for one in found if isinstance(one, str)]
        everyones = [file for files in found if isinstance(files, list) for file in files]
        if not failures and self._place.host_main:
            try:
                self._complete(pending, everyones)
            except OSError as failure:
                failures = [_told(failure)]
        if failures:
            self._abandon(pending, failures[0])
        elif self._place.rank == 0:
            self._tell(pending, sum(file.bytes for file in everyones))

    def _complete(self, pending: _PendingCheckpoint, everyones: list[CheckpointFile]) -> None:
        """On every machine: each keeps its own copy of the folder, and removes what is old."""
        manifest.write_marker(
            pending.folder, pending.step, self._place.world_size, self._fingerprint, everyones
        )
        manifest.prune(self._checkpoints, self._keep)

    def _tell(self, pending: _PendingCheckpoint, size: int) -> None:
        writing = time.monotonic() - pending.started
        blocked = pending.blocked + self._beside.blocked_seconds - pending.waited_before
        blocked += self._snapshot.seconds_on_stream
        self._events.write(
            "checkpoint",
            f"checkpoint at step {pending.step}: training stood still for {blocked:.2f} s, "
            f"{size / 1e9:.2f} GB written in {writing:.1f} s",
            step=pending.step,
            path=str(pending.folder),
            bytes=size,
            seconds=blocked,
            writing_seconds=writing,
        )

    def _abandon(self, pending: _PendingCheckpoint, failure: str) -> None:
        # Another machine may have completed a folder that both share.
        if self._place.host_main and not (pending.folder / MARKER).exists():
            shutil.rmtree(pending.folder, ignore_errors=True)
        if self._place.rank == 0:
            message = (
                f"no checkpoint at step {pending.step}: {failure}; training goes on, the one "
                "before stays"
            )
            self._events.warn("checkpoint-failed", message, step=pending.step)


def _share(tensors: Mapping[ShardSpec, LocalShard]) -> list[ShardSpec]:
    """The pieces that this process writes: of those that it alone has, all."""
    shared: dict[tuple[int, int], dict[ShardSpec, int]] = {}
    for box, own in tensors.items():
        if size := own.tensor.numel() * own.tensor.element_size():
            shared.setdefault((own.num_replicas, own.replica_index), {})[box] = size
    return [
        box
        for (copies, copy), sizes in shared.items()
        for box in partition_by_size(sizes, copies)[copy]
    ]


def _told(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
