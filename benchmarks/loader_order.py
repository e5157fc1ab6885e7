"""Planning a huge data set, resuming anywhere in it, and how well its samples are mixed.

Prints the time and memory in which one of 128 processes plans an epoch of 500,000 shards with 100
million samples, how long a resumed loader needs for its first batch at several places of an
epoch, and how far neighbours in the tars are from each other once shuffled, against webdataset's
shuffle of shards and a buffer of the same memory, and against a full permutation.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from sm_train.entrypoints.common.job_config import DataConfig
from sm_train.entrypoints.data.epoch import Epoch
from sm_train.entrypoints.data.loader import Loader
from sm_train.entrypoints.data.partition import DataTopology
from sm_train.entrypoints.data.sampler import DataPosition
from sm_train.entrypoints.data.shard_catalog import DataRank, build_catalog
from sm_train.entrypoints.data.shard_format import Shard, find_shards
from sm_train.entrypoints.data.shard_index import write_index
from sm_train.entrypoints.packing.describe_shard import describe_shard

SHARDS, EACH = 500_000, 200
INSTANCES, PROCESSES = 16, 8
SAMPLE_BYTES = 250 * 1024
DATA = DataConfig("png", "txt", "center", "bilinear", aspect_buckets=False, max_bad_fraction=0.01)


def main() -> None:
    """All three, one after another."""
    with tempfile.TemporaryDirectory() as folder:
        print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
        large_index(Path(folder))
        for shards in (SHARDS // 100, SHARDS // 10, SHARDS):
            subprocess.run([sys.executable, __file__, folder, str(shards)], check=True)
        resume(Path(folder))
    mixing()


# ------------------------------------------------------------------ planning


def large_index(folder: Path) -> None:
    """Write the indexes, and the empty channel of one instance of 16."""
    rng = np.random.default_rng(0)
    for count in (SHARDS // 100, SHARDS // 10, SHARDS):
        lengths = 512 * rng.integers(300, 700, (count, EACH))
        offsets = np.concatenate([np.zeros((count, 1), np.int64), lengths.cumsum(axis=1)], axis=1)
        started = time.perf_counter()
        write_index(folder / f"{count}.parquet", map(shard, range(count), offsets))
        size = (folder / f"{count}.parquet").stat().st_size
        print(
            f"index of {count:,} shards, {count * EACH:,} samples: {size / 1e6:,.1f} MB, "
            f"written in {time.perf_counter() - started:.0f} s"
        )


def shard(number: int, offsets: NDArray[np.int64]) -> Shard:
    keys = tuple(f"{number * EACH + sample:09d}" for sample in range(EACH))
    name, size = f"{number:06d}.tar", int(offsets[-1])
    return Shard(name, size, "00" * 32, keys, tuple(offsets.tolist()))


def plan(folder: Path, count: int) -> None:
    """What one process does before its first read, the listing of its channel left out."""
    here = {f"{number:06d}.tar": Path(f"{number:06d}.tar") for number in range(0, count, INSTANCES)}
    seat = DataRank(tuple(f"algo-{number}" for number in range(INSTANCES)), 0, 3, PROCESSES)
    baseline = peak_kib()

    def exchange(said: object) -> list[object]:
        """Others say of their shards what this one says of its own."""
        if not isinstance(said, tuple):
            return [said]
        everyones: list[object] = []
        for instance in range(INSTANCES):
            mask = np.zeros(count, np.bool_)
            mask[instance::INSTANCES] = True
            everyones.append((instance, np.packbits(mask), count))
        return everyones

    started = time.perf_counter()
    import sm_train.entrypoints.data.shard_catalog as catalogue_module

    catalogue_module.find_shards = lambda _: here
    catalogue = build_catalog(Path(), folder / f"{count}.parquet", seat, exchange, folder / "walk")
    loader = Loader(catalogue, seat, DATA, resolution=512, batch_size=64, seed=0, decode_workers=0)
    lap = next(loader.course.laps())
    lap.schedule.part.locate(lap.schedule.slots(0))
    for number in np.unique(lap.schedule.part.pieces.shard[:30]).tolist():
        catalogue.ranges(number)
    seconds = time.perf_counter() - started
    held = (peak_kib() - baseline) / 1024
    print(
        f"planned for rank 3 of {INSTANCES * PROCESSES} over {count:,} shards: {seconds:.1f} s, "
        f"{held:.0f} MiB at most; {loader.balance().steps:,} steps an epoch"
    )


def peak_kib() -> int:
    """The most memory that this program ever held."""
    status = Path("/proc/self/status").read_text()
    return int(next(line for line in status.splitlines() if line.startswith("VmHWM")).split()[1])


# ------------------------------------------------------------------ resuming


def resume(folder: Path) -> None:
    """The first batch at four places of an epoch; medians of five."""
    import io

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
        folder / "index.parquet",
        (describe_shard(path, name).shard for name, path in find_shards(shards).items()),
    )
    seat = DataRank(("algo-1",), 0, 0, 1)
    catalogue = build_catalog(
        shards, folder / "index.parquet", seat, lambda said: [said], folder / "walk"
    )
    options = {"resolution": 8, "batch_size": 10, "seed": 0, "decode_workers": 0}
    loader = Loader(catalogue, seat, DATA, **options)
    whole = loader.balance().steps
    for share in (0.0, 0.33, 0.66, 0.99):
        position = DataPosition(0, int(whole * share))
        record = replace(loader.course.record, position=position).to_bytes()
        seconds = []
        for _ in range(5):
            started = time.perf_counter()
            next(iter(Loader(catalogue, seat, DATA, record=record, **options)))
            seconds.append(time.perf_counter() - started)
        print(
            f"resumed at {share:.0%} of an epoch: first batch after "
            f"{1000 * statistics.median(seconds):.0f} ms"
        )


# ------------------------------------------------------------------ mixing


def mixing() -> None:
    """Neighbours in the tars, and labels that come in runs as in a crawl sorted by source."""
    shards, each, held = 64, 4000, 1024
    print(
        f"\nmixing of {shards} shards × {each} samples, {held} held in memory "
        f"({held * SAMPLE_BYTES / 2**20:.0f} MiB of samples of 250 KiB)"
    )
    print(f"{'order':<34}{'neighbours kept':>18}{'sources in 256':>18}{'of a permutation':>18}")
    full = np.random.default_rng(0).permutation(shards * each)
    best = sources(full, each)
    for name, order in (
        ("full permutation", full),
        ("sm-train: chunks and a window", window_order(shards, each, held)),
        ("webdataset: shards and a buffer", buffer_order(shards, each, held)),
    ):
        kept = np.mean(np.abs(np.diff(order)) < 64)
        found = sources(order, each)
        print(f"{name:<34}{kept:>17.2%}{found:>18.1f}{found / best:>17.0%}")


def sources(order: NDArray[np.int64], each: int) -> float:
    """Different shards among 256 neighbours of the order, on average."""
    whole = order[: len(order) // 256 * 256].reshape(-1, 256) // each
    return float(np.mean([len(np.unique(row)) for row in whole]))


def window_order(shards: int, each: int, held: int) -> NDArray[np.int64]:
    """Half of the memory: the next window is read while one is in use."""
    world = DataTopology(np.zeros(shards, np.int16), 1, 1, batch=1, window=held // 2)
    epoch = Epoch(np.full(shards, each), chunk=32, seed=0, number=0)
    part = epoch.line(epoch.whole(np.arange(shards)), world, 0, 0).part(0, world)
    shard, sample = part.locate(np.arange(part.samples))
    return shard * each + sample


def buffer_order(shards: int, each: int, held: int) -> NDArray[np.int64]:
    """webdataset's own shuffles of shards and of samples."""
    import random

    from webdataset.filters import _shuffle

    rng = random.Random(0)
    names = list(range(shards))
    rng.shuffle(names)
    samples = (shard * each + sample for shard in names for sample in range(each))
    return np.fromiter(_shuffle(samples, held, initial=held, rng=rng), np.int64)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        plan(Path(sys.argv[1]), int(sys.argv[2]))
    else:
        main()
