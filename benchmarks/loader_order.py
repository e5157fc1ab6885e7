"""Planning of a huge data set, resuming anywhere in it, and the quality of its shuffling.

Prints the time and the memory in which one of 128 ranks plans an epoch of 500,000 shards with 100
million samples; the time until the first batch of a loader that resumes at several positions of an
epoch; and how far neighbors in the tars are apart after shuffling, compared with webdataset's
shuffle of shards and a buffer of equal memory, and with a full permutation.

    python benchmarks/loader_order.py [SHARDS]
"""

from __future__ import annotations

import io
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from data_config import DATA_CONFIG
from numpy.typing import NDArray
from sm_train.entrypoints.data_loading import shard_catalog
from sm_train.entrypoints.data_loading.indexed_reader import IndexedReader
from sm_train.entrypoints.data_loading.loader import open_loader
from sm_train.entrypoints.data_loading.partition import REPLICATED, DataTopology
from sm_train.entrypoints.data_loading.sampler import DataPosition, Epoch
from sm_train.entrypoints.data_loading.shard_catalog import DataRank, build_catalog
from sm_train.entrypoints.data_prep.packing.describe_shard import describe_shard
from sm_train.entrypoints.job_interface.index_location import index_path
from sm_train.entrypoints.shards.shard_format import Shard, find_shards
from sm_train.entrypoints.shards.shard_index import write_index

SHARDS = int(sys.argv[1]) if len(sys.argv) == 2 else 500_000
SHARD_SAMPLES = 200
NUM_NODES, LOCAL_WORLD_SIZE = 16, 8
SAMPLE_BYTES = 250 * 1024


def main() -> None:
    """Run all three benchmarks, one after another."""
    with tempfile.TemporaryDirectory() as folder:
        print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
        write_indexes(Path(folder))
        for shards in (SHARDS // 100, SHARDS // 10, SHARDS):
            # A process of its own, so that its peak memory can be measured.
            for channel in ("sharded", "replicated"):
                command = [sys.executable, __file__, folder, str(shards), channel]
                subprocess.run(command, check=True)
        measure_resuming(Path(folder))
    measure_shuffling()


# ------------------------------------------------------------------ planning


def write_indexes(folder: Path) -> None:
    """Write indexes of three sizes."""
    rng = np.random.default_rng(0)
    for count in (SHARDS // 100, SHARDS // 10, SHARDS):
        sizes = 512 * rng.integers(300, 700, (count, SHARD_SAMPLES))
        offsets = np.concatenate([np.zeros((count, 1), np.int64), sizes.cumsum(axis=1)], axis=1)
        started = time.perf_counter()
        write_index(folder / f"{count}.parquet", map(make_shard, range(count), offsets))
        size = (folder / f"{count}.parquet").stat().st_size
        print(
            f"index of {count:,} shards, {count * SHARD_SAMPLES:,} samples: {size / 1e6:,.1f} MB, "
            f"written in {time.perf_counter() - started:.0f} s"
        )


def make_shard(number: int, offsets: NDArray[np.int64]) -> Shard:
    keys = tuple(f"{number * SHARD_SAMPLES + sample:09d}" for sample in range(SHARD_SAMPLES))
    name, size = f"{number:06d}.tar", int(offsets[-1])
    return Shard(name, size, "00" * 32, keys, tuple(offsets.tolist()))


def measure_planning(folder: Path, count: int, *, replicated: bool) -> None:
    """Measure what one rank does before its first read, without listing its channel.

    Each node sees a part of the shards or, ``replicated``, all of them, in a global order.
    """
    step = 1 if replicated else NUM_NODES
    visible = {f"{number:06d}.tar": Path(f"{number:06d}.tar") for number in range(0, count, step)}
    hosts = tuple(f"algo-{number}" for number in range(NUM_NODES))
    rank = DataRank(hosts, node_rank=0, local_rank=3, local_world_size=LOCAL_WORLD_SIZE)
    baseline = peak_kib()

    def all_gather(obj: object) -> list[object]:
        """Simulate the other nodes, each of which sees its own shards."""
        if not isinstance(obj, tuple):
            return [obj]
        gathered: list[object] = []
        for node_rank in range(NUM_NODES):
            mask = np.zeros(count, np.bool_)
            mask[0 if replicated else node_rank :: step] = True
            gathered.append((node_rank, np.packbits(mask), count))
        return gathered

    started, cpu_started = time.perf_counter(), time.process_time()
    setattr(shard_catalog, "find_shards", lambda _: visible)  # noqa: B010
    index = folder / f"{count}.parquet"
    catalog = build_catalog(Path(), index, rank, all_gather, folder / "scan")
    loader = open_loader(
        catalog,
        rank,
        DATA_CONFIG,
        resolution=512,
        batch_size=64,
        seed=0,
        decode_workers=0,
        gradient_accumulation_steps=1,
    )
    assert (loader.reader.order_note is None) == replicated
    assert isinstance(loader.reader, IndexedReader)
    epoch_pass = next(loader.reader.sampler.passes())
    partition = epoch_pass.schedule.partition
    partition.locate(epoch_pass.schedule.indices(0))
    for number in np.unique(partition.ranges.shard[:30]).tolist():
        catalog.offsets(number)
    seconds, cpu = time.perf_counter() - started, time.process_time() - cpu_started
    used = (peak_kib() - baseline) / 1024
    print(
        f"planned for rank 3 of {NUM_NODES * LOCAL_WORLD_SIZE} over {count:,} shards"
        f"{', all on every node' if replicated else ''}: "
        f"{seconds:.1f} s ({cpu:.2f} s of CPU time), {used:.0f} MiB at most; "
        f"{loader.epoch_size().steps:,} steps an epoch"
    )


def peak_kib() -> int:
    """Return the peak memory of this process."""
    status = Path("/proc/self/status").read_text()
    return int(next(line for line in status.splitlines() if line.startswith("VmHWM")).split()[1])


# ------------------------------------------------------------------ resuming


def measure_resuming(folder: Path) -> None:
    """Measure the time to the first batch at four positions of an epoch; medians of five."""
    import webdataset
    from PIL import Image

    content = io.BytesIO()
    Image.new("RGB", (8, 8)).save(content, "PNG")
    shards = folder / "shards"
    shards.mkdir()
    for number in range(20):
        with webdataset.TarWriter(str(shards / f"{number:02d}.tar")) as writer:
            for sample in range(1000):
                writer.write(
                    {
                        "__key__": f"{number}-{sample}",
                        "png": content.getvalue(),
                        "txt": b"x",
                        "bin": bytes(40_000),
                    }
                )
    write_index(
        index_path(shards),
        (describe_shard(path, name).shard for name, path in find_shards(shards).items()),
    )
    rank = DataRank(("algo-1",), node_rank=0, local_rank=0, local_world_size=1)
    catalog = build_catalog(shards, index_path(shards), rank, lambda obj: [obj], folder / "scan")
    options: dict[str, Any] = {"resolution": 8, "batch_size": 10, "seed": 0, "decode_workers": 0}
    options["gradient_accumulation_steps"] = 1
    loader = open_loader(catalog, rank, DATA_CONFIG, **options)
    steps = loader.epoch_size().steps
    for share in (0.0, 0.33, 0.66, 0.99):
        position = DataPosition(0, int(steps * share))
        state = loader.reader.state_at(position)
        seconds = []
        for _ in range(5):
            started = time.perf_counter()
            next(iter(open_loader(catalog, rank, DATA_CONFIG, state=state, **options)))
            seconds.append(time.perf_counter() - started)
        print(
            f"resumed at {share:.0%} of an epoch: first batch after "
            f"{1000 * statistics.median(seconds):.0f} ms"
        )


# ------------------------------------------------------------------ shuffling


def measure_shuffling() -> None:
    """Measure how far neighbors in the tars are apart, and how many shards are near each other.

    Samples of a shard stand for samples of one source: a crawl is sorted by source.
    """
    shards, shard_samples, in_memory = 64, 4000, 1024
    print(
        f"\nshuffling of {shards} shards × {shard_samples} samples, {in_memory} in memory "
        f"({in_memory * SAMPLE_BYTES / 2**20:.0f} MiB of samples of 250 KiB)"
    )
    print(f"{'order':<36}{'neighbors kept':>16}{'sources in 256':>18}{'of a permutation':>18}")
    permutation = np.random.default_rng(0).permutation(shards * shard_samples)
    best = mean_sources(permutation, shard_samples)
    for name, order in (
        ("full permutation", permutation),
        ("sm-train: ranges, shuffle blocks", block_order(shards, shard_samples, in_memory)),
        ("sm-train: global order, batch 256", global_order(shards, shard_samples, 256)),
        ("webdataset: shards and a buffer", buffer_order(shards, shard_samples, in_memory)),
    ):
        kept = np.mean(np.abs(np.diff(order)) < 64)
        sources = mean_sources(order, shard_samples)
        print(f"{name:<36}{kept:>15.2%}{sources:>18.1f}{sources / best:>17.0%}")


def mean_sources(order: NDArray[np.int64], shard_samples: int) -> float:
    """Return how many shards are among 256 consecutive samples of the order, on average."""
    windows = order[: len(order) // 256 * 256].reshape(-1, 256) // shard_samples
    return float(np.mean([len(np.unique(window)) for window in windows]))


def block_order(shards: int, shard_samples: int, in_memory: int) -> NDArray[np.int64]:
    """Return our order; a block takes half of the memory, because the next one is prefetched."""
    topology = DataTopology(
        np.zeros(shards, np.int16), 1, 1, batch_size=1, shuffle_block_size=in_memory // 2
    )
    epoch = Epoch(np.full(shards, shard_samples), range_size=32, seed=0, number=0)
    node = epoch.node_partition(epoch.all_ranges(np.arange(shards)), topology, 0, 0)
    partition = node.rank_partition(0, topology)
    shard, sample = partition.locate(np.arange(partition.num_samples))
    return shard * shard_samples + sample


def global_order(shards: int, shard_samples: int, batch: int) -> NDArray[np.int64]:
    """Return the order of one rank that takes whole global batches."""
    topology = DataTopology(
        np.full(shards, REPLICATED, np.int16),
        1,
        1,
        batch_size=batch,
        shuffle_block_size=8 * batch,
        streams=batch,
        stream_block=8,
    )
    epoch = Epoch(np.full(shards, shard_samples), range_size=32, seed=0, number=0)
    partition = epoch.stream_partition(epoch.remaining([]), topology, 0, 0)
    shard, sample = partition.locate(np.arange(partition.num_new))
    return shard * shard_samples + sample


def buffer_order(shards: int, shard_samples: int, in_memory: int) -> NDArray[np.int64]:
    """Return the order of webdataset's own shuffles of shards and of samples."""
    from webdataset.filters import _shuffle

    rng = random.Random(0)
    shard_order = list(range(shards))
    rng.shuffle(shard_order)
    samples = (
        shard * shard_samples + sample for shard in shard_order for sample in range(shard_samples)
    )
    return np.fromiter(_shuffle(samples, in_memory, initial=in_memory, rng=rng), np.int64)


if __name__ == "__main__":
    if len(sys.argv) == 4:
        measure_planning(
            Path(sys.argv[1]), int(sys.argv[2]), replicated=sys.argv[3] == "replicated"
        )
    else:
        main()
