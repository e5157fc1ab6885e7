"""Checkpoint folders: only complete and intact ones are found, and files are written atomically."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from sm_train.entrypoints.checkpoints import checkpoint_files
from sm_train.entrypoints.job_interface.checkpoint_layout import (
    MARKER,
    shard_file_name,
    step_folder_name,
)

from tests.entrypoints.checkpoints.checkpoint_files_support import (
    SHARD,
    flip_last_bit,
    set_format,
    write_checkpoint,
)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-10])


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda folder: (folder / MARKER).unlink(), "incomplete"),
        (lambda folder: truncate(folder / MARKER), "damaged"),
        (lambda folder: set_format(folder / MARKER, 5), "format 5, this version reads 4"),
        (lambda folder: (folder / SHARD).unlink(), "is missing"),
        (lambda folder: truncate(folder / SHARD), "bytes of"),
        (lambda folder: flip_last_bit(folder / SHARD), "does not match the marker"),
    ],
)
def test_latest_complete_skips_unusable_checkpoints_with_reason(
    tmp_path: Path, damage: Callable[[Path], None], reason: str
) -> None:
    for step in (10, 20, 30):
        write_checkpoint(tmp_path, step)
    damage(tmp_path / step_folder_name(30))
    skipped: list[str] = []
    latest = checkpoint_files.latest_complete(
        tmp_path, lambda folder, why: skipped.append(f"{folder.name} {why}")
    )
    assert latest is not None
    assert (latest.step, latest.world_size, latest.fingerprint) == (20, 1, "same")
    [message] = skipped
    assert message.startswith("step-00000030")
    assert reason in message


def test_surplus_keeps_the_newest_complete_checkpoints_before_the_one_being_written(
    tmp_path: Path,
) -> None:
    for step in (10, 20, 30, 40, 50):
        write_checkpoint(tmp_path, step)
    checkpoint_files.invalidate(tmp_path / step_folder_name(10))
    checkpoint_files.invalidate(tmp_path / step_folder_name(40))
    checkpoint_files.invalidate(tmp_path / step_folder_name(50))
    for old in checkpoint_files.surplus(tmp_path, keep=2, step=50):
        checkpoint_files.remove(old)
    assert sorted(folder.name for folder in tmp_path.iterdir()) == [
        "step-00000020",
        "step-00000030",
        # Being written: other ranks of the node may be ahead of this one.
        "step-00000050",
    ]


def test_shard_files_are_those_that_the_marker_lists(tmp_path: Path) -> None:
    """A folder may hold files of an earlier attempt with more ranks, which never completed it."""
    folder = tmp_path / step_folder_name(10)
    folder.mkdir()
    listed = [
        checkpoint_files.write_file(
            folder, shard_file_name(rank), checkpoint_files.save_bytes(b"new")
        )
        for rank in range(2)
    ]
    checkpoint_files.write_file(folder, shard_file_name(2), checkpoint_files.save_bytes(b"stale"))
    checkpoint_files.write_marker(folder, 10, 2, "same", listed)
    assert [path.name for path in checkpoint_files.shard_files(folder)] == [
        checkpoint.name for checkpoint in listed
    ]


def test_failed_write_leaves_no_file(tmp_path: Path) -> None:
    def fail(path: Path) -> None:
        path.write_bytes(b"half")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        checkpoint_files.write_file(tmp_path, SHARD, fail)
    assert list(tmp_path.iterdir()) == []
