"""Measures `sm-train index`: bytes per second, headers alone, and its end at 10⁸ samples.

The peer lists the same shards with Python's tarfile and hashes them with BLAKE3, in two processes:
it finds no image sizes, no damage and no unusable samples. The physical limit is BLAKE3 alone, in
two processes, of files that are in memory.

The end merges the records of all shards; the line through two sizes gives its time and memory at
10⁸ samples.

    python benchmarks/index.py [--shards 8] [--mb 256]
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import sys
import tarfile
import tempfile
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import IO

from blake3 import blake3
from photos import photo
from sm_train.entrypoints.data_prep.indexing.build_index import finalize, versions_digest
from sm_train.entrypoints.data_prep.indexing.index_plan import (
    IndexPlan,
    SampleCheck,
    encode_unusable,
)
from sm_train.entrypoints.data_prep.packing.shard_builder import encode_record, record_name
from sm_train.entrypoints.shards.shard_format import ListedShard, Shard
from sm_train.entrypoints.shards.shard_writer import ShardWriter, sample_parts
from sm_train.entrypoints.storage.storage import LocalFolder, write_file
from sm_train.entrypoints.storage.store import S3Access
from sm_train.toolkit.data_prep.packing.index import IndexJob, index_shards

PROCESSES = 2
SAMPLES_PER_SHARD = 5000


def main() -> None:
    """Measure reading and the end."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shards", type=int, default=8)
    parser.add_argument("--mb", type=int, default=256)
    options = parser.parse_args()
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    with tempfile.TemporaryDirectory() as temporary:
        measure_reading(Path(temporary), options.shards, options.mb * 10**6)
        measure_end(Path(temporary))


def measure_reading(folder: Path, shards: int, size: int) -> None:
    """Compare the bytes per second of reading everything, and the time of headers alone."""
    (folder / "shards").mkdir()
    photos = [photo(512, number) for number in range(32)]
    for number in range(shards):
        name = f"{number:03d}.tar"
        with (
            LocalFolder(folder / "shards").atomic_writer(name) as sink,
            ShardWriter(sink, name) as writer,
        ):
            sample = written = 0
            while written < size:
                parts = sample_parts(f"{sample:06d}", photos[sample % 32], "photo", "jpeg", b"{}")
                writer.append(f"{sample:06d}", *parts)
                written += sum(map(len, parts))
                sample += 1
            writer.finish()
    paths = sorted((folder / "shards").iterdir())
    total = sum(path.stat().st_size for path in paths)
    seconds = {}
    steps: tuple[tuple[str, Callable[[], None]], ...] = (
        ("BLAKE3 alone", lambda: in_processes(hash_files, paths)),
        ("tarfile and BLAKE3", lambda: in_processes(list_and_hash, paths)),
        ("sm-train index", lambda: index(folder, headers_only=False)),
        ("sm-train index --headers-only", lambda: index(folder, headers_only=True)),
    )
    for name, work in steps:
        started = time.perf_counter()
        work()
        seconds[name] = time.perf_counter() - started
        print(f"{name}: {seconds[name]:.1f} s, {total / seconds[name] / 1e6:,.0f} MB/s")
    for peer in ("BLAKE3 alone", "tarfile and BLAKE3"):
        print(
            f"sm-train index: {seconds[peer] / seconds['sm-train index']:.2f} × the speed of {peer}"
        )


def index(folder: Path, *, headers_only: bool) -> None:
    """Index the shards from nothing."""
    (folder / "index.parquet").unlink(missing_ok=True)
    job = IndexJob(str(folder / "shards"), SampleCheck(), headers_only, S3Access())
    index_shards(job, PROCESSES, lambda done, total: None)


def in_processes(function: Callable[[list[Path]], None], paths: list[Path]) -> None:
    """Call a function with a half of the paths in each of two processes."""
    context = multiprocessing.get_context("spawn")
    parts = [paths[rank::PROCESSES] for rank in range(PROCESSES)]
    processes = [context.Process(target=function, args=(part,)) for part in parts]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
        if process.exitcode:
            sys.exit(f"a process ended with {process.exitcode}")


def hash_files(paths: list[Path]) -> None:
    """Compute the digests of files."""
    for path in paths:
        digest = blake3()
        with path.open("rb") as file:
            while content := file.read(1 << 20):
                digest.update(content)


def list_and_hash(paths: list[Path]) -> None:
    """List the members of tars and compute the digests of the files."""
    for path in paths:
        with tarfile.open(path) as tar:
            sum(member.size for member in tar)
    hash_files(paths)


def measure_end(folder: Path) -> None:
    """Print the time and the memory of the end at two sizes, and at 10⁸ samples by their line."""
    found = []
    for count in (100, 400):
        plan = write_records(folder / f"end-{count}", count)
        tracemalloc.start()
        started = time.perf_counter()
        header = finalize(plan, discard)
        seconds = time.perf_counter() - started
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert header is not None
        found.append((header.samples, seconds, peak / 1e6))
        print(f"end of {header.samples:,} samples: {seconds:.1f} s, {peak / 1e6:.0f} MB")
    (first, *low), (second, *high) = found
    line = [
        left + (right - left) * (10**8 - first) / (second - first)
        for left, right in zip(low, high, strict=True)
    ]
    print(f"by the line through both, 10⁸ samples: {line[0]:.0f} s, {line[1]:.0f} MB")


def write_records(folder: Path, count: int) -> IndexPlan:
    """Write the records of ``count`` shards that do not exist; return their plan."""
    generator = random.Random(0)
    listed = tuple(ListedShard(f"{number:06d}.tar", 10**9, str(number)) for number in range(count))
    options = {"samples": {}, "compressed": [], "versions": versions_digest(listed)}
    plan = IndexPlan(
        *(str(folder), "shards", SampleCheck(), False, options, listed, frozenset(), None),
        S3Access(),
    )
    sides = [generator.randrange(256, 4096) for _ in range(SAMPLES_PER_SHARD)]
    for number, shard in enumerate(listed):
        described = Shard(
            shard.name,
            shard.bytes,
            f"{number:064x}",
            tuple(f"{number * SAMPLES_PER_SHARD + row:09d}" for row in range(SAMPLES_PER_SHARD)),
            tuple(range(0, 512 * (SAMPLES_PER_SHARD + 1), 512)),
            tuple(sides),
            tuple(reversed(sides)),
        )
        record = encode_record(described, options={"unusable": encode_unusable({})})
        write_file(plan.state, record_name(shard.name), record)
    return plan


def discard(file: IO[bytes]) -> None:
    """Leave the index where it is."""


if __name__ == "__main__":
    main()
