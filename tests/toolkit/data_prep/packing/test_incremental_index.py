"""``sm-train index`` reads only what it has to: new shards, headers, and nothing twice."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from sm_train.entrypoints.shards.shard_index import ShardIndex
from sm_train.entrypoints.storage.object_file import WINDOW_BYTES

from tests.conftest import Aws, Cli, clean_environment
from tests.support.cluster.training_jobs import sample, write_shard, write_shards
from tests.support.deadline import DEADLINE
from tests.support.moto_server import ACCOUNT
from tests.support.run_files import write_run
from tests.toolkit.data_prep.packing.on_sagemaker_support import start_node
from tests.toolkit.data_prep.packing.pack_options_support import read_objects, upload_folder


def index(cli: Cli, *arguments: object, **options: Any) -> dict[str, Any]:
    run = cli("index", *arguments, "--json", **options)
    assert run.returncode in (0, 3), run.stderr
    document: dict[str, Any] = json.loads(run.stdout)
    return document


@pytest.mark.slow
def test_only_new_and_changed_shards_are_read(cli: Cli, tmp_path: Path) -> None:
    write_shards(tmp_path / "shards", shards=3, each=3)
    write_shard(tmp_path / "shards" / "odd.tar", {"0": sample(0), "1": {"txt": b"no image"}})
    assert index(cli, "shards")["described"] == 4
    write_shard(tmp_path / "shards" / "shard-001.tar", {"new": sample(7)})
    write_shard(tmp_path / "shards" / "added.tar", {"more": sample(8), "bad": {"png": b"bad"}})
    (tmp_path / "shards" / "shard-002.tar").unlink()
    # What is known is not read: its bytes may change as long as its version does not.
    kept = tmp_path / "shards" / "shard-000.tar"
    status, content = kept.stat(), kept.read_bytes()
    kept.write_bytes(bytes(len(content)))
    os.utime(kept, ns=(status.st_atime_ns, status.st_mtime_ns))
    found = cli("index", "shards", "--json")
    document = json.loads(found.stdout)
    assert document["described"] == 2
    assert "8 samples in 4 shards (0.0 MB), of which 2 were read" in found.stderr
    kept.write_bytes(content)
    os.utime(kept, ns=(status.st_atime_ns, status.st_mtime_ns))
    # The result is that of an index from nothing.
    shutil.copytree(tmp_path / "shards", tmp_path / "other" / "shards")
    fresh = index(cli, "other/shards")
    assert (tmp_path / "index.parquet").read_bytes() == (
        tmp_path / "other" / "index.parquet"
    ).read_bytes()
    assert fresh["unusable"] == document["unusable"] != {}


@pytest.mark.slow
def test_other_files_to_look_for_read_everything_again(cli: Cli, tmp_path: Path) -> None:
    write_shards(tmp_path / "shards", shards=2, each=2)
    run = write_run(tmp_path, data={"uri": "s3://photos/shards/", "caption_key": "json"})
    assert index(cli, "shards")["described"] == 2
    assert index(cli, "shards", "--for", run)["described"] == 2


def test_a_killed_command_resumes_with_the_missing_shards(cli: Cli, tmp_path: Path) -> None:
    write_shards(tmp_path / "shards", shards=5, each=2)
    os.mkfifo(tmp_path / "shards" / "z.tar")  # opening it blocks
    process = subprocess.Popen(
        [sys.executable, "-m", "sm_train.toolkit", "index", "shards"],
        cwd=tmp_path,
        env=clean_environment(tmp_path) | {"PYTHONPATH": os.environ.get("PYTHONPATH", "")},
        start_new_session=True,
    )
    records = tmp_path / ".indexing" / "shards" / ".packing"
    deadline = time.monotonic() + DEADLINE
    while len(list(records.glob("shard-*.parquet"))) < 5:
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    (tmp_path / "shards" / "z.tar").unlink()
    write_shard(tmp_path / "shards" / "z.tar", {"last": sample(9)})
    # A finished record is used: its shard is not read again.
    finished = tmp_path / "shards" / "shard-003.tar"
    status, content = finished.stat(), finished.read_bytes()
    finished.write_bytes(bytes(len(content)))
    os.utime(finished, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert index(cli, "shards")["samples"] == 11
    assert ShardIndex(tmp_path / "index.parquet").samples.tolist() == [2, 2, 2, 2, 2, 1]
    assert not (tmp_path / ".indexing").exists()


def large_images(folder: Path, count: int) -> None:
    """Write a shard of images of about 1 MB."""
    samples = {}
    for number in range(count):
        noise = np.random.default_rng(number).integers(0, 256, (600, 600 + number, 3), np.uint8)
        path = folder.parent / "noise.jpg"
        Image.fromarray(noise).save(path, quality=97, subsampling=0)
        samples[f"{number:03}"] = {"jpg": path.read_bytes(), "txt": b"noise", "json": b"{}"}
    folder.mkdir(parents=True)
    write_shard(folder / "large.tar", samples)


@pytest.mark.slow
def test_headers_are_read_by_ranged_requests(cli: Cli, aws: Aws, tmp_path: Path) -> None:
    """The same keys, offsets and image sizes, from a fraction of the bytes."""
    large_images(tmp_path / "shards", 12)
    content = (tmp_path / "shards" / "large.tar").read_bytes()
    aws.make_bucket("photos", **{"shards/large.tar": content})
    options = {"network": "loopback", "env": aws.environment}
    full = cli("--region", "us-east-1", "index", "shards")
    assert full.returncode == 0, full.stderr
    aws.requests.clear()
    read = cli("--region", "us-east-1", "index", "s3://photos/shards/", "--headers-only", **options)
    assert read.returncode == 0, read.stderr
    shard = ("GET", "/photos/shards/large.tar")
    requests = [request for request in aws.requests if request[:2] == shard]
    assert len(requests) <= 12 + 2
    assert len(requests) * WINDOW_BYTES < len(content) / 4
    stored = read_objects(aws, "photos", "")
    (tmp_path / "ranged.parquet").write_bytes(stored["index.parquet"])
    expected = ShardIndex(tmp_path / "index.parquet").shard(0)
    found = ShardIndex(tmp_path / "ranged.parquet").shard(0)
    assert found.blake3 != expected.blake3
    for name in ("name", "bytes", "keys", "offsets", "widths", "heights"):
        assert getattr(found, name) == getattr(expected, name), name


@pytest.mark.slow
@pytest.mark.integration
def test_two_nodes_on_sagemaker_write_the_same_index(cli: Cli, aws: Aws, tmp_path: Path) -> None:
    write_shards(tmp_path / "shards" / "a", shards=4, each=2)
    for prefix in ("first/shards/", "second/shards/"):
        upload_folder(aws, tmp_path / "shards", prefix)
    aws.make_bucket("ai-bucket")
    run = write_run(tmp_path, bucket="ai-bucket", role=f"arn:aws:iam::{ACCOUNT}:role/own")
    options = {"network": "loopback", "env": aws.environment, "timeout": DEADLINE}
    arguments = ("--region", "us-east-1", "index", "s3://raw/first/shards/")
    on = ("--on", "sagemaker", "--for", run, "--instances", "2")
    unconfirmed = cli(*arguments, *on, **options)
    assert unconfirmed.returncode == 2
    assert "4 shards" in unconfirmed.stderr
    assert "if a vCPU reads 100 MB/s; at most $" in unconfirmed.stderr
    document = json.loads(cli(*arguments, *on, "--dry-run", "--json", **options).stdout)
    assert (document["shards"], document["known"]) == (4, 0)
    assert aws.bodies("CreateProcessingJob") == []
    sent = cli(*arguments, *on, "--yes", **options)
    assert sent.returncode == 0, sent.stderr
    [body] = aws.bodies("CreateProcessingJob")
    nodes = [start_node(tmp_path, aws, body, rank) for rank in (0, 1)]
    logs = [node.communicate(timeout=DEADLINE)[0] for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], logs
    local = cli("--region", "us-east-1", "index", "s3://raw/second/shards/", **options)
    assert local.returncode == 0, local.stderr
    stored = read_objects(aws, "raw", "")
    assert stored["first/index.parquet"] == stored["second/index.parquet"]
    assert not [name for name in stored if ".indexing" in name]
    again = cli(*arguments, *on, "--yes", **options)
    assert "up to date: nothing was started" in again.stderr
