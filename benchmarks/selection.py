"""Measures what ``data.where`` adds to a job's start, and extrapolates it to 100 million samples.

Each process of a job evaluates the condition on the columns of the index. The peer is DuckDB alone
on a flat Parquet file with the same columns, which counts the rows that fulfil it. Each is measured
in a process of its own, with the largest resident set size of the process less that before
(getrusage(2)).

    python benchmarks/selection.py [--samples 2000000 10000000]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from resource import RUSAGE_SELF, getrusage

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from sm_train.entrypoints.shards.selection import select_samples
from sm_train.entrypoints.shards.shard_format import Shard
from sm_train.entrypoints.shards.shard_index import IndexWriter, ShardIndex

SHARD_SAMPLES, FINAL_SAMPLES = 20_000, 100_000_000
LICENSES = np.array(["CC0", "CC-BY", "agency", "contributor agreement"])
WHERE = "license IN ('CC0', 'CC-BY') AND contributor < 5000"


def main() -> None:
    """Measure each number of samples, then print slopes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples", type=int, nargs=2, default=[2_000_000, 10_000_000])
    parser.add_argument("--step", nargs=2, metavar=("STEP", "FOLDER"))
    options = parser.parse_args()
    if options.step:
        step, folder = options.step
        print(json.dumps(STEPS[step](Path(folder))))
        return
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    print(f"{'samples':>12}  {'step':<11}{'seconds':>9}{'µs/sample':>11}{'peak MB':>9}")
    found: dict[str, list[tuple[int, float, float]]] = {}
    for samples in options.samples:
        with tempfile.TemporaryDirectory() as folder:
            size = write(Path(folder), samples // SHARD_SAMPLES)
            print(f"{samples:>12,}  index: {size / samples:.1f} bytes a sample")
            for step in STEPS:
                command = [sys.executable, __file__, "--step", step, folder]
                run = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
                seconds, peak = json.loads(run.stdout)
                each = seconds / samples * 1e6
                print(f"{samples:>12,}  {step:<11}{seconds:>9.2f}{each:>11.3f}{peak / 1e6:>9.0f}")
                found.setdefault(step, []).append((samples, seconds, peak))
    for step, [(few, begin, low), (many, end, high)] in found.items():
        factor = (FINAL_SAMPLES - many) / (many - few)
        seconds, peak = end + (end - begin) * factor, high + max(0.0, high - low) * factor
        print(f"{step}: {FINAL_SAMPLES:,} samples: {seconds:.0f} s and {peak / 1e6:.0f} MB")
    own, peer = (found[step][1][1] for step in ("data.where", "DuckDB"))
    print(f"data.where takes {own / peer:.1f} × as long as DuckDB on a flat file")


def shards(count: int) -> Iterator[Shard]:
    """Yield shards of images by some contributors, as an agency uploads them."""
    rng = np.random.default_rng(0)
    for number in range(count):
        first = number * SHARD_SAMPLES
        sizes = 512 * rng.integers(300, 700, SHARD_SAMPLES)
        offsets = np.concatenate([[0], np.cumsum(sizes)]).tolist()
        contributors = np.sort(rng.integers(0, 10_000, SHARD_SAMPLES))
        yield Shard(
            name=f"{number:06d}.tar",
            bytes=offsets[-1] + 1024,
            blake3="00" * 32,
            keys=tuple(f"{first + sample:09d}" for sample in range(SHARD_SAMPLES)),
            offsets=tuple(offsets),
            columns={
                "license": tuple(LICENSES[contributors % 4].tolist()),
                "contributor": tuple(contributors.tolist()),
            },
        )


def write(folder: Path, count: int) -> int:
    """Write the index and the flat file; return the size of the index."""
    schema = pa.schema([("license", pa.string()), ("contributor", pa.int64())])
    with (
        (folder / "index.parquet").open("wb") as file,
        IndexWriter(file, columns={"license": "text", "contributor": "integer"}) as writer,
        pq.ParquetWriter(folder / "flat.parquet", schema, compression="zstd") as flat,
    ):
        for shard in shards(count):
            writer.add(shard)
            flat.write_table(pa.table(dict(shard.columns), schema))
    return (folder / "index.parquet").stat().st_size


def evaluate(folder: Path) -> tuple[float, float]:
    before, started = getrusage(RUSAGE_SELF).ru_maxrss, time.perf_counter()
    selection = select_samples(ShardIndex(folder / "index.parquet"), WHERE)
    assert 0 < selection.counts.sum() < selection.sizes.sum()
    return time.perf_counter() - started, 1024 * (getrusage(RUSAGE_SELF).ru_maxrss - before)


def count_alone(folder: Path) -> tuple[float, float]:
    import duckdb

    before, started = getrusage(RUSAGE_SELF).ru_maxrss, time.perf_counter()
    connection = duckdb.connect(config={"threads": 2})
    query = f"SELECT count(*) FROM read_parquet('{folder / 'flat.parquet'}') WHERE {WHERE}"
    [(count,)] = connection.sql(query).fetchall()
    assert count > 0
    return time.perf_counter() - started, 1024 * (getrusage(RUSAGE_SELF).ru_maxrss - before)


STEPS = {"data.where": evaluate, "DuckDB": count_alone}


if __name__ == "__main__":
    main()
