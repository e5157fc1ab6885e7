"""Images per second from shards, against webdataset, mosaicml-streaming and bare decoding.

Photographs of 768, 1,024 and 2,048 pixels become uint8 batches of 512. The variants run
interleaved; the output is medians, spread and ratios. "Bare decoding" decodes the same bytes from
memory at the same size as the fast mode, without reading, scaling or batching. "Decoding and
scaling" adds the antialiased scaling and nothing else: the physical limit of one core. Our loader
in one process uses two cores, in two threads. The peers do what their own guides show (decode with
Pillow) with Pillow's bicubic scaling; ours is bicubic, too.

    python benchmarks/loader.py            # mosaicml-streaming takes part if it is installed
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
from sm_train.entrypoints.data_loading.loader import MAX_DEPTH, Loader, open_loader
from sm_train.entrypoints.data_loading.shard_catalog import DataRank, ShardCatalog, build_catalog
from sm_train.entrypoints.data_loading.webdataset_reader import ShardStream, list_stream
from sm_train.entrypoints.data_prep.packing.describe_shard import describe_shard
from sm_train.entrypoints.images.image_decoder import DecodeSpec
from sm_train.entrypoints.job_interface.index_location import index_path
from sm_train.entrypoints.job_interface.job_config import DataConfig, DecodeMode
from sm_train.entrypoints.shards.shard_format import find_shards
from sm_train.entrypoints.shards.shard_index import write_index
from torch import Tensor
from torch.utils.data import DataLoader

ROUNDS = 7
IMAGES, SHARDS, SHARD_SAMPLES = 16, 4, 48
BATCH, RESOLUTION = 16, 512
IMAGES_PER_WORKER = 96
"""Images of one measurement."""

Variant = Callable[[], Iterator[Any]]


def main() -> None:
    """Measure all image sizes."""
    torch.set_num_threads(1)
    for side in (768, 1024, 2048):
        with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
            print(
                f"\n{side} px → {RESOLUTION}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}"
            )
            measure(side, Path(folder))


def measure(side: int, folder: Path) -> None:
    """Write the shards, run all variants in turn and print the results."""
    images = [photo(side, number) for number in range(IMAGES)]
    shards = folder / "shards"
    shards.mkdir()
    for shard in range(SHARDS):
        with webdataset.TarWriter(str(shards / f"{shard}.tar")) as writer:
            for number in range(SHARD_SAMPLES):
                writer.write(
                    {
                        "__key__": f"{shard}-{number:03d}",
                        "jpg": images[number % IMAGES],
                        "txt": b"a photo",
                    }
                )
    write_index(
        index_path(shards),
        (describe_shard(path, name).shard for name, path in find_shards(shards).items()),
    )
    variants = all_variants(shards, images, side)
    streams = {name: variant() for name, variant in variants.items()}
    for stream in streams.values():
        drain(stream, 2 * IMAGES_PER_WORKER)  # warms up pools, caches and prefetching
    rates: dict[str, list[float]] = {name: [] for name in streams}
    for _ in range(ROUNDS):
        for name, stream in streams.items():
            # Wait until the workers of the other variants have filled their queues and idle. The
            # batches that this variant's workers have made meanwhile must not count.
            time.sleep(1)
            workers = 2 if "2 workers" in name else 1
            drain(stream, MAX_DEPTH * BATCH if workers > 1 else 0)
            started = time.perf_counter()
            drain(stream, workers * IMAGES_PER_WORKER)
            rates[name].append(workers * IMAGES_PER_WORKER / (time.perf_counter() - started))
    print_rates(rates)
    print(f"largest difference from Pillow's bicubic: {pillow_difference(images)}")


def drain(stream: Iterator[Any], images: int) -> None:
    """Take as many batches as hold ``images``."""
    for _ in range(images // BATCH):
        next(stream)


def all_variants(shards: Path, images: list[bytes], side: int) -> dict[str, Variant]:
    variants: dict[str, Variant] = {
        "bare decoding": lambda: bare_decoding(images, side),
        "decoding and scaling": lambda: bare_decoding(images, side, scaled=True),
        "sm-train, 1 process": lambda: iter(sm_train_loader(shards, decode_workers=0)),
        "sm-train exact, 1 process": lambda: iter(sm_train_loader(shards, 0, "exact")),
        "sm-train streaming, 1 process": lambda: iter(sm_train_loader(shards, 0, streamed=True)),
        "webdataset, 1 process": lambda: webdataset_batches(shards, workers=0),
        "sm-train, 2 workers": lambda: iter(sm_train_loader(shards, decode_workers=2)),
        "sm-train streaming, 2 workers": lambda: iter(sm_train_loader(shards, 2, streamed=True)),
        "webdataset, 2 workers": lambda: webdataset_batches(shards, workers=2),
    }
    try:
        import streaming  # noqa: F401
    except ImportError:
        print("mosaicml-streaming is not installed: left out")
    else:
        write_mds(shards.parent / "mds", images)
        variants["mosaicml-streaming, 1 process"] = lambda: streaming_batches(shards.parent / "mds")
    return variants


def bare_decoding(images: list[bytes], side: int, *, scaled: bool = False) -> Iterator[None]:
    """Decode at half the size if that covers twice the target, as our decoder does."""
    factor = 2 if side >= 4 * RESOLUTION else 1
    scale, size = torch.ops.aten._upsample_bicubic2d_aa.out, [RESOLUTION, RESOLUTION]
    out = torch.empty((1, *size, 3), dtype=torch.uint8).permute(0, 3, 1, 2)
    number = 0
    while True:
        for _ in range(BATCH):
            pixels = simplejpeg.decode_jpeg(
                images[number % IMAGES],
                min_height=side // factor,
                min_width=side // factor,
                min_factor=factor,
            )
            number += 1
            if scaled:
                planes = torch.from_numpy(pixels)[None].permute(0, 3, 1, 2)
                scale(planes, size, False, None, None, out=out)
        yield


def sm_train_loader(
    shards: Path, decode_workers: int, decode: DecodeMode = "fast", *, streamed: bool = False
) -> Loader:
    rank = DataRank(("algo-1",), node_rank=0, local_rank=0, local_world_size=1)
    listed: ShardCatalog | ShardStream
    if streamed:
        listed = list_stream(shards, rank, lambda obj: [obj])
    else:
        listed = build_catalog(
            shards, index_path(shards), rank, lambda obj: [obj], shards.parent / "scan"
        )
    config = DataConfig(
        "jpg",
        "txt",
        "center",
        decode,
        "srgb",
        "reject",
        aspect_buckets=False,
        max_bad_fraction=0.01,
        reader="webdataset" if streamed else "indexed",
        epoch_samples=IMAGES,
        shuffle_buffer=1000,
    )
    return open_loader(
        listed,
        rank,
        config,
        resolution=RESOLUTION,
        batch_size=BATCH,
        seed=0,
        decode_workers=decode_workers,
        gradient_accumulation_steps=1,
    )


def to_pixels(image: Image.Image) -> Tensor:
    scaled = image.convert("RGB").resize((RESOLUTION, RESOLUTION), Image.Resampling.BICUBIC)
    return torch.from_numpy(np.array(scaled))


def collate(samples: list[tuple[Tensor, str]]) -> tuple[Tensor, list[str]]:
    return torch.stack([image for image, _ in samples]), [text for _, text in samples]


def webdataset_batches(shards: Path, workers: int) -> Iterator[Any]:
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
        for number in range(SHARDS * SHARD_SAMPLES):
            # MDSWriter keeps the bytes of an image that has a file and encodes any other again.
            path = folder.parent / f"{number % IMAGES}.jpg"
            path.write_bytes(images[number % IMAGES])
            writer.write({"image": Image.open(path), "caption": "a photo"})


def streaming_batches(folder: Path) -> Iterator[Any]:
    from streaming import StreamingDataset

    dataset = StreamingDataset(local=str(folder), shuffle=True, batch_size=BATCH)
    while True:
        samples = ((to_pixels(row["image"]), row["caption"]) for row in iter(dataset))
        while batch := list(islice(samples, BATCH)):
            yield collate(batch)


def print_rates(rates: dict[str, list[float]]) -> None:
    median = {name: statistics.median(values) for name, values in rates.items()}
    print(f"{'variant':<32}{'images/s':>10}{'min':>8}{'max':>8}{'of bare':>9}")
    for name, values in rates.items():
        share = median[name] / median["bare decoding"]
        print(f"{name:<32}{median[name]:>10.0f}{min(values):>8.0f}{max(values):>8.0f}{share:>9.2f}")
    for variant, peer in (
        ("sm-train, 1 process", "webdataset, 1 process"),
        ("sm-train, 2 workers", "webdataset, 2 workers"),
        ("sm-train streaming, 1 process", "webdataset, 1 process"),
        ("sm-train streaming, 2 workers", "webdataset, 2 workers"),
        ("sm-train, 1 process", "mosaicml-streaming, 1 process"),
    ):
        if peer in median:
            print(f"{variant} / {peer}: {median[variant] / median[peer]:.2f}×")


def pillow_difference(images: list[bytes]) -> str:
    """Compare our decoder with Pillow's full decode and scaling."""
    differences = []
    for image in images[:4]:
        out = torch.empty((RESOLUTION, RESOLUTION, 3), dtype=torch.uint8)
        DecodeSpec(RESOLUTION, RESOLUTION).decode(image, out)
        expected = to_pixels(Image.open(io.BytesIO(image)))
        differences.append((out.int() - expected.int()).abs())
    levels = torch.stack(differences).float()
    return f"{int(levels.max())} levels, {levels.mean():.2f} on average"


if __name__ == "__main__":
    main()
