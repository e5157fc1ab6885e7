"""Seconds from the first ``next()`` to the first batches, from a mount with 30 ms for each request.

The shards have an index; rclone mounts them from a loopback server, read-only and without a cache,
as FastFile mounts a channel. The physical limit is the time of a batch's requests by the loader's
threads: two for each sample of 0.25 MB.

    PYTHONPATH=. python benchmarks/first_batch.py
"""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path

import webdataset
from photos import photo
from sm_train.entrypoints.data_loading.loader import READ_THREADS
from sm_train.entrypoints.job_interface.index_location import index_path

from tests.support.data_channels import Cluster, write_folder_index
from tests.support.s3_mount import Fault, mount_bucket, serve_bucket

SIDE, RESOLUTION, IMAGES, SHARDS, SHARD_SAMPLES = 768, 512, 16, 4, 300
LATENCY_SECONDS, BATCHES = 0.03, 6
MODEL_SECONDS = 5
"""Between opening the loader and its first batch, a job builds its model."""


def main() -> None:
    """Measure several batch sizes, each with a new mount."""
    with tempfile.TemporaryDirectory() as name, serve_bucket() as bucket:
        folder = Path(name)
        write_data(folder / "data")
        bucket.upload(folder / "data")
        bucket.fault = Fault(LATENCY_SECONDS)
        for batch_size in (8, 16, 64):
            with mount_bucket(bucket.url, folder / f"mount-{batch_size}") as mount:
                measure(mount / "shards", folder / f"scan-{batch_size}", batch_size)


def write_data(folder: Path) -> None:
    """Write the shards and their index."""
    shards = folder / "shards"
    shards.mkdir(parents=True)
    images = [photo(SIDE, number) for number in range(IMAGES)]
    for shard in range(SHARDS):
        with webdataset.TarWriter(str(shards / f"{shard}.tar")) as writer:
            for number in range(SHARD_SAMPLES):
                image = images[number % IMAGES]
                writer.write({"__key__": f"{shard}-{number:03d}", "jpg": image, "txt": b"a photo"})
    write_folder_index(shards)


def measure(channel: Path, scan_folder: Path, batch_size: int) -> None:
    """Print the seconds until each of the first batches."""
    cluster = Cluster([channel], 1, scan_folder, index_path(channel))
    [loader] = cluster.loaders(resolution=RESOLUTION, batch_size=batch_size, decode_workers=2)
    time.sleep(MODEL_SECONDS)
    batches = iter(loader)
    started = time.perf_counter()
    seconds = []
    for _ in range(BATCHES):
        next(batches)
        seconds.append(time.perf_counter() - started)
    del batches  # ends the loader's process
    limit = -(-2 * batch_size // READ_THREADS) * LATENCY_SECONDS
    times = ", ".join(f"{each:.2f}" for each in seconds)
    print(f"batch {batch_size:>2}: {times} s; a batch's requests take {limit:.2f} s")


if __name__ == "__main__":
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    main()
