"""Measures the steps of ``sm-train remove``, and extrapolates the index to 100 million samples.

Finding samples by key and switching the index pass over the whole index. Each is measured in a
process of its own, for two numbers of samples, with the largest resident set size of the process
less that before (getrusage(2)). The peer is pyarrow, which reads the file and writes it again.

A shard is rewritten without every hundredth sample. The peers are ``tar --delete`` and, as the
physical limit, ``cp --reflink=never`` of the file.

    python benchmarks/removal.py [--samples 2000000 10000000]
"""

from __future__ import annotations

import argparse
import io
import json
import os
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from resource import RUSAGE_SELF, getrusage

import numpy as np
import pyarrow.parquet as pq
from selection import SHARD_SAMPLES, write
from sm_train.entrypoints.data_prep.packing.describe_shard import describe_shard
from sm_train.entrypoints.shards.removal_list import RemovalList
from sm_train.entrypoints.shards.shard_index import ShardIndex, write_index
from sm_train.entrypoints.storage.store import S3Access
from sm_train.toolkit.data_prep.packing.shard_set import ShardSet, find_shard_set
from sm_train.toolkit.data_prep.removal.find_samples import find_samples
from sm_train.toolkit.data_prep.removal.rewrite_shards import Rewrite, rewrite_shards

FINAL_SAMPLES = 100_000_000
REMOVED_SHARDS = 50
TAR_SAMPLES, IMAGE_BYTES = 5_000, 200_000


def main() -> None:
    """Measure each number of samples and a shard, then print ratios."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples", type=int, nargs=2, default=[2_000_000, 10_000_000])
    parser.add_argument("--step", nargs=2, metavar=("STEP", "FOLDER"))
    options = parser.parse_args()
    if options.step:
        step, folder = options.step
        print(json.dumps(measure(STEPS[step], Path(folder))))
        return
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    index_steps(options.samples)
    shard_steps()


def index_steps(numbers: list[int]) -> None:
    print(f"{'samples':>12}  {'step':<9}{'seconds':>9}{'µs/sample':>11}{'peak MB':>9}")
    found: dict[str, list[tuple[int, float, float]]] = {}
    for samples in numbers:
        with tempfile.TemporaryDirectory() as folder:
            write(Path(folder), samples // SHARD_SAMPLES)
            for step in STEPS:
                command = [sys.executable, __file__, "--step", step, folder]
                run = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
                seconds, peak = json.loads(run.stdout)
                each = seconds / samples * 1e6
                print(f"{samples:>12,}  {step:<9}{seconds:>9.2f}{each:>11.3f}{peak / 1e6:>9.0f}")
                found.setdefault(step, []).append((samples, seconds, peak))
    for step, [(few, begin, low), (many, end, high)] in found.items():
        factor = (FINAL_SAMPLES - many) / (many - few)
        seconds, peak = end + (end - begin) * factor, high + max(0.0, high - low) * factor
        print(f"{step}: {FINAL_SAMPLES:,} samples: {seconds:.0f} s and {peak / 1e6:.0f} MB")
    own, peer = (found[step][1][1] for step in ("switch", "pyarrow"))
    print(f"the index is switched in {own / peer:.2f} × the time of pyarrow")


def measure(step: Callable[[Path], None], folder: Path) -> tuple[float, float]:
    before, started = getrusage(RUSAGE_SELF).ru_maxrss, time.perf_counter()
    step(folder)
    return time.perf_counter() - started, 1024 * (getrusage(RUSAGE_SELF).ru_maxrss - before)


def find(folder: Path) -> None:
    """Find 1,000 samples by their keys."""
    index = ShardIndex(folder / "index.parquet")
    numbers = np.random.default_rng(1).choice(index.header.samples, 1_000, replace=False)
    keys = [f"{number:09d}" for number in numbers.tolist()]
    shards = find_shard_set(str(folder), S3Access())
    assert len(find_samples(shards, index, keys, None, RemovalList())) == len(keys)


def switch(folder: Path) -> None:
    """Write the index with other shards in place of some."""
    index = ShardIndex(folder / "index.parquet")
    step = max(1, len(index) // REMOVED_SHARDS)
    replaced = {index.names[row]: index.shard(row) for row in range(0, len(index), step)}
    with tempfile.TemporaryFile(dir=folder) as file:
        index.write_with(file, replaced)


def copy_rows(folder: Path) -> None:
    """Read and write the same row groups with pyarrow alone."""
    source = pq.ParquetFile(folder / "index.parquet")
    with pq.ParquetWriter(folder / "copy.parquet", source.schema_arrow, compression="zstd") as out:
        for group in range(source.num_row_groups):
            out.write_table(source.read_row_group(group))


STEPS = {"find": find, "switch": switch, "pyarrow": copy_rows}


def shard_steps() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        shards = write_tar(folder)
        path = folder / "shards" / "a.tar"
        index = ShardIndex(folder / "index.parquet")
        removed = index.keys(0)[::100]
        names = folder / "names"
        names.write_text("".join(f"{key}.jpg\n{key}.txt\n" for key in removed))
        rewrite = Rewrite("a.tar", "a-r1.tar", frozenset(removed))
        copy, tar = folder / "copy.tar", folder / "tar.tar"

        def delete() -> None:
            subprocess.run(["cp", path, tar], check=True)
            subprocess.run(["tar", "--delete", "-f", tar, "-T", names], check=True)

        steps: dict[str, Callable[[], object]] = {
            "cp": lambda: subprocess.run(["cp", "--reflink=never", path, copy], check=True),
            "rewrite": lambda: rewrite_shards(shards, index, [rewrite], lambda done: None),
            "tar --delete": delete,
        }
        seconds = {}
        for step, run in steps.items():
            os.sync()
            started = time.perf_counter()
            run()
            os.sync()
            seconds[step] = time.perf_counter() - started
            print(f"{step:<13}{path.stat().st_size / 1e6 / seconds[step]:>8,.0f} MB/s")
        own = seconds["rewrite"]
        print(f"a shard is rewritten in {own / seconds['cp']:.2f} × the time of cp and in ", end="")
        print(f"{own / seconds['tar --delete']:.2f} × that of tar --delete")


def write_tar(folder: Path) -> ShardSet:
    """Write a shard of random images, and its index."""
    rng = np.random.default_rng(0)
    (folder / "shards").mkdir()
    path = folder / "shards" / "a.tar"
    with tarfile.open(path, "w") as tar:
        for number in range(TAR_SAMPLES):
            for extension, content in (("jpg", rng.bytes(IMAGE_BYTES)), ("txt", b"a picture")):
                member = tarfile.TarInfo(f"{number:09d}.{extension}")
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))
    shard = describe_shard(path, "a.tar", find_missing=False).shard
    write_index(folder / "index.parquet", [shard])
    return find_shard_set(str(folder), S3Access())


if __name__ == "__main__":
    main()
