"""Measures packing as images arrive: what Lambda's functions do, in their own processes.

Staging and sealing are compared in seconds of processor time for each image, because the S3 of this
machine (moto, in a process of its own) is slower than S3. The peer is what tutorials show: a
function that gets the image and its caption with boto3, verifies it with Pillow and puts a sample
that webdataset's TarWriter has written; and one that copies samples into a tar with tarfile. These
pack an image twice when a message is repeated.

The index is written at two sizes; the line through both gives its time and memory at 10⁹ samples.

    python benchmarks/stream.py [--images 400]
"""

from __future__ import annotations

import argparse
import io
import multiprocessing
import os
import resource
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

os.environ["OPENBLAS_NUM_THREADS"] = "1"  # as the template sets it

import boto3
import psutil
import webdataset
from botocore.config import Config
from photos import photo
from PIL import Image
from sm_train.entrypoints.data_prep.packing.shard_builder import encode_record, open_index
from sm_train.entrypoints.data_prep.streaming.arrivals import Arrival
from sm_train.entrypoints.data_prep.streaming.lambda_handler import TARGET_BYTES
from sm_train.entrypoints.data_prep.streaming.sealing import Sealer
from sm_train.entrypoints.data_prep.streaming.staging import Stager
from sm_train.entrypoints.data_prep.streaming.stream_index import StreamIndexer
from sm_train.entrypoints.data_prep.streaming.stream_state import (
    DONE,
    S3_REQUESTS,
    numbered,
    record_name,
)
from sm_train.entrypoints.images.decoder_pool import DecoderPool
from sm_train.entrypoints.job_interface.index_location import streamed_shard
from sm_train.entrypoints.shards.shard_format import Shard
from sm_train.entrypoints.shards.shard_index import IndexWriter
from sm_train.entrypoints.storage.storage import S3Prefix, write_file
from sm_train.entrypoints.storage.store import S3Access
from sm_train.toolkit.data_prep.streaming.streaming_price import MEMORY_GB, streaming_usd

SIDE = 1024
"""Pixels of the images, each of about 0.45 MB."""

SHARD_SAMPLES = 20_000

INDEX_SHARDS = (1000, 3000)
"""Sizes of the index at which it is written: 20 and 60 million samples."""

DIFFERENT_SHARDS = 50
"""Shards that differ; the index repeats them."""

VCPUS = float(MEMORY_GB) * 1024 / 1769
"""Lambda gives a function one vCPU for 1,769 MB (developer guide, Configure function memory)."""


def main() -> None:
    """Measure staging, sealing and the index."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--images", type=int, default=400)
    images = parser.parse_args().images
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    with moto_server() as url:
        os.environ |= {
            "AWS_ENDPOINT_URL": url,
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_ACCESS_KEY_ID": "testing",
            "AWS_SECRET_ACCESS_KEY": "testing",
        }
        size = measure_images(images)
        measure_index()
    price = streaming_usd(10**6, size * 10**6, TARGET_BYTES)
    print(f"a million images of {size / 1e6:.2f} MB: ${price:.2f} (us-east-1)")


@contextmanager
def moto_server() -> Iterator[str]:
    """Run moto in a process of its own; yield its address."""
    port = 5057
    process = subprocess.Popen(
        [sys.executable, "-m", "moto.server", "-p", str(port)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        time.sleep(5)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()


def measure_images(images: int) -> int:
    """Compare staging and sealing with the peer; return the mean size of an image."""
    s3 = boto3.client("s3")
    for bucket in ("raw", "ours", "peer"):
        s3.create_bucket(Bucket=bucket)
    photos = [photo(SIDE, number) for number in range(16)]
    for number in range(images):
        s3.put_object(Bucket="raw", Key=f"{number}.jpg", Body=photos[number % 16])
        s3.put_object(Bucket="raw", Key=f"{number}.txt", Body=b"a photo")
    size = sum(map(len, photos)) // 16
    for name, ours, theirs, peer in (
        ("staging", stage, stage_like_a_tutorial, "boto3, Pillow and webdataset"),
        ("sealing", seal, seal_like_a_tutorial, "boto3 and tarfile"),
    ):
        seconds = [processor_seconds(work, images) / images for work in (ours, theirs)]
        rate = VCPUS / seconds[0]
        print(
            f"{name}: {1000 * seconds[0]:.1f} ms of a processor for an image of "
            f"{size / 1e6:.2f} MB, {peer} {1000 * seconds[1]:.1f} ms: "
            f"{seconds[1] / seconds[0]:.2f} × the speed; {rate:,.0f} images/s in a function of "
            f"{float(MEMORY_GB):.1f} GB, if S3 is as fast"
        )
    return size


def processor_seconds(work: Callable[[int], None], images: int) -> float:
    """Return the processor time of ``work`` in a new process and its children, in seconds."""
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_measured, args=(work, images, sender))
    process.start()
    seconds: float = receiver.recv()
    process.join()
    return seconds


def _measured(work: Callable[[int], None], images: int, sender: Any) -> None:
    before = _used()
    work(images)
    sender.send(_used() - before)


def _used() -> float:
    """Return the processor time of this process and of its children, which may be running."""
    process = psutil.Process()
    family = [process, *process.children(recursive=True)]
    return sum(sum(member.cpu_times()[:2]) for member in family)


def stage(images: int) -> None:
    """Stage the images as the function does."""
    destination = S3Prefix("ours", "set/", S3Access())
    stager = Stager(destination, decoders=DecoderPool(os.cpu_count() or 1))
    s3 = boto3.client("s3")
    etags = {
        entry["Key"]: entry["ETag"].strip('"')
        for page in s3.get_paginator("list_objects_v2").paginate(Bucket="raw")
        for entry in page["Contents"]
    }

    def stage_one(number: int) -> None:
        key = f"{number}.jpg"
        assert stager.stage(Arrival("raw", key, etags[key], 450_000)) == "staged"

    with ThreadPoolExecutor(S3_REQUESTS) as pool:
        list(pool.map(stage_one, range(images)))


def stage_like_a_tutorial(images: int) -> None:
    """Get an image and its caption, verify it, and put a sample."""
    s3 = boto3.client("s3", config=Config(max_pool_connections=S3_REQUESTS))

    def stage_one(number: int) -> None:
        image = s3.get_object(Bucket="raw", Key=f"{number}.jpg")["Body"].read()
        caption = s3.get_object(Bucket="raw", Key=f"{number}.txt")["Body"].read()
        with Image.open(io.BytesIO(image)) as opened:
            opened.load()
            metadata = {"width": opened.width, "height": opened.height}
        content = io.BytesIO()
        with webdataset.TarWriter(content) as writer:
            sample = {"__key__": f"{number:08d}", "jpg": image, "txt": caption, "json": metadata}
            writer.write(sample)
        s3.put_object(Bucket="peer", Key=f"staged/{number}", Body=content.getvalue())

    with ThreadPoolExecutor(S3_REQUESTS) as pool:
        list(pool.map(stage_one, range(images)))


def seal(images: int) -> None:
    """Seal all staged samples into a shard."""
    assert Sealer(S3Prefix("ours", "set/", S3Access()), 10**12).seal(flush=True) == 1


def seal_like_a_tutorial(images: int) -> None:
    """Read all samples and upload them as one tar."""
    s3 = boto3.client("s3", config=Config(max_pool_connections=S3_REQUESTS))

    def read(number: int) -> bytes:
        content: bytes = s3.get_object(Bucket="peer", Key=f"staged/{number}")["Body"].read()
        return content

    with tempfile.TemporaryFile() as file, ThreadPoolExecutor(S3_REQUESTS) as pool:
        with tarfile.open(fileobj=file, mode="w") as shard:
            for content in pool.map(read, range(images)):
                with tarfile.open(fileobj=io.BytesIO(content)) as sample:
                    for member in sample:
                        shard.addfile(member, sample.extractfile(member))
        file.seek(0)
        s3.upload_fileobj(file, "peer", "shards/000000.tar")


def measure_index() -> None:
    """Print time and memory of adding a shard to an index at two sizes, and at 10⁹ samples."""
    boto3.client("s3").create_bucket(Bucket="index")
    found = []
    for shards in INDEX_SHARDS:
        context = multiprocessing.get_context("spawn")
        receiver, sender = context.Pipe(duplex=False)
        destination = S3Prefix("index", f"{shards}/", S3Access())
        prepare_index(destination, shards)
        process = context.Process(target=_add_to_index, args=(destination, sender))
        process.start()
        samples = shards * SHARD_SAMPLES
        seconds, megabytes = receiver.recv()
        process.join()
        size = destination.size("index.parquet") or 0
        found.append((samples, seconds, megabytes))
        print(
            f"adding a shard to an index of {samples:,} samples ({size / samples:.1f} bytes each): "
            f"{seconds:.1f} s, {megabytes:.0f} MB"
        )
    (first, *low), (second, *high) = found
    line = [
        left + (right - left) * (10**9 - first) / (second - first)
        for left, right in zip(low, high, strict=True)
    ]
    print(f"by the line through both, 10⁹ samples: {line[0]:.0f} s, {line[1]:.0f} MB")


def prepare_index(destination: S3Prefix, shards: int) -> None:
    """Write an index of ``shards``, and the record of one more."""
    part = io.BytesIO()
    with IndexWriter(part) as writer:
        for number in range(DIFFERENT_SHARDS):
            writer.add(described(number))
    rows = list(open_index(part.getvalue(), "the part").shard_rows())
    with tempfile.TemporaryFile() as file:
        with IndexWriter(file, inputs="0" * 64) as writer:
            for _ in range(shards // DIFFERENT_SHARDS):
                for group in rows:
                    writer.add_rows(group)
        file.seek(0)
        assert destination.replace_if("index.parquet", file, None)
    shard = described(shards)
    shard = Shard(**(vars(shard) | {"columns": {"source": shard.keys}}))
    record = encode_record(shard, columns={"source": "text"})
    write_file(destination, record_name(shards), record)
    destination.create_if_absent(numbered(DONE, shards), b"")


def described(number: int) -> Shard:
    """Return a shard of samples of different sizes, which does not exist."""
    import numpy as np

    generator = np.random.default_rng(number)
    offsets = (generator.integers(100, 400, SHARD_SAMPLES) * 512).cumsum().tolist()
    widths, heights = generator.integers(256, 4096, (2, SHARD_SAMPLES)).tolist()
    keys = tuple(f"s{number:06d}-{row:06d}" for row in range(SHARD_SAMPLES))
    return Shard(
        streamed_shard(number),
        offsets[-1] + 1024,
        f"{number:064x}",
        keys,
        (0, *offsets),
        tuple(widths),
        tuple(heights),
    )


def _add_to_index(destination: S3Prefix, sender: Any) -> None:
    started = time.perf_counter()
    assert StreamIndexer(destination, 10**9).update() == 1
    seconds = time.perf_counter() - started
    sender.send((seconds, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1000))


if __name__ == "__main__":
    main()
