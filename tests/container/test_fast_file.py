"""A bucket behind FUSE as the data channel, as FastFile is: the requests to S3, and the effect of
slow responses and broken connections.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from PIL import Image
from sm_train.entrypoints.data_loading.batches import Batch
from sm_train.entrypoints.data_loading.indexed_reader import (
    EARLY_BATCHES,
    READ_BYTES,
    SHUFFLE_BLOCK_BYTES,
)
from sm_train.entrypoints.job_interface.index_location import index_path
from sm_train.entrypoints.job_interface.job_config import DataConfig
from sm_train.entrypoints.shards.shard_format import DataError
from sm_train.toolkit.records.job_logs import read_events

from tests.conftest import Cli
from tests.support.capabilities import require_fuse
from tests.support.cluster.training_jobs import create_nodes, run_nodes, tiny_run, write_shard
from tests.support.data_channels import (
    DATA_CONFIG,
    Cluster,
    rest_of_epoch,
    write_folder_index,
)
from tests.support.deadline import DEADLINE
from tests.support.s3_mount import CHUNK_BYTES, Bucket, Fault, Get, mount_bucket, serve_bucket

pytestmark = pytest.mark.integration

SHARDS, EACH, SIDE, BATCH = 2, 130, 160, 10
STEPS = SHARDS * EACH // BATCH


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Shards of 10 MB, each larger than one read range, with their index."""
    folder = tmp_path_factory.mktemp("packed")
    (folder / "shards").mkdir()
    noise = np.random.default_rng(0).integers(0, 256, (SHARDS, EACH, SIDE, SIDE, 3), np.uint8)
    for shard in range(SHARDS):
        samples = {}
        for number in range(EACH):
            content = io.BytesIO()
            Image.fromarray(noise[shard, number]).save(content, "PNG", compress_level=0)
            text = f"noise {shard}-{number}".encode()
            samples[f"{number:04d}"] = {"png": content.getvalue(), "txt": text}
        write_shard(folder / "shards" / f"shard-{shard}.tar", samples)
    write_folder_index(folder / "shards")
    return folder


@pytest.fixture(scope="module")
def bucket(packed: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Bucket, Path]]:
    require_fuse()
    with serve_bucket() as bucket:
        bucket.upload(packed)
        with mount_bucket(bucket.url, tmp_path_factory.mktemp("fuse") / "mount") as mount:
            yield bucket, mount


@pytest.fixture
def healthy_bucket(bucket: tuple[Bucket, Path]) -> Iterator[tuple[Bucket, Path]]:
    """The bucket without the faults of the previous test."""
    server, mount = bucket
    server.gets.clear()
    server.fault = Fault()
    yield server, mount
    server.fault = Fault()


def epoch(
    folder: Path, packed: Path, warnings: Path, config: DataConfig = DATA_CONFIG
) -> list[Batch]:
    """Return one epoch of the shards in ``folder``."""
    index = index_path(packed / "shards")
    [loader] = Cluster([folder / "shards"], 1, warnings, index).loaders(config, batch_size=BATCH)
    return rest_of_epoch(loader)


def read_ranges(gets: list[Get], name: str) -> list[Get]:
    return [get for get in gets if get.key == f"shards/{name}"]


@pytest.mark.slow
def test_training_reads_each_byte_once_and_in_order_after_the_first_batches(
    cli: Cli, tmp_path: Path, packed: Path, healthy_bucket: tuple[Bucket, Path]
) -> None:
    bucket, mount = healthy_bucket
    document = tiny_run(max_steps=STEPS, per_device_batch_size=BATCH).model_dump(mode="json")
    document["data"]["local"] = str(mount / "shards")
    run = tmp_path / "run.yaml"
    run.write_text(yaml.safe_dump(document))
    result = cli("submit", run, "--local", "--nodes", "1", network="loopback", timeout=DEADLINE)
    assert result.returncode == 0, result.stderr
    events = list(read_events(tmp_path / "local-runs" / "tiny" / "8px"))
    [read] = [event for event in events if event["kind"] == "epoch"]
    assert (read["samples"], read["repeated"], read["unseen"]) == (SHARDS * EACH, 0, 0)

    # All samples fit into one shuffle block. The next block is prefetched while one is in use, so
    # that of the second epoch is read as well.
    passes = 2
    # The mount requests one or two chunks for each sample of the first batches.
    early_chunks = 2 * EARLY_BATCHES * BATCH
    stored = 0
    for shard in sorted((packed / "shards").iterdir()):
        size = shard.stat().st_size
        stored += size
        gets = read_ranges(bucket.gets, shard.name)
        # A request that continues no other one starts a new read. The order in which requests
        # arrive is not compared: the kernel reads ahead, and a busy machine reorders its requests.
        ends = {get.start + get.sent for get in gets}
        new_reads = sum(get.start not in ends for get in gets)
        allowed = passes * -(-size // READ_BYTES) + early_chunks
        assert new_reads <= allowed, [vars(get) for get in bucket.gets]
    sent = sum(get.sent for get in bucket.gets if get.key.endswith(".tar"))
    assert stored < SHUFFLE_BLOCK_BYTES
    assert 0.99 * passes * stored <= sent
    assert sent <= 1.05 * passes * stored + early_chunks * CHUNK_BYTES


@pytest.mark.slow
def test_each_node_reads_its_share_of_a_channel(
    tmp_path: Path, packed: Path, healthy_bucket: tuple[Bucket, Path]
) -> None:
    """Two nodes, each with a mount of its own that is read-only; the prefix ends with a slash."""
    bucket, _ = healthy_bucket
    config = tiny_run(max_steps=2, per_device_batch_size=BATCH)
    nodes = create_nodes(tmp_path, config, 2)
    with ExitStack() as mounts:
        for rank, node in enumerate(nodes):
            channel = bucket.create_channel(f"node-{rank}", "shards/", rank, len(nodes))
            node.train_channel.parent.mkdir(parents=True)
            mounts.enter_context(mount_bucket(bucket.url, node.train_channel, channel))
            with pytest.raises(OSError, match="Read-only file system"):
                (node.train_channel / "new.tar").touch()
        events = run_nodes(nodes, 1)
    epoch = next(event for event in events if event["kind"] == "epoch")
    assert (epoch["samples"], epoch["unseen"]) == (SHARDS * EACH, 0)
    shards = {get.key for get in bucket.gets if get.key.endswith(".tar")}
    assert shards == {f"shard-{number}.tar" for number in range(SHARDS)}


def test_slow_and_truncated_responses_change_nothing(
    tmp_path: Path, packed: Path, healthy_bucket: tuple[Bucket, Path]
) -> None:
    bucket, mount = healthy_bucket
    plain = epoch(packed, packed, tmp_path / "plain")
    # Every tenth response ends early, as if the connection broke; the mount requests the rest.
    bucket.fault = Fault(0.05, lambda get: 1000 if len(bucket.gets) % 10 == 0 else None)
    faulty = epoch(mount, packed, tmp_path / "faulty")
    assert any(get.sent == 1000 for get in bucket.gets)
    assert [batch.captions for batch in faulty] == [batch.captions for batch in plain]
    for batch, other in zip(faulty, plain, strict=True):
        assert torch.equal(batch.pixels, other.pixels)
        assert not batch.bad_samples


@pytest.mark.slow
def test_unreadable_bytes_lose_only_their_samples(
    tmp_path: Path, packed: Path, healthy_bucket: tuple[Bucket, Path]
) -> None:
    bucket, mount = healthy_bucket

    def truncate(get: Get) -> int | None:
        affected = get.key == "shards/shard-1.tar" and get.start + 2**18 > READ_BYTES
        return 1000 if affected else None

    bucket.fault = Fault(truncate_to=truncate)
    tolerant = replace(DATA_CONFIG, max_bad_fraction=1.0)
    batches = epoch(mount, packed, tmp_path / "warnings", tolerant)
    bad = [sample for batch in batches for sample in batch.bad_samples]
    assert {(sample.shard, sample.reason) for sample in bad} == {("shard-1.tar", "read-error")}
    assert 10 < len(bad) < EACH / 2
    captions = {caption for batch in batches for caption in batch.captions}
    assert len(captions) == SHARDS * EACH - len(bad)
    with pytest.raises(DataError, match=r"read-error \d+\), in shard-1.tar; ") as error:
        epoch(mount, packed, tmp_path / "more-warnings")
    assert "\n" not in str(error.value)
