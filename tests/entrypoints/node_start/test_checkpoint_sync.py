"""Checkpoints between a node's folder and S3: the marker last, also over several nodes."""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path, PurePosixPath

import pytest
from sm_train.entrypoints.common.checkpoint_layout import (
    MARKER,
    CheckpointFile,
    CheckpointMarker,
    step_folder_name,
)
from sm_train.entrypoints.node_start.checkpoint_sync import CheckpointUploads, restore
from sm_train.entrypoints.node_start.prefix_copy import PrefixFiles

from tests.conftest import Aws
from tests.support.deadline import wait_until

URI = "s3://ai-bucket/demo/checkpoints/256px/"
STEP = step_folder_name(10)


@pytest.fixture
def store(aws: Aws, monkeypatch: pytest.MonkeyPatch) -> PrefixFiles:
    for name, value in aws.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    aws.make_bucket("ai-bucket")
    return PrefixFiles(URI)


def write(folder: Path, name: str, content: bytes, step: int = 10) -> CheckpointFile:
    path = folder / step_folder_name(step) / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return CheckpointFile(name, len(content), "digest")


def write_marker(folder: Path, *files: CheckpointFile, step: int = 10) -> None:
    text = CheckpointMarker(step, len(files), "fingerprint", files).to_json()
    write(folder, MARKER, text.encode(), step)


def save(nodes: list[Path], step: int) -> None:
    """Save a checkpoint to which each node contributes a file."""
    files = [
        write(folder, f"tensors-{rank:05d}.safetensors", b"own %d" % step, step)
        for rank, folder in enumerate(nodes)
    ]
    for folder in nodes:
        write_marker(folder, *files, step=step)


def remove(nodes: list[Path], step: int) -> None:
    for folder in nodes:
        # As the trainer does: an upload may be adding its note.
        shutil.rmtree(folder / step_folder_name(step), ignore_errors=True)


def sync(store: PrefixFiles, folder: Path) -> None:
    """Upload and delete once, without waiting for other nodes."""
    node = CheckpointUploads(store, folder, lambda text: None, last_upload_seconds=0.0)
    node.start()
    node.finish()


def stored(store: PrefixFiles) -> list[int]:
    """Return the steps of the checkpoints that are complete in S3."""
    names = [PurePosixPath(name) for name in store.sizes()]
    folders = [name.parent.name for name in names if name.name == MARKER]
    return sorted(int(folder.rpartition("-")[2]) for folder in folders)


def is_stored(store: PrefixFiles, name: str) -> bool:
    return name in store.sizes()


def uploads(store: PrefixFiles, folder: Path, warnings: list[str]) -> CheckpointUploads:
    return CheckpointUploads(
        store, folder, warnings.append, poll_seconds=0.01, last_upload_seconds=0.1
    )


def test_marker_waits_for_the_files_of_other_nodes(store: PrefixFiles, tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    restore(store, first)
    restore(store, second)
    own = write(first, "tensors-00000.safetensors", b"own")
    others = write(second, "tensors-00001.safetensors", b"other")
    write_marker(first, own, others)
    warnings: list[str] = []
    node = uploads(store, first, warnings)
    node.start()
    assert not node.finish()
    assert f"{STEP}/{MARKER}" in warnings[-1]
    assert set(store.sizes()) == {f"{STEP}/tensors-00000.safetensors"}

    other = uploads(store, second, warnings)
    other.start()
    assert other.finish()
    again = uploads(store, first, warnings)
    again.start()
    assert again.finish()
    assert set(store.sizes()) == {
        f"{STEP}/tensors-00000.safetensors",
        f"{STEP}/tensors-00001.safetensors",
        f"{STEP}/{MARKER}",
    }
    # A new node gets all of it.
    new = tmp_path / "new"
    assert restore(store, new) == 3
    assert (new / STEP / "tensors-00001.safetensors").read_bytes() == b"other"
    assert restore(store, new) == 0


def test_a_file_of_another_size_is_not_the_marker_s(store: PrefixFiles, tmp_path: Path) -> None:
    """The step was written before, by an attempt that S3 still holds in part."""
    store_folder = tmp_path / "node"
    restore(store, store_folder)
    other = write(tmp_path / "elsewhere", "tensors-00001.safetensors", b"an older version")
    store.upload(f"{STEP}/{other.name}", tmp_path / "elsewhere" / STEP / other.name)
    own = write(store_folder, "tensors-00000.safetensors", b"own")
    write_marker(store_folder, own, CheckpointFile(other.name, 3, "digest"))
    node = uploads(store, store_folder, [])
    node.start()
    assert not node.finish()
    assert f"{STEP}/{MARKER}" not in store.sizes()


def test_what_training_deletes_is_deleted_in_s3(store: PrefixFiles, tmp_path: Path) -> None:
    folder = tmp_path / "node"
    restore(store, folder)
    save([folder], 10)
    write(folder, ".data.npz.1234.sagemaker-ignore", b"being written")
    (folder / "samples").mkdir()
    (folder / "samples" / "1.png").write_bytes(b"picture")
    node = uploads(store, folder, [])
    node.start()
    wait_until(lambda: len(store.sizes()) == 3)
    save([folder], 20)
    remove([folder], 10)
    (folder / "samples" / "1.png").unlink()
    assert node.finish()
    assert stored(store) == [20]
    assert {name.partition("/")[0] for name in store.sizes()} == {step_folder_name(20)}
    notes = {path.name for path in (folder / step_folder_name(20)).glob("*.sagemaker-*")}
    assert notes == {
        "complete.json.sagemaker-uploaded",
        "tensors-00000.safetensors.sagemaker-uploaded",
    }


def test_newest_checkpoint_in_s3_stays_until_a_newer_one_is_complete(
    store: PrefixFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second node's requests fail meanwhile."""
    other = PrefixFiles(URI)
    nodes = [tmp_path / "first", tmp_path / "second"]
    for folder in nodes:
        restore(store, folder)
    first, second = uploads(store, nodes[0], []), uploads(other, nodes[1], [])
    save(nodes, 10)
    first.start()
    second.start()
    wait_until(lambda: stored(store) == [10])
    monkeypatch.setattr(other, "_bucket", "no-such-bucket")
    for step in range(20, 60, 10):
        save(nodes, step)
        remove(nodes, step - 10)
        own = f"{step_folder_name(step)}/tensors-00000.safetensors"
        wait_until(partial(is_stored, store, own))
        assert stored(store) == [10]
    monkeypatch.setattr(other, "_bucket", "ai-bucket")
    wait_until(lambda: stored(store) == [50])
    assert first.finish()
    assert second.finish()
    # A node that comes back has no file of an incomplete one.
    assert restore(store, tmp_path / "new") == 3


def test_last_checkpoint_of_a_removed_folder_stays_in_s3(
    store: PrefixFiles, tmp_path: Path
) -> None:
    folder = tmp_path / "node"
    restore(store, folder)
    save([folder], 10)
    node = uploads(store, folder, [])
    node.start()
    wait_until(lambda: stored(store) == [10])
    remove([folder], 10)
    assert node.finish()
    assert stored(store) == [10]


def test_checkpoint_that_a_resumed_job_refused_is_deleted(
    store: PrefixFiles, tmp_path: Path
) -> None:
    """Its content is damaged: it must not count as the newest while it is written again."""
    folder = tmp_path / "node"
    restore(store, folder)
    save([folder], 10)
    save([folder], 20)
    sync(store, folder)
    resumed = tmp_path / "resumed"
    restore(store, resumed)
    node = uploads(store, resumed, [])
    node.start()
    remove([resumed], 20)
    assert node.finish()
    assert stored(store) == [10]


def test_failed_uploads_are_warnings(
    store: PrefixFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "node"
    restore(store, folder)
    warnings: list[str] = []
    node = uploads(store, folder, warnings)
    monkeypatch.setattr(store, "_bucket", "no-such-bucket")
    write_marker(folder, write(folder, "tensors-00000.safetensors", b"own"))
    node.start()
    assert not node.finish()
    assert "NoSuchBucket" in warnings[-1]
