"""Images a second out of shards, against webdataset, mosaicml-streaming and the bare decoder.

Photographs of 768 and 1,024 pixels become uint8 batches of 512. Variants are interleaved; printed
are medians, spread, and ratios. "Bare decoding" decodes the same bytes from memory at the same
size, without reading, scaling or batching: the physical limit. The peers do what their own guides
show (decode with Pillow), with Pillow's bilinear scaling; ours is bilinear, too.

    python benchmarks/loader.py            # mosaicml-streaming takes part where it is installed
"""

from __future__ import annotations

import io
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"

import numpy as np
import simplejpeg
import torch
import webdataset
from photos import photo
from PIL import Image
from sm_train.entrypoints.common.job_config import DataConfig
from sm_train.entrypoints.data.loader import MAX_DEPTH, Loader
from sm_train.entrypoints.data.shard_catalog import DataRank, build_catalog
from sm_train.entrypoints.data.shard_format import find_shards
from sm_train.entrypoints.data.shard_index import write_index
from sm_train.entrypoints.packing.describe_shard import describe_shard
from torch import Tensor
from torch.utils.data import DataLoader

ROUNDS = 7
DIFFERENT, SHARDS, EACH = 16, 4, 48
BATCH, RESOLUTION = 16, 512
IMAGES = 96  # a measurement, for each worker

Variant = Callable[[], Iterator[Any]]


def main() -> None:
    """Measure both sizes."""
    torch.set_num_threads(1)
    for side in (768, 1024):
        with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
            print(
                f"\n{side} px → {RESOLUTION}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}"
            )
            measure(side, Path(folder))


def measure(side: int, folder: Path) -> None:
    """Make the shards, run all variants in turn, print."""
    images = [photo(side, number) for number in range(DIFFERENT)]
    shards = folder / "shards"
    shards.mkdir()
    for shard in range(SHARDS):
        with webdataset.TarWriter(str(shards / f"{shard}.tar")) as writer:
            for number in range(EACH):
                writer.write(
                    {
                        "__key__": f"{shard}-{number:03d}",
                        "jpg": images[number % DIFFERENT],
                        "txt": b"a photo",
                    }
                )
    write_index(
        folder / "index.parquet",
        (describe_shard(path, name).shard for name, path in find_shards(shards).items()),
    )
    variants = all_variants(shards, images, side)
    streams = {name: variant() for name, variant in variants.items()}
    for stream in streams.values():
        drain(stream, 2 * IMAGES)  # pools, caches, prefetching
    rates: dict[str, list[float]] = {name: [] for name in streams}
    for _ in range(ROUNDS):
        for name, stream in streams.items():
            # Others' workers make batches ahead until their queues are full: let them. What
            # this one's made ahead must not count.
            time.sleep(1)
            workers = 2 if "2 workers" in name else 1
            drain(stream, MAX_DEPTH * BATCH if workers > 1 else 0)
            started = time.perf_counter()
            drain(stream, workers * IMAGES)
            rates[name].append(workers * IMAGES / (time.perf_counter() - started))
    show(rates)
    print(f"largest difference from Pillow's bilinear: {parity(images, shards)}")


def drain(stream: Iterator[Any], images: int) -> None:
    for _ in range(images // BATCH):
        next(stream)


def all_variants(shards: Path, images: list[bytes], side: int) -> dict[str, Variant]:
    variants: dict[str, Variant] = {
        "bare decoding": lambda: bare(images, side),
        "sm-train, 1 process": lambda: iter(ours(shards, workers=0)),
        "webdataset, 1 process": lambda: peer(shards, workers=0),
        "sm-train, 2 workers": lambda: iter(ours(shards, workers=2)),
        "webdataset, 2 workers": lambda: peer(shards, workers=2),
    }
    try:
        import streaming  # noqa: F401
    except ImportError:
        print("mosaicml-streaming is not installed: left out")
    else:
        write_mds(shards.parent / "mds", images)
        variants["mosaicml-streaming, 1 process"] = lambda: mosaic(shards.parent / "mds")
    return variants


def bare(images: list[bytes], side: int) -> Iterator[None]:
    """At half the size where that is the target, as our decoder does."""
    number = 0
    while True:
        for _ in range(BATCH):
            image = images[number % DIFFERENT]
            if side == 2 * RESOLUTION:
                simplejpeg.decode_jpeg(
                    image, min_height=RESOLUTION, min_width=RESOLUTION, min_factor=2
                )
            else:
                simplejpeg.decode_jpeg(image)
            number += 1
        yield


def ours(shards: Path, workers: int) -> Loader:
    seat = DataRank(("algo-1",), 0, 0, 1)
    index = shards.parent / "index.parquet"
    catalogue = build_catalog(shards, index, seat, lambda said: [said], shards.parent / "walk")
    data = DataConfig(
        "jpg", "txt", "center", "bilinear", aspect_buckets=False, max_bad_fraction=0.01
    )
    return Loader(
        catalogue, seat, data, resolution=RESOLUTION, batch_size=BATCH, seed=0, workers=workers
    )


def to_pixels(image: Image.Image) -> Tensor:
    scaled = image.convert("RGB").resize((RESOLUTION, RESOLUTION), Image.Resampling.BILINEAR)
    return torch.from_numpy(np.array(scaled))


def collate(samples: list[tuple[Tensor, str]]) -> tuple[Tensor, list[str]]:
    return torch.stack([image for image, _ in samples]), [text for _, text in samples]


def peer(shards: Path, workers: int) -> Iterator[Any]:
    urls = [str(path) for path in sorted(shards.glob("*.tar"))]
    dataset = (
        webdataset.WebDataset(urls, shardshuffle=len(urls), resampled=True)
        .shuffle(1000, initial=100)
        .decode("pil")
        .to_tuple("jpg", "txt")
        .map_tuple(to_pixels, None)
        .batched(BATCH, collation_fn=collate)
    )
    if not workers:
        return iter(dataset)
    return iter(DataLoader(dataset, batch_size=None, num_workers=workers))


def write_mds(folder: Path, images: list[bytes]) -> None:
    from streaming import MDSWriter

    with MDSWriter(out=str(folder), columns={"image": "jpeg", "caption": "str"}) as writer:
        for number in range(SHARDS * EACH):
            # It keeps the bytes of a picture that has a file, and encodes any other anew.
            path = folder.parent / f"{number % DIFFERENT}.jpg"
            path.write_bytes(images[number % DIFFERENT])
            writer.write({"image": Image.open(path), "caption": "a photo"})


def mosaic(folder: Path) -> Iterator[Any]:
    from streaming import StreamingDataset

    dataset = StreamingDataset(local=str(folder), shuffle=True, batch_size=BATCH)
    while True:
        samples = ((to_pixels(one["image"]), one["caption"]) for one in iter(dataset))
        while batch := list(islice(samples, BATCH)):
            yield collate(batch)


def show(rates: dict[str, list[float]]) -> None:
    median = {name: statistics.median(values) for name, values in rates.items()}
    print(f"{'variant':<32}{'images/s':>10}{'least':>8}{'most':>8}{'of bare':>9}")
    for name, values in rates.items():
        share = median[name] / median["bare decoding"]
        print(f"{name:<32}{median[name]:>10.0f}{min(values):>8.0f}{max(values):>8.0f}{share:>9.2f}")
    for one, other in (
        ("sm-train, 1 process", "webdataset, 1 process"),
        ("sm-train, 2 workers", "webdataset, 2 workers"),
        ("sm-train, 1 process", "mosaicml-streaming, 1 process"),
    ):
        if other in median:
            print(f"{one} / {other}: {median[one] / median[other]:.2f}×")


def parity(images: list[bytes], shards: Path) -> str:
    """Of decoding wholly and scaling, for the first photograph."""
    from sm_train.entrypoints.data.image_decoder import DecodeSpec

    found = []
    for image in images[:4]:
        out = torch.empty((RESOLUTION, RESOLUTION, 3), dtype=torch.uint8)
        DecodeSpec(RESOLUTION, RESOLUTION, mode="bilinear").decode(image, out)
        expected = to_pixels(Image.open(io.BytesIO(image)))
        found.append((out.int() - expected.int()).abs())
    every = torch.stack(found).float()
    return f"{int(every.max())} levels, {every.mean():.2f} on average"


if __name__ == "__main__":
    main()
