"""Checkpoint folders: only complete and intact ones are found, and files are written atomically."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from sm_train.entrypoints.checkpointing import manifest
from sm_train.entrypoints.checkpointing.sharded_tensors import ShardSpec, save_shards
from sm_train.entrypoints.common.checkpoint_layout import MARKER, step_folder_name

SHARD = "model.safetensors"


def write_checkpoint(checkpoints: Path, step: int) -> Path:
    folder = checkpoints / step_folder_name(step)
    folder.mkdir(parents=True)
    shards = {ShardSpec("weight", (0,)): torch.full((3,), float(step))}
    file = manifest.write_file(folder, SHARD, lambda path: save_shards(path, shards))
    manifest.write_marker(folder, step, 1, "same", [file])
    return folder


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-10])


def flip_last_bit(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))


def set_format(path: Path, version: int) -> None:
    path.write_text(path.read_text().replace('"format": 2', f'"format": {version}'))


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda folder: (folder / MARKER).unlink(), "incomplete"),
        (lambda folder: truncate(folder / MARKER), "damaged"),
        (lambda folder: set_format(folder / MARKER, 3), "format 3, this version reads 2"),
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
    latest = manifest.latest_complete(
        tmp_path, lambda folder, why: skipped.append(f"{folder.name} {why}")
    )
    assert latest is not None
    assert (latest.step, latest.world_size, latest.fingerprint) == (20, 1, "same")
    [message] = skipped
    assert message.startswith("step-00000030")
    assert reason in message


def test_prune_keeps_newest_complete_checkpoints_and_unfinished_ones(tmp_path: Path) -> None:
    for step in (10, 20, 30, 40, 50):
        write_checkpoint(tmp_path, step)
    manifest.invalidate(tmp_path / step_folder_name(10))
    manifest.invalidate(tmp_path / step_folder_name(50))
    manifest.prune(tmp_path, keep=2)
    assert sorted(folder.name for folder in tmp_path.iterdir()) == [
        "step-00000030",
        "step-00000040",
        # Incomplete but the newest: another node may still be writing it.
        "step-00000050",
    ]


def test_failed_write_leaves_no_file(tmp_path: Path) -> None:
    def fail(path: Path) -> None:
        path.write_bytes(b"half")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        manifest.write_file(tmp_path, SHARD, fail)
    assert list(tmp_path.iterdir()) == []
