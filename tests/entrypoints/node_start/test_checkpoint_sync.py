"""Checkpoints between a node's folder and S3: the marker last, also over several nodes."""

from __future__ import annotations

from pathlib import Path

import pytest
from sm_train.entrypoints.common.checkpoint_layout import (
    MARKER,
    CheckpointFile,
    CheckpointMarker,
    step_folder_name,
)
from sm_train.entrypoints.node_start.checkpoint_sync import CheckpointUploads, restore
from sm_train.entrypoints.node_start.object_store import ObjectStore

from tests.conftest import Aws

URI = "s3://ai-bucket/demo/checkpoints/256px/"
STEP = step_folder_name(10)


@pytest.fixture
def store(aws: Aws, monkeypatch: pytest.MonkeyPatch) -> ObjectStore:
    for name, value in aws.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    aws.make_bucket("ai-bucket")
    return ObjectStore(URI)


def write(folder: Path, name: str, content: bytes) -> CheckpointFile:
    path = folder / STEP / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return CheckpointFile(name, len(content), "digest")


def write_marker(folder: Path, *files: CheckpointFile) -> None:
    text = CheckpointMarker(10, len(files), "fingerprint", files).to_json()
    write(folder, MARKER, text.encode())


def uploads(store: ObjectStore, folder: Path, warnings: list[str]) -> CheckpointUploads:
    return CheckpointUploads(
        store, folder, warnings.append, poll_seconds=0.01, last_upload_seconds=0.1
    )


def test_marker_waits_for_the_files_of_other_nodes(store: ObjectStore, tmp_path: Path) -> None:
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


def test_a_file_of_another_size_is_not_the_marker_s(store: ObjectStore, tmp_path: Path) -> None:
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


def test_what_training_deletes_is_deleted_in_s3(store: ObjectStore, tmp_path: Path) -> None:
    folder = tmp_path / "node"
    restore(store, folder)
    write_marker(folder, write(folder, "tensors-00000.safetensors", b"own"))
    write(folder, ".data.npz.1234.sagemaker-ignore", b"being written")
    first = uploads(store, folder, [])
    first.start()
    assert first.finish()
    assert len(store.sizes()) == 2
    second = uploads(store, folder, [])
    for path in (folder / STEP).iterdir():
        path.unlink()
    second.start()
    assert second.finish()
    assert store.sizes() == {}


def test_failed_uploads_are_warnings(
    store: ObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
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
