"""Compares packing images with webdataset's ShardWriter and with Pillow plus imagehash.

All files are in memory (/dev/shm). Variants are interleaved; the output shows medians, ranges and
ratios. "Headers" copies the bytes after parsing the header, and computes a digest of every image
and shard, which webdataset does not. "Decoded" decodes every image and computes its perceptual
hash, as Pillow and imagehash do; the hashes are compared. The last rows are the command `sm-train
pack` with one worker and two, including its start and planning.

    python benchmarks/pack.py
"""

from __future__ import annotations

import hashlib
import io
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import imagehash
import webdataset
from photos import photo
from PIL import Image
from sm_train.entrypoints.data_prep.packing.image_metadata import read_image_metadata
from sm_train.entrypoints.data_prep.packing.plan import PackInput, PackOptions, ShardPlan
from sm_train.entrypoints.data_prep.packing.shard_builder import InputReader, build_shard
from sm_train.entrypoints.images.decoder_pool import DecoderPool, Decoders
from sm_train.entrypoints.job_interface.job_config import DEFAULT_COLOR
from sm_train.entrypoints.storage.storage import LocalFolder
from sm_train.entrypoints.storage.store import S3Access

ROUNDS = 7
DIFFERENT, IMAGES, MANY = 24, 480, 9600

COMMAND = [sys.executable, "-m", "sm_train.toolkit"]
"""``sm-train`` of this interpreter's environment, which need not be activated."""

Variant = Callable[[list[PackInput], Path], None]


def main() -> None:
    """Measure two image sizes, then the command."""
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, {ROUNDS} rounds")
    for side in (768, 1024):
        with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
            compare(side, Path(folder))
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        scaling(Path(folder))


def write_album(folder: Path, side: int, count: int) -> list[PackInput]:
    """Write ``count`` files of ``DIFFERENT`` photographs, each with a caption."""
    folder.mkdir()
    images = [photo(side, number) for number in range(DIFFERENT)]
    inputs = []
    for number in range(count):
        path = folder / f"{number:06d}.jpg"
        path.write_bytes(images[number % DIFFERENT])
        path.with_suffix(".txt").write_text(f"photograph {number}")
        caption = str(path.with_suffix(".txt"))
        size = path.stat().st_size
        inputs.append(PackInput(number, path.name, str(path), size, caption_address=caption))
    return inputs


def compare(side: int, folder: Path) -> None:
    """Measure all variants in one process, on the same files."""
    inputs = write_album(folder / "album", side, IMAGES)
    decoders = DecoderPool(1)
    variants: dict[str, Variant] = {
        "sm-train, headers": lambda items, out: pack_shard(items, out, decoders, pixels=False),
        "webdataset.ShardWriter": shard_writer,
        "sm-train, decoded": lambda items, out: pack_shard(
            items[: IMAGES // 4], out, decoders, pixels=True
        ),
        "Pillow and imagehash": lambda items, out: pillow(items[: IMAGES // 4], out),
    }
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    for round_number in range(ROUNDS + 1):
        for name, variant in variants.items():
            out = folder / "out"
            touch_memory(folder / "touched", sum(item.bytes for item in inputs))
            started = time.perf_counter()
            variant(inputs, out)
            if round_number:  # the first round is a warm-up
                seconds[name].append(time.perf_counter() - started)
            shutil.rmtree(out)
    megabytes = sum(item.bytes for item in inputs) / 1e6
    print(f"\n{side} px, {megabytes / IMAGES * 1e3:.0f} kB an image")
    show(
        seconds,
        {
            name: IMAGES if "decoded" not in name and "Pillow" not in name else IMAGES // 4
            for name in variants
        },
    )
    ratio(seconds, "sm-train, headers", "webdataset.ShardWriter")
    ratio(seconds, "sm-train, decoded", "Pillow and imagehash")
    agreement(inputs[:DIFFERENT])


def pack_shard(items: Sequence[PackInput], out: Path, decoders: Decoders, *, pixels: bool) -> None:
    plan = ShardPlan(0, "shard-000000.tar", items, PackOptions(pixels=pixels))
    reader = InputReader(S3Access(), decoders)
    build_shard(plan, LocalFolder(out), reader, 1, lambda *_: None, {})


def shard_writer(items: Sequence[PackInput], out: Path) -> None:
    """Copy the bytes without checking them."""
    out.mkdir(exist_ok=True)
    with webdataset.ShardWriter(
        str(out / "%06d.tar"), maxsize=10**12, maxcount=10**9, verbose=0
    ) as writer:
        for item in items:
            writer.write(
                {
                    "__key__": f"{item.number:09d}",
                    "jpg": Path(item.address).read_bytes(),
                    "txt": Path(item.caption_address or "").read_text(),
                    "json": {"source": item.source},
                }
            )


def pillow(items: Sequence[PackInput], out: Path) -> None:
    """Decode each image once, for the check and the hash, as a script would."""
    out.mkdir(exist_ok=True)
    with webdataset.ShardWriter(
        str(out / "%06d.tar"), maxsize=10**12, maxcount=10**9, verbose=0
    ) as writer:
        for item in items:
            content = Path(item.address).read_bytes()
            with Image.open(io.BytesIO(content)) as image:
                image.load()
                metadata = {
                    "width": image.width,
                    "height": image.height,
                    "sha256": hashlib.sha256(content).hexdigest(),
                    "phash": str(imagehash.phash(image)),
                }
            writer.write(
                {
                    "__key__": f"{item.number:09d}",
                    "jpg": content,
                    "txt": Path(item.caption_address or "").read_text(),
                    "json": metadata,
                }
            )


def agreement(items: Sequence[PackInput]) -> None:
    """Print the share of hashes that differ from imagehash's in at most two bits."""
    close = 0
    for item in items:
        content = Path(item.address).read_bytes()
        with Image.open(io.BytesIO(content)) as image:
            reference = int(str(imagehash.phash(image)), 16)
        close += (
            (read_image_metadata(content, DEFAULT_COLOR).phash or 0) ^ reference
        ).bit_count() <= 2
    print(f"hashes within 2 bits of imagehash's: {close / len(items):.0%}")


def scaling(folder: Path) -> None:
    """Measure the command on one core and on two, and the upper limit of two cores.

    The upper limit is two concurrent commands that share nothing, each with one worker and half of
    the images. Even one worker gains from a second core, as it writes and hashes in other threads.
    """
    inputs = write_album(folder / "album", 768, MANY)
    for number, item in enumerate(inputs):
        half = folder / f"half-{number % 2}"
        half.mkdir(exist_ok=True)
        for path in (Path(item.address), Path(item.caption_address or "")):
            (half / path.name).hardlink_to(path)
    album, halves = folder / "album", [folder / "half-0", folder / "half-1"]
    variants: dict[str, Callable[[], None]] = {
        "1 worker on 1 core": lambda: run_commands([album], 1, cores={0}),
        "1 worker": lambda: run_commands([album], 1),
        "2 workers": lambda: run_commands([album], 2),
        "2 commands, half each": lambda: run_commands(halves, 1),
    }
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(3):
        for name, variant in variants.items():
            touch_memory(folder / "touched", sum(item.bytes for item in inputs))
            started = time.perf_counter()
            variant()
            seconds[name].append(time.perf_counter() - started)
            for out in folder.glob("*.out"):
                shutil.rmtree(out)
    print(f"\nsm-train pack of {MANY} images of 768 px, decoded and hashed")
    show(seconds, dict.fromkeys(seconds, MANY))
    ratio(seconds, "2 workers", "1 worker on 1 core")
    ratio(seconds, "2 workers", "1 worker")
    ratio(seconds, "2 workers", "2 commands, half each")


def run_commands(albums: Sequence[Path], workers: int, cores: set[int] | None = None) -> None:
    """Run ``sm-train pack`` on all albums at the same time, on all cores or on ``cores``."""
    running = [
        subprocess.Popen(
            [
                *COMMAND,
                "pack",
                str(album),
                f"{album}.out",
                "--shard-size",
                "100MB",
                "--workers",
                str(workers),
            ],
            preexec_fn=(lambda: os.sched_setaffinity(0, cores)) if cores else None,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for album in albums
    ]
    if any(process.wait() for process in running):
        raise SystemExit("sm-train pack failed")


def touch_memory(path: Path, size: int) -> None:
    """Write and remove ``size`` bytes: a virtual machine's memory is slow on its first use."""
    with path.open("wb") as file:
        for _ in range(size // 2**20 + 1):
            file.write(bytes(2**20))
    path.unlink()


def show(seconds: dict[str, list[float]], images: dict[str, int]) -> None:
    print(f"{'variant':<28}{'images/s':>10}{'least':>8}{'most':>8}")
    for name, values in seconds.items():
        rates = [images[name] / value for value in values]
        print(f"{name:<28}{statistics.median(rates):>10.0f}{min(rates):>8.0f}{max(rates):>8.0f}")


def ratio(seconds: dict[str, list[float]], variant: str, baseline: str) -> None:
    factor = statistics.median(seconds[baseline]) / statistics.median(seconds[variant])
    print(f"{variant} / {baseline}: {factor:.2f}×")


if __name__ == "__main__":
    main()
