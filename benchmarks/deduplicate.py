"""Finding duplicates among millions of images from their stored digests, as `pack` does.

The hashes have clusters: copies with a few changed bits, a million blank images in ten, videos
whose frames drift, flat images with skewed bits and a dense group. Prints the time, CPU time and
the peak memory of the processes at several sizes. The peer is the sequential method with a dict for
each band of bits; its time grows with the square of the number, and is extrapolated.

    python benchmarks/deduplicate.py [IMAGES]
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from sm_train.entrypoints.object_store.store import S3Access
from sm_train.entrypoints.packing.build_pack import find_duplicates
from sm_train.entrypoints.packing.deduplicate import (
    DIGEST,
    DROPPED_NAME,
)
from sm_train.entrypoints.packing.plan import PackInput, PackOptions, ShardPlan, shard_name
from sm_train.entrypoints.shared_work.state_files import StateFiles
from sm_train.entrypoints.shared_work.storage import LocalFolder
from sm_train.entrypoints.shared_work.work_stages import SharedWork
from sm_train.entrypoints.shared_work.worker_pool import WorkerPlan

IMAGES = int(float(sys.argv[1])) if len(sys.argv) > 1 else 10_000_000
BITS, WORKERS, SHARD_IMAGES = 3, 2, 10_000
Hashes = NDArray[np.uint64]


def main() -> None:
    """Measure a tenth and all of the images, and the peer at two small sizes."""
    if len(sys.argv) == 3:
        measure(IMAGES, Path(sys.argv[2]))
        return
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    for count in (IMAGES // 10, IMAGES):
        # A process of its own, so that its peak memory can be measured.
        with tempfile.TemporaryDirectory() as folder:
            subprocess.run([sys.executable, __file__, str(count), folder], check=True)
    small, large = IMAGES // 200, IMAGES // 100
    per_hash = [one_by_one_seconds(count) / count for count in (small, large)]
    slope = max(0.0, (per_hash[1] - per_hash[0]) / (large - small))
    extrapolated = IMAGES * (per_hash[1] + slope * (IMAGES - large))
    print(
        f"dicts of bands: {per_hash[0] * 1e6:.0f} µs a hash at {small:,}, "
        f"{per_hash[1] * 1e6:.0f} µs at {large:,}; extrapolated to {IMAGES:,}: "
        f"{extrapolated / 3600:.1f} h of CPU time"
    )


def measure(count: int, folder: Path) -> None:
    """Write the digests of ``count`` images, and find the duplicates among them."""
    destination = LocalFolder(folder)
    options = PackOptions(duplicates=True, near_bits=BITS)
    inputs = [PackInput(0, "", "", 0)] * SHARD_IMAGES
    plans = [
        ShardPlan(number, shard_name(number), inputs, options, digests=f"{number}.npy")
        for number in range(count // SHARD_IMAGES)
    ]
    write_digests(plans, destination)
    baseline = peak_mib()
    started, cpu_started = time.perf_counter(), cpu_seconds()
    work = WorkerPlan(destination, S3Access(), WORKERS)
    shared = SharedWork(destination, is_shared=False)
    for _ in find_duplicates(plans, work, shared, StateFiles(destination, [])):
        pass
    seconds, cpu = time.perf_counter() - started, cpu_seconds() - cpu_started
    dropped = np.load(folder / DROPPED_NAME)
    near = int((~dropped["is_equal"]).sum())
    print(
        f"{len(plans) * SHARD_IMAGES:,} images: {seconds:.0f} s, {cpu:.0f} s of CPU time, "
        f"{peak_mib():.0f} MiB in the largest process ({baseline:.0f} MiB before); "
        f"{len(dropped) - near:,} equal, {near:,} near-duplicates",
        flush=True,
    )


def write_digests(plans: list[ShardPlan], destination: LocalFolder) -> None:
    """Write digests: each image has its own bytes, but one in fifty those of another."""
    rng = np.random.default_rng(0)
    hashes = clustered(rng, len(plans) * SHARD_IMAGES)
    digests = np.zeros(len(hashes), DIGEST)
    digests["sha256"] = rng.integers(0, 2**64, (len(hashes), 4), np.uint64)
    digests["phash"], digests["is_readable"], digests["has_phash"] = hashes, True, True
    # One of eight palettes, of which each is alike to its neighbors.
    digests["colors"] = 128
    digests["colors"][:, 12:36] = (16 * rng.integers(1, 9, len(hashes), np.uint8))[:, None]
    copies = rng.integers(0, len(hashes), len(hashes) // 50)
    digests[copies] = digests[rng.integers(0, len(hashes), len(copies))]
    for number, plan in enumerate(plans):
        with destination.atomic_writer(plan.digests) as sink:
            path = destination.path / "digests.npy"
            np.save(path, digests[number * SHARD_IMAGES : (number + 1) * SHARD_IMAGES])
            sink.write(path.read_bytes())


def clustered(rng: np.random.Generator, count: int) -> Hashes:
    """Return hashes in random order, except for videos."""
    part = count // 10
    random = rng.integers(0, 2**64, 5 * part, np.uint64)
    scattered = np.concatenate(
        [
            random,
            flipped(rng, rng.choice(random, 2 * part), 3),
            np.full(part, 0x8000000000000000, np.uint64),  # blank images
            rng.integers(0, 2**64, part // 2, np.uint64) & np.uint64(0xFFFF_FFFF_F000_0000),
            flipped(rng, np.full(part // 50, 0x5555, np.uint64), 4),  # a dense group
        ]
    )
    frames = np.uint64(1) << rng.integers(0, 64, count - len(scattered)).astype(np.uint64)
    frames[::10_000] = rng.integers(0, 2**64, len(frames[::10_000]), np.uint64)  # another video
    return np.concatenate([rng.permutation(scattered), np.bitwise_xor.accumulate(frames)])


def flipped(rng: np.random.Generator, hashes: Hashes, flips: int) -> Hashes:
    for _ in range(flips):
        hashes = hashes ^ (np.uint64(1) << rng.integers(0, 64, len(hashes)).astype(np.uint64))
    return hashes


def one_by_one_seconds(count: int) -> float:
    """Return the CPU time of the peer on ``count`` hashes."""
    hashes = [int(value) for value in clustered(np.random.default_rng(0), count)]
    started = time.process_time()
    width = 64 // (BITS + 1)
    kept: list[defaultdict[int, list[int]]] = [defaultdict(list) for _ in range(BITS + 1)]
    for value in hashes:
        keys = [(value >> width * band) & ((1 << width) - 1) for band in range(BITS + 1)]
        candidates = (
            other for table, key in zip(kept, keys, strict=True) for other in table.get(key, ())
        )
        if not any((value ^ other).bit_count() <= BITS for other in candidates):
            for table, key in zip(kept, keys, strict=True):
                table[key].append(value)
    return time.process_time() - started


def cpu_seconds() -> float:
    """Return the CPU time of this process and of its children that have ended."""
    usages = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def peak_mib() -> float:
    """Return the peak memory of this process or of a child, whichever is larger."""
    whos = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    return max(resource.getrusage(who).ru_maxrss for who in whos) / 1024


if __name__ == "__main__":
    main()
