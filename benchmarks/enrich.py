"""Measures `sm-train enrich`: images per second, and the memory and time of its end at 10⁸ images.

The peer is webdataset: two processes each read half of the same shards, decode with Pillow, call
the same function with batches and write shards (``wds.TarWriter``), without an index or a way to
resume. The physical limit is the time that two processes take to decode the images alone.

The end reads the footer of every Parquet file. Its files here have one image each, and the number
of a table of 10⁸ images, whose footers have the same size.

    python benchmarks/enrich.py [--images 20000] [--files 12208]
"""

from __future__ import annotations

import argparse
import io
import json
import multiprocessing
import os
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import webdataset as wds
from photos import photo
from PIL import Image
from sm_train.entrypoints.data_prep.enrichment import enrichment_plan
from sm_train.entrypoints.data_prep.enrichment.build_enrichment import finalize
from sm_train.entrypoints.data_prep.enrichment.enrichment_batch import EnrichmentBatch
from sm_train.entrypoints.data_prep.enrichment.enrichment_plan import EnrichmentPlan, TableSource
from sm_train.entrypoints.storage.storage import LocalFolder
from sm_train.entrypoints.storage.store import S3Access
from sm_train.toolkit.data_prep.enrichment.enrich import EnrichJob, enrich
from sm_train.toolkit.data_prep.pack_function import pack

PROCESSES, BATCH = 2, 32


def brightness(batch: EnrichmentBatch) -> dict[str, list[float]]:
    """Return the mean of each image: the function of both."""
    return {"brightness": means(batch.images)}


def means(images: list[Image.Image]) -> list[float]:
    """Return the mean of every image."""
    return [float(np.asarray(image.convert("L")).mean()) for image in images]


def main() -> None:
    """Measure speed and end."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--images", type=int, default=20000)
    parser.add_argument("--files", type=int, default=-(-(10**8) // 8192))
    options = parser.parse_args()
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    with tempfile.TemporaryDirectory() as temporary:
        measure_speed(Path(temporary), options.images)
        measure_end(Path(temporary) / "end", options.files)


def measure_speed(folder: Path, images: int) -> None:
    """Compare the images per second of both, and of decoding alone."""
    photos = [photo(512, number) for number in range(64)]
    (folder / "in").mkdir()
    for number in range(images):
        (folder / "in" / f"{number:06d}.jpg").write_bytes(photos[number % len(photos)])
        (folder / "in" / f"{number:06d}.txt").write_text(f"photo {number}")
    pack(folder / "in", folder / "packed", shard_size="20MB", workers=PROCESSES)
    shards = sorted(str(path) for path in (folder / "packed" / "shards").iterdir())
    (folder / "peer").mkdir()
    code = Path(__file__).parent
    job = EnrichJob(
        *(str(folder / "packed"), str(folder / "out"), "enrich:brightness", code, None),
        *(BATCH, 1024),
        workers=PROCESSES,
    )
    seconds = {}
    for name, work in (
        ("decoding alone", lambda: halves(decode_all, [[photos, images // 2]] * 2)),
        ("webdataset", lambda: halves(enrich_with_webdataset, peer_parts(shards, folder / "peer"))),
        ("sm-train enrich", lambda: enrich(job, lambda progress: None)),
    ):
        started = time.perf_counter()
        work()
        seconds[name] = time.perf_counter() - started
        print(f"{name}: {images / seconds[name]:,.0f} images/s")
    for peer in ("webdataset", "decoding alone"):
        ratio = seconds[peer] / seconds["sm-train enrich"]
        print(f"sm-train enrich: {ratio:.2f} × the speed of {peer}")


def halves(function: Callable[..., None], arguments: list[list[Any]]) -> None:
    """Call a function in one process for each list of arguments."""
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=function, args=part) for part in arguments]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
        if process.exitcode:
            sys.exit(f"a process ended with {process.exitcode}")


def decode_all(photos: list[bytes], count: int) -> None:
    """Decode ``count`` images."""
    for number in range(count):
        Image.open(io.BytesIO(photos[number % len(photos)])).convert("RGB").load()


def peer_parts(shards: list[str], folder: Path) -> list[list[Any]]:
    """Return the arguments of each of the peer's processes."""
    return [[shards[rank::PROCESSES], folder] for rank in range(PROCESSES)]


def enrich_with_webdataset(shards: list[str], folder: Path) -> None:
    """Add the brightness to the JSON files of shards."""
    for shard in shards:
        samples = wds.WebDataset(shard, shardshuffle=False)
        with wds.TarWriter(str(folder / Path(shard).name)) as writer:
            batch: list[dict[str, Any]] = []
            for sample in samples:
                batch.append(sample)
                if len(batch) == BATCH:
                    write(writer, batch)
                    batch = []
            write(writer, batch)


def write(writer: wds.TarWriter, batch: list[dict[str, Any]]) -> None:
    """Write samples with their new column."""
    images = [Image.open(io.BytesIO(sample["jpg"])).convert("RGB") for sample in batch]
    for sample, value in zip(batch, means(images), strict=True):
        document = json.loads(sample["json"]) | {"columns": {"brightness": value}}
        writer.write(sample | {"json": json.dumps(document).encode()})


def measure_end(folder: Path, files: int) -> None:
    """Measure the end of a table of ``files`` Parquet files."""
    enrichment_plan._MIN_ROWS = 1
    first, _ = write_parts(folder)
    names = [f"part-{number:06d}.parquet" for number in range(files)]
    for name in names[1:]:
        (folder / "table" / name).hardlink_to(folder / "table" / names[0])
    plan = EnrichmentPlan(
        *("in", "digest", first, ("digest",), None),
        origin=TableSource(files, "", "image", 1),
        destination=LocalFolder(folder),
        access=S3Access(),
    )
    tracemalloc.start()
    started = time.perf_counter()
    result = finalize(plan)
    seconds = time.perf_counter() - started
    _, peak = tracemalloc.get_traced_memory()
    assert result is not None
    assert result.parts == files
    print(
        f"end of {files:,} Parquet files ({files * 8192:,} images): {seconds:.1f} s, "
        f"{peak / 1e6:.0f} MB of Python objects"
    )


def write_parts(folder: Path) -> tuple[dict[str, Any], int]:
    """Write a table of one image; return how its column was made."""
    (folder / "in").mkdir(parents=True)
    (folder / "in" / "0.jpg").write_bytes(photo(64, 0))
    job = EnrichJob(
        *(str(folder / "in"), str(folder), "enrich:brightness", Path(__file__).parent, None),
        *(BATCH, 1024),
        workers=1,
    )
    finished = enrich(job, lambda progress: None)
    return finished.plan.function, finished.result.images


if __name__ == "__main__":
    main()
