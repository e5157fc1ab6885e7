"""Checkpoints written next to the training: only the oldest one's file is overwritten."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path

import torch
from sm_train.entrypoints.checkpoints import checkpoint_files
from sm_train.entrypoints.checkpoints.async_checkpointer import AsyncCheckpointer, CheckpointRank
from sm_train.entrypoints.checkpoints.background import BackgroundWork
from sm_train.entrypoints.checkpoints.sharded_tensors import ShardSpec, load_full
from sm_train.entrypoints.checkpoints.stored_steps import StoredSteps
from sm_train.entrypoints.distributed.local_shard import LocalShard
from sm_train.entrypoints.job_interface.checkpoint_layout import shard_file_name, step_folder_name
from sm_train.entrypoints.job_interface.events import EventLog
from sm_train.toolkit.records.job_logs import parse_events

from tests.conftest import Mount

SHARDS = shard_file_name(0)


class Training:
    """One rank that saves a tensor filled with the number of its step."""

    def __init__(self, folder: Path, keep: int = 2, elements: int = 1000, rank: int = 0) -> None:
        self.folder, self._log = folder, io.StringIO()
        self._tensor = torch.zeros(elements)
        self._background = BackgroundWork(torch.device("cpu"))
        self._checkpointer = AsyncCheckpointer(
            folder,
            CheckpointRank(rank, rank + 1, 0, rank, rank + 1),
            fingerprint="same",
            keep=keep,
            events=EventLog(node=0, rank=0, stream=self._log),
            all_gather=lambda value: [value],
            background=self._background,
            stored=StoredSteps(folder, uploads=False),
        )

    def save(self, step: int) -> None:
        self._tensor.fill_(step)
        shards = {ShardSpec("w", (0,)): LocalShard(self._tensor, 0, 1, 0)}
        self._checkpointer.save_async(step, shards, {}, {})
        self._background.join()
        self._checkpointer.wait()
        self._checkpointer.commit()

    def codes(self) -> list[str | None]:
        return [event.get("code") for event in parse_events(self._log.getvalue().splitlines())]

    def stored(self) -> dict[int, float]:
        """Return the content of each checkpoint by step; all must be complete."""
        found = {}
        for folder in sorted(self.folder.iterdir()):
            info = checkpoint_files.read_marker(folder)
            [tensor] = load_full(checkpoint_files.shard_files(folder), "").values()
            assert tensor.unique().numel() == 1
            found[info.step] = float(tensor[0])
        return found

    def inode(self, step: int) -> int:
        return (self.folder / step_folder_name(step) / SHARDS).stat().st_ino


def test_the_oldest_file_is_overwritten_and_the_kept_ones_are_not(tmp_path: Path) -> None:
    training = Training(tmp_path)
    for step in (10, 20, 30):
        training.save(step)
    assert training.stored() == {10: 10.0, 20: 20.0, 30: 30.0}
    oldest = training.inode(10)
    training.save(40)
    assert training.stored() == {20: 20.0, 30: 30.0, 40: 40.0}
    assert training.inode(40) == oldest
    names = {path.name for path in (tmp_path / step_folder_name(40)).iterdir()}
    assert names == {SHARDS, checkpoint_files.MARKER}


def test_a_failed_write_leaves_the_kept_checkpoints_whole(mount: Mount) -> None:
    folder = mount("size=8m")
    training = Training(folder / "checkpoints", keep=2, elements=250_000)
    for step in (10, 20, 30):
        training.save(step)
    fill(folder / "first")
    # There is no room for another file, but in place of the oldest one.
    training.save(40)
    assert training.stored() == {20: 20.0, 30: 30.0, 40: 40.0}
    (training.folder / step_folder_name(20) / SHARDS).unlink()
    fill(folder / "second")
    training.save(50)
    assert "checkpoint-failed" in training.codes()
    assert training.stored() == {30: 30.0, 40: 40.0}
    (folder / "first").unlink()
    training.save(60)
    assert training.stored() == {30: 30.0, 40: 40.0, 60: 60.0}


def test_a_rank_keeps_the_checkpoint_whose_marker_another_rank_still_writes(
    tmp_path: Path,
) -> None:
    """On a busy machine rank 1 may start the next checkpoint before rank 0 has written a marker."""
    second = Training(tmp_path, rank=1)
    for step in (4, 8):
        second.save(step)
    for step in (4, 8):
        assert (tmp_path / step_folder_name(step) / shard_file_name(1)).exists()


def fill(path: Path) -> None:
    """Write a file that fills its file system."""
    with contextlib.suppress(OSError), path.open("wb", buffering=0) as file:
        while file.write(b"x" * 65536):
            pass
