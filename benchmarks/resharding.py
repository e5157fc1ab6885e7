"""Planning the rest of an epoch after a change of the world size, with aspect-ratio buckets.

Prints for 1, 3 and 10 million samples the CPU time in which one process of 4 nodes × 8 ranks finds
the samples that the 32 ranks of an earlier topology have left, and makes its own batches of them;
and the time in which it decodes the image sizes of the index, which bounds both from below.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
from sm_train.entrypoints.data_loading.indexed_shards import IndexedShapes, read_indexed_shards
from sm_train.entrypoints.data_loading.partition import DataTopology
from sm_train.entrypoints.data_loading.sample_ranges import aspect_shapes
from sm_train.entrypoints.data_loading.sampler import DataPosition, Sampler, SamplerState
from sm_train.entrypoints.shards.shard_format import Shard
from sm_train.entrypoints.shards.shard_index import ShardIndex, write_index

SHARD_SAMPLES, NUM_NODES, LOCAL_WORLD_SIZE = 4000, 4, 8
BATCH_SIZE, SHUFFLE_BLOCK_SIZE, RANGE_SIZE = 8, 2048, 256


def main() -> None:
    """Measure three sizes, which shows the slope."""
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    with tempfile.TemporaryDirectory() as folder:
        for shards in (250, 750, 2500):
            path = Path(folder) / f"{shards}.parquet"
            write_index(path, make_shards(shards))
            measure(path, shards)


def make_shards(count: int) -> Iterator[Shard]:
    """Yield shards of images whose sides are spread as those of photos."""
    rng = np.random.default_rng(0)
    keys = tuple(f"{sample:09d}" for sample in range(SHARD_SAMPLES))
    offsets = tuple(range(0, 200_000 * (SHARD_SAMPLES + 1), 200_000))
    for number in range(count):
        ratios = np.exp(rng.normal(0, 0.35, SHARD_SAMPLES))
        widths = (1000 * np.sqrt(ratios)).astype(int).tolist()
        heights = (1000 / np.sqrt(ratios)).astype(int).tolist()
        yield Shard(
            f"{number:06d}.tar",
            offsets[-1],
            "00" * 32,
            keys,
            offsets,
            tuple(widths),
            tuple(heights),
        )


def measure(path: Path, shards: int) -> None:
    """Print the seconds of CPU time for one index."""
    started = time.process_time()
    index = ShardIndex(path)
    for _ in index.image_sizes_by_group(np.arange(shards)):
        pass
    decoded = time.process_time() - started
    topology = DataTopology(
        (np.arange(shards) % NUM_NODES).astype(np.int16),
        NUM_NODES,
        LOCAL_WORLD_SIZE,
        BATCH_SIZE,
        SHUFFLE_BLOCK_SIZE,
        aspect_shapes(512),
    )
    sizes = np.full(shards, SHARD_SAMPLES)
    steps = shards * SHARD_SAMPLES // topology.world_size // BATCH_SIZE // 2
    saved = SamplerState("digest", 0, RANGE_SIZE, DataPosition(0, steps), topology)
    changed = replace(topology, local_world_size=4)
    resumed, _ = saved.resume("digest", 0, RANGE_SIZE, changed)
    started = time.process_time()
    sampler = Sampler(sizes, resumed, 0, 0, IndexedShapes(read_indexed_shards(path, None)))
    left = sampler.epoch_size(0).samples
    planned = time.process_time() - started
    next(sampler.passes()).schedule.indices(0)
    total = time.process_time() - started
    print(
        f"{shards * SHARD_SAMPLES:>10,} samples, {left:,} left: found in {planned:.2f} s, first "
        f"batch after {total:.2f} s; decoding the sizes alone {decoded:.2f} s"
    )


if __name__ == "__main__":
    main()
