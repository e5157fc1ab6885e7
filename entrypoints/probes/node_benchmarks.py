"""Benchmarks of one node alone: matrix products, copies to the GPU, file reads, image decoding.

Each measurement is bounded in time and memory, and returns None if there is nothing to measure.
"""

from __future__ import annotations

import contextlib
import os
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from sm_train.entrypoints.job_interface.job_config import ColorPolicy
from sm_train.entrypoints.shards.shard_format import MOMENTS

SLICE_SECONDS = 0.5
READ_SECONDS = 1.0
READ_BYTES = 2**28
MIN_READ_BYTES = 2**24
"""Reading less mostly measures the time to open files."""

BLOCK_BYTES = 2**22
COPY_BYTES = 2**28
MAX_IMAGES = 256

GPU_MATRIX_SIZE, CPU_MATRIX_SIZE = 8192, 768
"""Rows and columns: enough to fill the device, at most a second on a slow one."""


def matmul_tflops(device: torch.device) -> float:
    """Return TFLOP per second of square matrix products: bf16 on a GPU, fp32 on a CPU."""
    gpu = device.type == "cuda"
    size = GPU_MATRIX_SIZE if gpu else CPU_MATRIX_SIZE
    matrix = torch.randn(size, size, device=device, dtype=torch.bfloat16 if gpu else torch.float32)
    out = torch.empty_like(matrix)

    def multiply() -> None:
        torch.mm(matrix, matrix, out=out)

    return 2 * size**3 / _best_seconds(multiply, device) / 1e12


def host_to_device_bytes_per_second(device: torch.device) -> float | None:
    """Return the copy bandwidth from pinned memory; None without a GPU."""
    if device.type != "cuda":
        return None
    host = torch.empty(COPY_BYTES, dtype=torch.uint8).pin_memory()
    on_device = torch.empty_like(host, device=device)
    return COPY_BYTES / _best_seconds(lambda: on_device.copy_(host, non_blocking=True), device)


def _best_seconds(call: Callable[[], object], device: torch.device) -> float:
    """Return the seconds of the fastest call: other programs only slow it down."""
    call()  # warm-up
    _synchronize(device)
    best, started = float("inf"), time.perf_counter()
    while (before := time.perf_counter()) - started < SLICE_SECONDS:
        call()
        _synchronize(device)
        best = min(best, time.perf_counter() - before)
    return best


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def disk_bytes_per_second(folder: Path) -> float | None:
    """Return the bandwidth of reading a file that was just written to ``folder``, uncached.

    None if the disk is full or not writable.
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
    """Return the bandwidth of reading ``files`` in large blocks; None if they are too small."""
    size, started = 0, time.perf_counter()
    for path in files:
        with contextlib.suppress(OSError), path.open("rb", buffering=0) as file:
            if sys.platform == "linux":
                # Drops the page cache: what an earlier run read would come from memory.
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            while block := file.read(BLOCK_BYTES):
                size += len(block)
                if size >= READ_BYTES or time.perf_counter() - started > READ_SECONDS:
                    return size / (time.perf_counter() - started)
    return size / (time.perf_counter() - started) if size >= MIN_READ_BYTES else None


def decoded_per_second(
    shards: list[Path], image_key: str, resolution: int, color: ColorPolicy
) -> float | None:
    """Return the images per second that one process reads from ``shards`` and decodes.

    None if no image could be decoded, or none needs to be: the shards carry latents.
    """
    from sm_train.entrypoints.images.image_decoder import DecodeSpec
    from sm_train.entrypoints.images.image_header import DecodeError

    spec = DecodeSpec(resolution, resolution, decode_mode="exact", color=color)
    out = torch.empty((resolution, resolution, 3), dtype=torch.uint8)  # (H, W, C)
    decoded, started = 0, time.perf_counter()
    for content in _images(shards, tuple(f".{part}" for part in image_key.split(";"))):
        if content is None:
            return None
        with contextlib.suppress(DecodeError):
            spec.decode(content, out)
            decoded += 1
        if decoded >= MAX_IMAGES or time.perf_counter() - started > READ_SECONDS:
            break
    return decoded / (time.perf_counter() - started) if decoded else None


def _images(shards: list[Path], suffixes: tuple[str, ...]) -> Iterator[bytes | None]:
    """Yield the images' bytes; None for a sample that carries latents."""
    for shard in shards:
        with contextlib.suppress(OSError, tarfile.TarError), tarfile.open(shard, "r|") as tar:
            for member in tar:
                if member.name.endswith(f".{MOMENTS}"):
                    yield None
                elif member.name.endswith(suffixes) and (file := tar.extractfile(member)):
                    yield file.read()
