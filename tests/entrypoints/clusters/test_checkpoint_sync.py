"""Checkpoints between a node's folder and S3: the marker last, also over several nodes."""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path, PurePosixPath

import pytest
from blake3 import blake3
from sm_train.entrypoints.clusters.checkpoint_restore import Restored
from sm_train.entrypoints.clusters.checkpoint_restore import restore as restore_checkpoints
from sm_train.entrypoints.clusters.checkpoint_sync import CheckpointUploads
from sm_train.entrypoints.clusters.prefix_copy import PrefixFiles
from sm_train.entrypoints.job_interface.checkpoint_layout import (
    MARKER,
    CheckpointFile,
    CheckpointMarker,
    shard_file_name,
    step_folder_name,
)

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
    return CheckpointFile(name, len(content), blake3(content).hexdigest())


def write_marker(folder: Path, *files: CheckpointFile, step: int = 10) -> None:
    text = CheckpointMarker(step, len(files), "fingerprint", files).to_json()
    write(folder, MARKER, text.encode(), step)


def restore(store: PrefixFiles, folder: Path, warnings: list[str] | None = None) -> Restored:
    return restore_checkpoints(store, folder, [].append if warnings is None else warnings.append)


def save(nodes: list[Path], step: int) -> None:
    """Save a checkpoint to which each node contributes a file."""
    files = [
        write(folder, shard_file_name(rank), b"own %d" % step, step)
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
    node = CheckpointUploads(store, folder, lambda text: None)
    node.start()
    node.finish(0.0)


def stored(store: PrefixFiles) -> list[int]:
    """Return the steps of the checkpoints that are complete in S3."""
    names = [PurePosixPath(name) for name in store.sizes()]
    folders = [name.parent.name for name in names if name.name == MARKER]
    return sorted(int(folder.rpartition("-")[2]) for folder in folders)


def is_stored(store: PrefixFiles, name: str) -> bool:
    return name in store.sizes()


def uploads(store: PrefixFiles, folder: Path, warnings: list[str]) -> CheckpointUploads:
    return CheckpointUploads(store, folder, warnings.append, poll_seconds=0.01)


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
    assert node.finish(0.1) != []
    assert f"{STEP}/{MARKER}" in warnings[-1]
    assert set(store.sizes()) == {f"{STEP}/tensors-00000.safetensors"}

    other = uploads(store, second, warnings)
    other.start()
    assert other.finish(0.1) == []
    again = uploads(store, first, warnings)
    again.start()
    assert again.finish(0.1) == []
    assert set(store.sizes()) == {
        f"{STEP}/tensors-00000.safetensors",
        f"{STEP}/tensors-00001.safetensors",
        f"{STEP}/{MARKER}",
    }
    # A new node gets all of it.
    new = tmp_path / "new"
    restored = restore(store, new)
    assert (restored.checkpoints, restored.files, restored.others) == ((STEP,), 3, 0)
    assert (new / STEP / "tensors-00001.safetensors").read_bytes() == b"other"
    assert restore(store, new).files == 0


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
    assert node.finish(0.1) != []
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
    assert node.finish(0.1) == []
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
    assert first.finish(0.1) == []
    assert second.finish(0.1) == []
    # A node that comes back has no file of an incomplete one.
    assert restore(store, tmp_path / "new").files == 3


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
    assert node.finish(0.1) == []
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
    assert node.finish(0.1) == []
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
    assert node.finish(0.1) != []
    assert "NoSuchBucket" in warnings[-1]


def test_new_files_are_never_uploaded_under_an_old_marker(
    store: PrefixFiles, aws: Aws, tmp_path: Path
) -> None:
    """A step that is written again within a round, such as after a rollback."""
    node = uploads(store, tmp_path, [])
    write_marker(tmp_path, write(tmp_path, "tensors-00000.safetensors", b"old"))
    assert node._upload_changes() == []
    write_marker(tmp_path, write(tmp_path, "tensors-00000.safetensors", b"new"))
    aws.requests.clear()
    assert node._upload_changes() == []
    prefix = "/ai-bucket/demo/checkpoints/256px/"
    changes = [
        (method, path.removeprefix(f"{prefix}{STEP}/"))
        for method, path, _ in aws.requests
        if method in ("PUT", "DELETE")
    ]
    assert changes == [
        ("DELETE", MARKER),
        ("PUT", "tensors-00000.safetensors"),
        ("PUT", MARKER),
    ]


def test_upload_note_follows_its_upload(store: PrefixFiles, aws: Aws, tmp_path: Path) -> None:
    node = uploads(store, tmp_path, [])
    write_marker(tmp_path, write(tmp_path, "tensors-00000.safetensors", b"own"))
    during: list[list[str]] = []

    def look(method: str, path: str) -> None:
        if method == "PUT":
            during.append(sorted(path.name for path in (tmp_path / STEP).glob("*uploaded*")))

    aws.intercept = look
    assert node._upload_changes() == []
    data, marker = "tensors-00000.safetensors", MARKER
    assert [len(notes) for notes in during] == [0, 1]
    assert data in during[1][0]
    assert marker not in during[1][0]


@pytest.fixture
def several(store: PrefixFiles, tmp_path: Path) -> list[Path]:
    """Return the folders of two nodes that have stored three checkpoints, and other files."""
    nodes = [tmp_path / "first", tmp_path / "second"]
    for step in (10, 20, 30):
        save(nodes, step)
    (nodes[0] / "data-records").mkdir()
    (nodes[0] / "data-records" / "1.json").write_text("{}")
    for folder in reversed(nodes):
        sync(store, folder)
    sync(store, nodes[0])
    assert stored(store) == [10, 20, 30]
    return nodes


def files(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.usefixtures("several")
def test_only_the_newest_checkpoint_is_restored(store: PrefixFiles, tmp_path: Path) -> None:
    """Of the others the marker, so that training counts and removes them."""
    folder = tmp_path / "new"
    restored = restore(store, folder)
    markers = {f"{step_folder_name(step)}/{MARKER}" for step in (10, 20, 30)}
    shards = {f"{step_folder_name(30)}/{shard_file_name(rank)}" for rank in (0, 1)}
    assert files(folder) == {"data-records/1.json"} | markers | shards
    assert restored.checkpoints == (step_folder_name(30),)
    assert (restored.files, restored.others) == (6, 2)
    node = uploads(store, folder, [])
    node.start()
    save([folder], 40)
    remove([folder], 10)
    assert node.finish(0.1) == []
    assert stored(store) == [20, 30, 40]
    assert not any(name.startswith(step_folder_name(10)) for name in store.sizes())
    assert f"{step_folder_name(20)}/{shard_file_name(1)}" in store.sizes()


@pytest.mark.usefixtures("several")
def test_checkpoint_that_was_not_restored_stays_until_a_newer_one_is_stored(
    store: PrefixFiles, tmp_path: Path
) -> None:
    """Training removes all but the newest, and its node is lost before the upload of that."""
    folder = tmp_path / "new"
    restore(store, folder)
    node = uploads(store, folder, [])
    node.start()
    for step in (10, 20, 30):
        remove([folder], step)
    assert node.finish(0.1) == []
    assert stored(store) == [30]
    assert restore(store, tmp_path / "next").checkpoints == (step_folder_name(30),)


@pytest.mark.usefixtures("several")
def test_damaged_checkpoint_gives_way_to_the_one_before_it(
    store: PrefixFiles, tmp_path: Path
) -> None:
    damaged = tmp_path / "damaged"
    damaged.write_bytes(b"own 99")
    name = f"{step_folder_name(30)}/{shard_file_name(1)}"
    store.upload(name, damaged)
    warnings: list[str] = []
    folder = tmp_path / "new"
    assert restore(store, folder, warnings).checkpoints == (step_folder_name(20),)
    assert warnings == [
        f"{URI}{step_folder_name(30)}: tensors-00001.safetensors is not the file that its marker "
        "lists; an earlier checkpoint is restored"
    ]
    assert files(folder / step_folder_name(30)) == {MARKER}
    # Training skips it, removes it, and writes the step again.
    node = uploads(store, folder, [])
    remove([folder], 30)
    node.start()
    wait_until(lambda: stored(store) == [10, 20])
    assert node.finish(0.1) == []


@pytest.mark.usefixtures("several")
def test_files_of_another_attempt_on_the_disk_are_replaced(
    store: PrefixFiles, tmp_path: Path
) -> None:
    """A node's disk has the same step as an earlier attempt wrote it, with its marker."""
    folder = tmp_path / "new"
    own = write(folder, shard_file_name(0), b"own 29", 30)
    write_marker(folder, own, step=30)
    assert restore(store, folder).checkpoints == (step_folder_name(30),)
    place = folder / step_folder_name(30)
    assert (place / shard_file_name(0)).read_bytes() == b"own 30"
    assert CheckpointMarker.parse((place / MARKER).read_bytes()).world_size == 2


@pytest.mark.usefixtures("several")
def test_unfinished_checkpoint_is_not_restored_and_deleted_after_a_newer_one(
    store: PrefixFiles, tmp_path: Path
) -> None:
    unfinished = f"{step_folder_name(40)}/{shard_file_name(0)}"
    left = tmp_path / "left"
    left.write_bytes(b"own 40")
    store.upload(unfinished, left)
    folder = tmp_path / "new"
    restored = restore(store, folder)
    assert restored.checkpoints == (step_folder_name(30),)
    assert not (folder / step_folder_name(40)).exists()
    node = uploads(store, folder, [])
    node.start()
    save([folder], 35)
    wait_until(lambda: 35 in stored(store))
    assert unfinished in store.sizes()  # another node may still complete it
    save([folder], 45)
    wait_until(lambda: unfinished not in store.sizes())
    assert node.finish(0.1) == []


def test_folders_with_other_names_are_restored_as_well(store: PrefixFiles, tmp_path: Path) -> None:
    """The newest state of each kind, as `Accelerator.save_state` names them, and any other file."""
    source = tmp_path / "source"
    for name, step in (
        ("checkpoints/checkpoint_0", 5),
        ("checkpoints/checkpoint_1", 9),
        ("best", 7),
    ):
        place = source / name
        place.mkdir(parents=True)
        (place / "model.safetensors").write_bytes(b"%d" % step)
        listed = CheckpointFile("model.safetensors", 1, blake3(b"%d" % step).hexdigest())
        marker = CheckpointMarker(step, 1, "accelerate", (listed,))
        (place / MARKER).write_text(marker.to_json())
    (source / "log").mkdir()
    (source / "log" / "x.txt").write_text("x")
    sync(store, source)
    folder = tmp_path / "new"
    restored = restore(store, folder)
    assert restored.checkpoints == ("best", "checkpoints/checkpoint_1")
    assert (
        files(source)
        >= files(folder)
        == {
            "best/complete.json",
            "best/model.safetensors",
            "checkpoints/checkpoint_0/complete.json",
            "checkpoints/checkpoint_1/complete.json",
            "checkpoints/checkpoint_1/model.safetensors",
            "log/x.txt",
        }
    )


def test_checkpoint_of_another_format_is_left_to_training(
    store: PrefixFiles, tmp_path: Path
) -> None:
    """Training refuses it with the reason, for which it needs the marker."""
    folder = tmp_path / "source"
    write(folder, shard_file_name(0), b"own")
    write(folder, MARKER, b'{"format": 99}')
    for path in sorted((folder / STEP).iterdir()):
        store.upload(f"{STEP}/{path.name}", path)
    assert restore(store, tmp_path / "new").checkpoints == ()
    assert files(tmp_path / "new") == {f"{STEP}/{MARKER}"}
