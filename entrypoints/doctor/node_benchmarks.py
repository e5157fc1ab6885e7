"""How fast one node is by itself: arithmetic, copies to the GPU, files, and the loader's work.

Each measurement is bounded in time and memory, and gives None where there is nothing to measure.
"""

from __future__ import annotations

import contextlib
import os
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from sm_train.entrypoints.data.shard_format import MOMENTS

SLICE_SECONDS = 0.5
READ_SECONDS = 1.0
READ_BYTES = 2**28
LEAST_BYTES = 2**24
"""Of fewer the time is that of opening files."""

BLOCK_BYTES = 2**22
COPY_BYTES = 2**28
MOST_IMAGES = 256

GPU_SIDE, CPU_SIDE = 8192, 768
"""Sides of the square matrices: enough to fill the device, a second at most on a slow one."""


def matmul_tflops(device: torch.device) -> float:
    """TFLOP a second of square matrices: bf16 on a GPU, fp32 on a CPU."""
    gpu = device.type == "cuda"
    side = GPU_SIDE if gpu else CPU_SIDE
    left = torch.randn(side, side, device=device, dtype=torch.bfloat16 if gpu else torch.float32)
    out = torch.empty_like(left)

    def once() -> None:
        torch.mm(left, left, out=out)

    return 2 * side**3 / _seconds_each(once, device) / 1e12


def host_to_device_bytes_per_second(device: torch.device) -> float | None:
    """From pinned memory; None without a GPU."""
    if device.type != "cuda":
        return None
    host = torch.empty(COPY_BYTES, dtype=torch.uint8).pin_memory()
    there = torch.empty_like(host, device=device)
    return COPY_BYTES / _seconds_each(lambda: there.copy_(host, non_blocking=True), device)


def _seconds_each(once: Callable[[], object], device: torch.device) -> float:
    """Seconds of one call: the fastest of some, as neighbours only make it slower."""
    once()
    _finish(device)
    best, started = float("inf"), time.perf_counter()
    while (before := time.perf_counter()) - started < SLICE_SECONDS:
        once()
        _finish(device)
        best = min(best, time.perf_counter() - before)
    return best


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def disk_bytes_per_second(folder: Path) -> float | None:
    """Reading a file back that was just written to ``folder`` and dropped from memory.

    None where the disk is full or may not be written.
    """
    try:
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".doctor-") as file:
            content, started, size = os.urandom(BLOCK_BYTES), time.monotonic(), 0
            while size < READ_BYTES and time.monotonic() - started < READ_SECONDS:
                file.write(content)
                size += len(content)
            file.flush()
            os.fsync(file.fileno())
            return read_bytes_per_second([Path(file.name)])
    except OSError:
        return None


def read_bytes_per_second(files: list[Path]) -> float | None:
    """Reading files from their beginnings, in large blocks; None if there is too little."""
    size, started = 0, time.perf_counter()
    for path in files:
        with contextlib.suppress(OSError), path.open("rb", buffering=0) as file:
            # What an earlier run left in memory would be read from there.
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            while block := file.read(BLOCK_BYTES):
                size += len(block)
                if size >= READ_BYTES or time.perf_counter() - started > READ_SECONDS:
                    return size / (time.perf_counter() - started)
    return size / (time.perf_counter() - started) if size >= LEAST_BYTES else None


def decoded_per_second(shards: list[Path], image_key: str, resolution: int) -> float | None:
    """Images a second that one process reads out of ``shards`` and decodes to ``resolution``.

    None where no image could be decoded, or need not be: the shards carry latents.
    """
    from sm_train.entrypoints.data.image_decoder import DecodeSpec
    from sm_train.entrypoints.data.image_header import DecodeError

    target = DecodeSpec(resolution, resolution)
    out = torch.empty((resolution, resolution, 3), dtype=torch.uint8)
    done, started = 0, time.perf_counter()
    for content in _images(shards, tuple(f".{one}" for one in image_key.split(";"))):
        if content is None:
            return None
        with contextlib.suppress(DecodeError):
            target.decode(content, out)
            done += 1
        if done >= MOST_IMAGES or time.perf_counter() - started > READ_SECONDS:
            break
    return done / (time.perf_counter() - started) if done else None


def _images(shards: list[Path], endings: tuple[str, ...]) -> Iterator[bytes | None]:
    """The images' bytes; None where latents are beside one."""
    for shard in shards:
        with contextlib.suppress(OSError, tarfile.TarError), tarfile.open(shard, "r|") as tar:
            for member in tar:
                if member.name.endswith(f".{MOMENTS}"):
                    yield None
                elif member.name.endswith(endings) and (file := tar.extractfile(member)):
                    yield file.read()
