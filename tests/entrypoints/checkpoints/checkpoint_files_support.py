"""Helpers of the tests of checkpoint files, which other tests use as well."""

from __future__ import annotations

from pathlib import Path

import torch
from sm_train.entrypoints.checkpoints import checkpoint_files
from sm_train.entrypoints.checkpoints.sharded_tensors import ShardSpec, save_shards
from sm_train.entrypoints.job_interface.checkpoint_layout import (
    step_folder_name,
)

SHARD = "model.safetensors"


def write_checkpoint(checkpoints: Path, step: int) -> Path:
    folder = checkpoints / step_folder_name(step)
    folder.mkdir(parents=True)
    shards = {ShardSpec("weight", (0,)): torch.full((3,), float(step))}
    file = checkpoint_files.write_file(folder, SHARD, lambda path: save_shards(path, shards))
    checkpoint_files.write_marker(folder, step, 1, "same", [file])
    return folder


def flip_last_bit(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))


def set_format(path: Path, version: int) -> None:
    path.write_text(path.read_text().replace('"format": 4', f'"format": {version}'))
