"""Measures ``sm-train lineage`` and the facts of ``data-report``, up to 100 million samples.

``steps`` finds the steps that saw one sample in two epochs of 64 ranks in a global order, from a
record alone. ``facts`` counts all samples by two columns of the index; its peer is DuckDB on a flat
Parquet file with the same columns. Each runs in a process of its own, for two numbers of samples;
the figures for 100 million are on the line through both. Memory is the largest resident set size
less that before (getrusage(2)).

    python benchmarks/lineage.py [--samples 2000000 10000000]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from resource import RUSAGE_SELF, getrusage

import numpy as np
from selection import SHARD_SAMPLES, write
from sm_train.entrypoints.data_loading.partition import REPLICATED, DataTopology
from sm_train.entrypoints.data_loading.sampler import DataPosition, SamplerState
from sm_train.entrypoints.lineage.data_facts import data_facts
from sm_train.entrypoints.lineage.data_record import Anchor, ChannelRecord, DataRecord, ShardTable
from sm_train.entrypoints.shards.removal_list import RemovalList
from sm_train.entrypoints.shards.shard_index import ShardIndex
from sm_train.toolkit.data_prep.lineage.seen_steps import Attempt, Place, seen_steps

FINAL_SAMPLES = 100_000_000
NODES, LOCAL_RANKS, BATCH, EPOCHS = 8, 8, 32, 2


def main() -> None:
    """Measure each number of samples, then print slopes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples", type=int, nargs=2, default=[2_000_000, 10_000_000])
    parser.add_argument("--step", nargs=2, metavar=("STEP", "FOLDER"))
    options = parser.parse_args()
    if options.step:
        step, folder = options.step
        before, started = getrusage(RUSAGE_SELF).ru_maxrss, time.perf_counter()
        STEPS[step](Path(folder))
        seconds = time.perf_counter() - started
        print(json.dumps([seconds, 1024 * (getrusage(RUSAGE_SELF).ru_maxrss - before)]))
        return
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    print(f"{'samples':>12}  {'step':<7}{'seconds':>9}{'µs/sample':>11}{'peak MB':>9}")
    found: dict[str, list[tuple[int, float, float]]] = {}
    for samples in options.samples:
        with tempfile.TemporaryDirectory() as folder:
            write(Path(folder), samples // SHARD_SAMPLES)
            for step in STEPS:
                command = [sys.executable, __file__, "--step", step, folder]
                run = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
                seconds, peak = json.loads(run.stdout)
                each = seconds / samples * 1e6
                print(f"{samples:>12,}  {step:<7}{seconds:>9.2f}{each:>11.3f}{peak / 1e6:>9.0f}")
                found.setdefault(step, []).append((samples, seconds, peak))
    for step, [(few, begin, low), (many, end, high)] in found.items():
        factor = (FINAL_SAMPLES - many) / (many - few)
        seconds, peak = end + (end - begin) * factor, high + max(0.0, high - low) * factor
        print(f"{step}: {FINAL_SAMPLES:,} samples: {seconds:.0f} s and {peak / 1e6:.0f} MB")
    own, peer = (found[step][1][1] for step in ("facts", "DuckDB"))
    print(f"the facts take {own / peer:.1f} × as long as DuckDB on a flat file")


def find_steps(folder: Path) -> None:
    index = ShardIndex(folder / "index.parquet")
    shards = len(index)
    streams = NODES * LOCAL_RANKS * BATCH
    topology = DataTopology(
        np.full(shards, REPLICATED, np.int16),
        NODES,
        LOCAL_RANKS,
        BATCH,
        shuffle_block_size=8 * BATCH,
        streams=streams,
        stream_block=8,
    )
    state = SamplerState("d", 1, 40, DataPosition(), topology)
    channel = ChannelRecord("train", None, "d", "content", index.header.samples)
    record = DataRecord(
        *("run", "256px", None, "indexed", "d", (channel,), 1),
        (Anchor(0, 0, 0, "2026-01-01T00:00:00+00:00"),),
        "shards.parquet",
        state.to_bytes(),
    )
    attempt = Attempt(record, {"train": ShardTable(index.names, index.samples)})
    until = EPOCHS * -(-index.header.samples // streams)
    place = Place("train", index.names[shards // 2], 7)
    assert len(seen_steps([attempt], place, until, None).steps) >= EPOCHS


def count_facts(folder: Path) -> None:
    facts = data_facts(ShardIndex(folder / "index.parquet"), RemovalList())
    assert len(facts.columns) == 2


def count_alone(folder: Path) -> None:
    import duckdb

    connection = duckdb.connect(config={"threads": 2})
    for column in ("license", "contributor"):
        query = f"SELECT {column}, count(*) FROM '{folder / 'flat.parquet'}' GROUP BY 1"
        assert connection.sql(query).fetchall()


STEPS: dict[str, Callable[[Path], None]] = {
    "steps": find_steps,
    "facts": count_facts,
    "DuckDB": count_alone,
}


if __name__ == "__main__":
    main()
