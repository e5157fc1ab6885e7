"""Uploads of checkpoints behave as SageMaker's, and S3 holds a complete checkpoint all the time."""

from __future__ import annotations

import random
import shutil
import threading
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sm_train.entrypoints.checkpoints import checkpoint_files
from sm_train.entrypoints.checkpoints.sharded_tensors import ShardSpec, save_shards
from sm_train.entrypoints.job_interface.checkpoint_layout import shard_file_name, step_folder_name
from sm_train.toolkit.submit.local.emulated_checkpoint_sync import CheckpointSync, NodeUploads

NODES = 2


def read_files(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def write(folder: Path, name: str, content: str = "content") -> None:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content)


def test_nodes_start_with_all_files_and_upload_to_one_place(tmp_path: Path) -> None:
    write(tmp_path / "s3", "step-00000005/tensors-00000.safetensors")
    folders = [tmp_path / "one", tmp_path / "two"]
    sync = CheckpointSync(tmp_path / "s3", folders)
    before = read_files(tmp_path / "s3")
    assert [read_files(folder) for folder in folders] == [before, before]
    write(folders[0], "step-00000010/tensors-00000.safetensors", "first")
    write(folders[1], "step-00000010/tensors-00001.safetensors", "second")
    write(folders[1], "step-00000010/.temporary.sagemaker-ignore")
    sync.start()
    sync.finish()
    assert sorted(read_files(tmp_path / "s3")) == [
        "step-00000005/tensors-00000.safetensors",
        "step-00000010/tensors-00000.safetensors",
        "step-00000010/tensors-00001.safetensors",
    ]
    # Nothing is downloaded into a running node, and what was downloaded is not uploaded again.
    assert sorted(read_files(folders[0])) == [
        "step-00000005/tensors-00000.safetensors",
        "step-00000010/tensors-00000.safetensors",
        "step-00000010/tensors-00000.safetensors.sagemaker-uploaded",
    ]


def test_removed_files_are_deleted_and_changed_ones_replaced(tmp_path: Path) -> None:
    s3, node = tmp_path / "s3", tmp_path / "node"
    for name in ("step-00000005/complete.json", "final/model.json"):
        write(s3, name, "old")
    sync = CheckpointSync(s3, [node])
    shutil.rmtree(node / "step-00000005")
    write(node, "final/model.json", "new content")
    sync.start()
    sync.finish()
    assert read_files(s3) == {"final/model.json": b"new content"}
    assert [path.name for path in s3.iterdir()] == ["final"]


def test_lost_instances_leave_no_partial_object(tmp_path: Path) -> None:
    s3, node = tmp_path / "s3", tmp_path / "node"
    sync = CheckpointSync(s3, [node], bytes_per_second=1.0)
    write(node, "large", "x" * 2**21)
    sync.start()
    sync.finish(instances_lost=True)
    assert read_files(s3) == {}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["node", "s3"]


def test_failed_uploads_are_reported_at_the_end(tmp_path: Path) -> None:
    s3, node = tmp_path / "s3", tmp_path / "node"
    sync = CheckpointSync(s3, [node])
    write(node, "step-00000005/complete.json")
    s3.rmdir()
    s3.write_text("in the way")
    sync.start()
    sync.finish()
    assert isinstance(sync.error, OSError)


def write_checkpoint(folders: list[Path], step: int, keep: int) -> None:
    """Write one checkpoint as the ranks of each node do: prune, own files, marker."""
    files = []
    for rank, folder in enumerate(folders):
        for old in checkpoint_files.surplus(folder, keep, step):
            checkpoint_files.remove(old)
        step_folder = folder / step_folder_name(step)
        step_folder.mkdir(parents=True)
        shards = {ShardSpec(f"weight.{rank}", (0,)): torch.full((3,), float(step))}
        files.append(
            checkpoint_files.write_file(
                step_folder, shard_file_name(rank), lambda path, s=shards: save_shards(path, s)
            )
        )
    for folder in folders:
        checkpoint_files.write_marker(folder / step_folder_name(step), step, NODES, "same", files)


@settings(max_examples=25)
@given(
    seed=st.integers(0, 2**32),
    keep=st.integers(2, 3),
    uploads=st.lists(st.lists(st.integers(0, NODES - 1), max_size=8), min_size=6, max_size=6),
)
def test_s3_always_holds_a_complete_checkpoint(
    tmp_path_factory: pytest.TempPathFactory, seed: int, keep: int, uploads: list[list[int]]
) -> None:
    """Whatever the order of uploads and deletions, if uploads lag by at most two intervals.

    After each checkpoint some nodes upload some files, one at a time, and delete at once. What was
    written in the previous interval is in S3 at the end of this one.
    """
    root = tmp_path_factory.mktemp("sync")
    folders = [root / f"node-{rank}" for rank in range(NODES)]
    lock, randomness = threading.Lock(), random.Random(seed)
    nodes = [NodeUploads(root / "s3", folder, lock, randomness) for folder in folders]
    pending: list[tuple[NodeUploads, str]] = []
    for step, order in enumerate(uploads, 1):
        write_checkpoint(folders, step, keep)
        for rank in order:
            nodes[rank].delete_removed()
            for name in nodes[rank].changed()[:1]:
                nodes[rank].upload(name)
            if step > 2:
                latest = checkpoint_files.latest_complete(root / "s3", lambda *_: None)
                assert latest is not None
                assert latest.step >= step - 2
        for node, name in pending:
            node.upload(name)
        pending = [(node, name) for node in nodes for name in node.changed()]
