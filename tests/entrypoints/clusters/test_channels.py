"""A node's channels: all of a mount, its part of the shards, or copies from S3."""

from __future__ import annotations

from pathlib import Path

import pytest
from sm_train.entrypoints.clusters.channels import ChannelError, create_channel
from sm_train.entrypoints.job_interface.node_description import NodeChannel, NodeDescription
from sm_train.entrypoints.shards.shard_format import find_shards

from tests.conftest import Aws


@pytest.fixture
def mount(tmp_path: Path) -> Path:
    folder = tmp_path / "mount"
    (folder / "b").mkdir(parents=True)
    for name in ("a-0.tar", "a-1.tar", "b/c-0.tar", "b/c-1.tar", "b/c-2.tar"):
        (folder / name).write_bytes(name.encode())
    return folder


def names(folder: Path) -> list[str]:
    return sorted(find_shards(folder))


def test_nodes_have_disjoint_parts_of_a_mount(mount: Path, tmp_path: Path) -> None:
    channel = NodeChannel("train", "s3://b/shards/", str(mount), sharded=True)
    parts = []
    for rank in range(3):
        folder = tmp_path / f"node-{rank}"
        files = create_channel(channel, folder, rank, 3)
        parts.append(names(folder))
        assert files == len(parts[-1])
        assert all((folder / name).read_bytes() == name.encode() for name in parts[-1])
    assert sorted(name for part in parts for name in part) == names(mount)
    # A restarted container has the folder already, and the job may have another number of nodes.
    assert create_channel(channel, tmp_path / "node-0", 0, 2) == 3
    assert names(tmp_path / "node-0") == ["a-0.tar", "b/c-0.tar", "b/c-2.tar"]


def test_replicated_channels_show_everything(mount: Path, tmp_path: Path) -> None:
    channel = NodeChannel("validation", "s3://b/shards/", str(mount))
    create_channel(channel, tmp_path / "node", 1, 2)
    assert names(tmp_path / "node") == names(mount)
    # An object is the only file of its channel.
    index = NodeChannel("index", "s3://b/a-0.tar", str(mount / "a-0.tar"))
    assert create_channel(index, tmp_path / "index", 1, 2) == 1
    assert names(tmp_path / "index") == ["a-0.tar"]


def test_missing_mounts_and_too_few_files_are_one_line_errors(mount: Path, tmp_path: Path) -> None:
    channel = NodeChannel("train", "s3://b/x/", str(mount / "x"), sharded=True)
    with pytest.raises(ChannelError, match=r"channel train: .* is not mounted \(s3://b/x/\)"):
        create_channel(channel, tmp_path / "node", 0, 2)
    channel = NodeChannel("train", "s3://b/shards/", str(mount), sharded=True)
    with pytest.raises(ChannelError, match="5 files for 9 nodes, which need one each"):
        create_channel(channel, tmp_path / "node", 8, 9)


def test_copies_only_the_part_of_the_node(
    aws: Aws, mount: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in aws.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    aws.make_bucket("ai-bucket")
    for name in names(mount):
        aws.client("s3").upload_file(str(mount / name), "ai-bucket", f"shards/{name}")
    aws.client("s3").put_object(Bucket="ai-bucket", Key="shards-old/z.tar", Body=b"")
    aws.client("s3").put_object(Bucket="ai-bucket", Key="index.parquet", Body=b"index")
    channel = NodeChannel("train", "s3://ai-bucket/shards/", sharded=True)
    assert create_channel(channel, tmp_path / "node", 1, 2) == 2
    assert names(tmp_path / "node") == ["a-1.tar", "b/c-1.tar"]
    # Slurm starts a job again on other nodes: the rank, and so the part, may be another one.
    assert create_channel(channel, tmp_path / "node", 0, 2) == 3
    assert names(tmp_path / "node") == ["a-0.tar", "b/c-0.tar", "b/c-2.tar"]
    # What is current is not downloaded again; another content of the same size is.
    times = {name: (tmp_path / "node" / name).stat().st_mtime_ns for name in ("a-0.tar",)}
    aws.client("s3").put_object(Bucket="ai-bucket", Key="shards/b/c-0.tar", Body=b"B/C-0.TAR")
    assert create_channel(channel, tmp_path / "node", 0, 2) == 3
    assert (tmp_path / "node" / "a-0.tar").stat().st_mtime_ns == times["a-0.tar"]
    assert (tmp_path / "node" / "b" / "c-0.tar").read_bytes() == b"B/C-0.TAR"
    # An interrupted start keeps what it has.
    (tmp_path / "node" / "b" / "c-2.tar").unlink()
    (tmp_path / "node" / ".a-0.tar.part").write_bytes(b"a")
    assert create_channel(channel, tmp_path / "node", 0, 2) == 3
    assert (tmp_path / "node" / "a-0.tar").stat().st_mtime_ns == times["a-0.tar"]
    assert names(tmp_path / "node") == ["a-0.tar", "b/c-0.tar", "b/c-2.tar"]
    assert not (tmp_path / "node" / ".a-0.tar.part").exists()
    index = NodeChannel("index", "s3://ai-bucket/index.parquet")
    assert create_channel(index, tmp_path / "index", 0, 2) == 1
    assert (tmp_path / "index" / "index.parquet").read_bytes() == b"index"


def test_description_survives_its_variable() -> None:
    channels = (NodeChannel("train", "s3://b/x/", None, sharded=True), NodeChannel("a", "s3://b/y"))
    description = NodeDescription("256px", "train.py", "ml.g5.xlarge", 2, 1, channels, "s3://b/c")
    assert NodeDescription.from_json(description.to_json()) == description
    assert "\n" not in description.to_json()
