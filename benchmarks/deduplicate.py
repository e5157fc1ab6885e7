"""Finding duplicates among millions of images from their stored digests, as `pack` does.

The hashes have clusters: copies with a few changed bits, a million blank images in ten, videos
whose frames drift, flat images with skewed bits and a dense group. Prints the time, CPU time and
the peak memory of the processes at two sizes, and that of 100 million by the line through both. The
peer is the sequential method with a dict for each band of bits; its time grows with the square of
the number, and is extrapolated. Then one image in ten shares its hash with others that have other
colors: plain ones, or the same icon recolored on white. Prints the exponent of the CPU time.

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
from collections.abc import Callable
from pathlib import Path
from subprocess import PIPE

import numpy as np
from numpy.typing import NDArray
from sm_train.entrypoints.data_prep.deduplication.colors import PARTS, SIGNATURE_BYTES
from sm_train.entrypoints.data_prep.deduplication.compared_images import Images
from sm_train.entrypoints.data_prep.deduplication.near_duplicates import near_duplicates
from sm_train.entrypoints.data_prep.packing.build_pack import find_duplicates
from sm_train.entrypoints.data_prep.packing.deduplicate import DIGEST, DROPPED_NAME
from sm_train.entrypoints.data_prep.packing.plan import (
    PackInput,
    PackOptions,
    ShardPlan,
    shard_name,
)
from sm_train.entrypoints.data_prep.work.state_files import StateFiles
from sm_train.entrypoints.data_prep.work.work_stages import SharedWork
from sm_train.entrypoints.data_prep.work.worker_pool import WorkerPlan
from sm_train.entrypoints.storage.storage import LocalFolder
from sm_train.entrypoints.storage.store import S3Access

IMAGES = int(float(sys.argv[1])) if len(sys.argv) > 1 else 10_000_000
BITS, WORKERS, SHARD_IMAGES = 3, 2, 10_000
Hashes = NDArray[np.uint64]


def main() -> None:
    """Measure a tenth and all of the images, and the peer at two small sizes."""
    if len(sys.argv) == 4:
        steps: dict[str, Callable[[int, Path], None]] = {"write": write_digests, "find": measure}
        steps[sys.argv[3]](IMAGES, Path(sys.argv[2]))
        return
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    counts, peaks = (IMAGES // 4, IMAGES), []
    for count in counts:
        with tempfile.TemporaryDirectory() as folder:
            # Processes of their own, so that the peak memory of the search can be measured.
            command = [sys.executable, __file__, str(count), folder]
            subprocess.run([*command, "write"], check=True)
            found = subprocess.run([*command, "find"], check=True, stdout=PIPE, text=True).stdout
            print(found, end="", flush=True)
            peaks.append(float(found.split(" MiB in the largest")[0].rpartition(" ")[2]))
    slope = (peaks[1] - peaks[0]) / (counts[1] - counts[0])
    print(f"100,000,000 images by the line: {peaks[1] + slope * (10**8 - IMAGES):.0f} MiB")
    measure_groups()
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
    destination, plans = planned(count, folder)
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
        f"{peak_mib():.0f} MiB in the largest process; "
        f"{len(dropped) - near:,} equal, {near:,} near-duplicates",
        flush=True,
    )


def planned(count: int, folder: Path) -> tuple[LocalFolder, list[ShardPlan]]:
    """Return the destination and the shards of ``count`` images."""
    options = PackOptions(duplicates=True, near_bits=BITS)
    inputs = [PackInput(0, "", "", 0)] * SHARD_IMAGES
    plans = [
        ShardPlan(number, shard_name(number), inputs, options, digests=f"{number}.npy")
        for number in range(count // SHARD_IMAGES)
    ]
    return LocalFolder(folder), plans


def write_digests(count: int, folder: Path) -> None:
    """Write digests: each image has its own bytes, but one in fifty those of another."""
    destination, plans = planned(count, folder)
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


def measure_groups() -> None:
    """Print the CPU time with groups of images that have one hash and different colors."""
    sizes = [10**4, 10**5, 10**6]
    for name, colors in (("plain", plain), ("recolored", recolored)):
        for in_group in (10**6, 1000):
            seconds = [group_seconds(count, in_group, colors) for count in sizes]
            exponent = np.polyfit(np.log(sizes), np.log(seconds), 1)[0]
            found = ", ".join(f"{value:.2f}" for value in seconds)
            print(
                f"{name}, up to {in_group:,} with one hash: {found} s of CPU time, n^{exponent:.2f}"
            )


def group_seconds(
    count: int, in_group: int, colors: Callable[[np.random.Generator, int], NDArray[np.uint8]]
) -> float:
    """Return the CPU time for ``count`` images, of which a tenth are in groups of one hash."""
    rng = np.random.default_rng(1)
    hashes = rng.integers(0, 2**64, count, np.uint64)
    signatures = rng.integers(0, 256, (count, SIGNATURE_BYTES), np.uint8)
    grouped = count // 10
    hashes[:grouped] = hashes[np.arange(grouped) // in_group]
    signatures[:grouped] = colors(rng, grouped)
    started = time.process_time()
    near_duplicates(Images(hashes, signatures), BITS)
    return time.process_time() - started


def plain(rng: np.random.Generator, count: int) -> NDArray[np.uint8]:
    """Return signatures of images of one color."""
    return np.tile(rng.integers(0, 256, (count, 3), np.uint8), PARTS**2)


def recolored(rng: np.random.Generator, count: int) -> NDArray[np.uint8]:
    """Return signatures of one icon on white in random colors."""
    cover = np.zeros((PARTS**2, 1))
    cover[[5, 6, 9, 10]] = 0.9
    cover[[1, 2, 4, 7, 8, 11, 13, 14]] = 0.3
    colors = rng.integers(0, 220, (count, 1, 3))
    means = np.rint(255 * (1 - cover) + cover * colors)
    return means.astype(np.uint8).reshape(count, SIGNATURE_BYTES)


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
