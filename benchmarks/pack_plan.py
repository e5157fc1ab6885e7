"""Measures the memory and the time of planning a pack, and extrapolates them to 100 million images.

The source is a synthetic table of S3 addresses with captions, sizes and a score, so no request is
sent. Two processes are measured apart: "laptop" sorts the table, assigns shards and writes the
plan; "node" reads the stored plan and iterates over the inputs of all shards, more than a node of a
pack ever does. Memory is the largest resident set size of the process (getrusage(2)).

    python benchmarks/pack_plan.py
    python benchmarks/pack_plan.py --rows 1000000 10000000 --jsonl-rows 1000000
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from resource import RUSAGE_SELF, getrusage

import pyarrow as pa
import pyarrow.parquet as pq
from sm_train.entrypoints.data_prep.packing.stored_plan import read_plan, store_plan
from sm_train.entrypoints.storage.storage import LocalFolder
from sm_train.entrypoints.storage.store import S3Access

CHUNK = 100_000
FINAL_ROWS = 100_000_000
WHERE = "aesthetic > 2"


def main() -> None:
    """Measure each number of rows in processes of their own, then print slopes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, nargs=2, default=[1_000_000, 10_000_000])
    parser.add_argument("--jsonl-rows", type=int, default=1_000_000)
    parser.add_argument("--step", nargs=3, metavar=("STEP", "TABLE", "FOLDER"))
    options = parser.parse_args()
    if options.step:
        step, table, folder = options.step
        print(json.dumps(STEPS[step](Path(table), Path(folder))))
        return
    load = os.getloadavg()[0]
    print(f"{os.cpu_count()} cores, load {load:.1f}")
    print(f"{'table':<9}{'rows':>12}  {'step':<23}{'seconds':>9}{'µs/image':>10}{'peak MB':>9}")
    cases = [("parquet", rows) for rows in options.rows] + [("jsonl", options.jsonl_rows)]
    peaks: dict[tuple[str, str], list[tuple[int, float, float]]] = {}
    for kind, rows in cases:
        if not rows:
            continue
        with tempfile.TemporaryDirectory() as folder:
            table = write_table(Path(folder) / f"table.{kind}", rows)
            for step in STEPS:
                seconds, peak = measure(step, table, Path(folder))
                print(
                    f"{kind:<9}{rows:>12,}  {step:<23}{seconds:>9.1f}"
                    f"{seconds / rows * 1e6:>10.1f}{peak / 1e6:>9.0f}",
                    flush=True,
                )
                peaks.setdefault((kind, step), []).append((rows, seconds, peak))
    for (kind, step), values in peaks.items():
        if len(values) == 2:
            extrapolate(kind, step, values)


def extrapolate(kind: str, step: str, values: list[tuple[int, float, float]]) -> None:
    """Print the line through two measurements at :data:`FINAL_ROWS`."""
    (rows, seconds, peak), (more, more_seconds, more_peak) = values
    memory, duration = (more_peak - peak) / (more - rows), (more_seconds - seconds) / (more - rows)
    left = FINAL_ROWS - more
    print(
        f"{kind}, {step}: {memory:.1f} bytes and {duration * 1e6:.1f} µs an image; at "
        f"{FINAL_ROWS:,} images {(more_peak + memory * left) / 1e9:.2f} GB and "
        f"{(more_seconds + duration * left) / 3600:.1f} h"
    )


def write_table(path: Path, rows: int) -> Path:
    """Write a table in an order that is not that of the addresses."""
    with path.open("wb") as file:
        writer = None
        for first in range(0, rows, CHUNK):
            batch = pa.RecordBatch.from_pylist(
                [row(number) for number in range(first, first + CHUNK)]
            )
            if path.suffix == ".jsonl":
                file.writelines(json.dumps(row).encode() + b"\n" for row in batch.to_pylist())
                continue
            writer = writer or pq.ParquetWriter(file, batch.schema)
            writer.write_batch(batch)
        if writer is not None:
            writer.close()
    return path


def row(number: int) -> dict[str, object]:
    digest = hashlib.md5(str(number).encode()).hexdigest()
    return {
        "image": f"s3://images/crawl/{digest[:2]}/{digest}.jpg",
        "caption": f"a photograph of {digest[:6]} and {digest[6:12]}, seen from the left, {number}",
        "bytes": 150_000 + number % 100_000,
        "aesthetic": number % 1000 / 100,
        "license": ("CC0", "CC-BY", "agency")[number % 3],
        "contributor": number % 5000,
    }


def measure(step: str, table: Path, folder: Path) -> tuple[float, float]:
    """Run a step in a process; return its seconds and its peak memory in bytes."""
    command = [sys.executable, __file__, "--step", step, str(table), str(folder)]
    environment = os.environ | {"TMPDIR": str(folder)}
    run = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    seconds, peak = json.loads(run.stdout)
    return seconds, peak


def plan(
    table: Path, folder: Path, where: str | None = None, columns: tuple[str, ...] = ()
) -> tuple[float, float]:
    from sm_train.toolkit.data_prep.packing.pack import PackJob, plan_pack
    from sm_train.toolkit.data_prep.packing.tables import TableOptions

    started = time.perf_counter()
    options = TableOptions(where=where, index_columns=columns)
    job = PackJob(str(table), str(folder / "packed"), None, 4 * 10**9, 1, options)
    with plan_pack(job) as (inputs, pack):
        if options == TableOptions():
            store_plan(pack, inputs.folder, LocalFolder(folder / "packed"), S3Access(), 0)
    return time.perf_counter() - started, getrusage(RUSAGE_SELF).ru_maxrss * 1024


def filtered(table: Path, folder: Path) -> tuple[float, float]:
    return plan(table, folder, WHERE)


def indexed(table: Path, folder: Path) -> tuple[float, float]:
    return plan(table, folder, columns=("license", "contributor"))


def node(table: Path, folder: Path) -> tuple[float, float]:
    started = time.perf_counter()
    pack = read_plan(LocalFolder(folder / "packed"), S3Access())
    total = sum(item.bytes for shard in pack.plans for item in shard.inputs)
    assert total == pack.image_bytes
    return time.perf_counter() - started, getrusage(RUSAGE_SELF).ru_maxrss * 1024


STEPS = {
    "laptop": plan,
    "laptop, --where": filtered,
    "laptop, --index-column": indexed,
    "node": node,
}


if __name__ == "__main__":
    main()
