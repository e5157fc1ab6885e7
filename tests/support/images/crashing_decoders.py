"""Functions of an image file that end their process, as a decoder with a fault does."""

from __future__ import annotations

import ctypes
import os
import signal
import time
from pathlib import Path
from typing import Any

import sm_train.entrypoints.data_prep.packing.image_metadata as image_metadata
import sm_train.entrypoints.images.image_decoder as image_decoder
import torch

CRASH = b"crash this decoder"
"""A file that contains this crashes the decoders of this module."""


def measure(content: memoryview) -> int:
    """Return the size of a file; crash on :data:`CRASH`."""
    if CRASH in bytes(content):
        ctypes.string_at(0)
    return len(content)


def end_as(content: memoryview) -> None:
    """End the process by the signal, or with the exit code, that the file names."""
    name = bytes(content).decode()
    if name.startswith("SIG"):
        os.kill(os.getpid(), getattr(signal, name))
    os._exit(int(name))


def crash_once(content: memoryview, marker: Path) -> int:
    """Crash in the first call only, like a decoder whose heap another image has damaged."""
    if not marker.exists():
        marker.touch()
        ctypes.string_at(0)
    return len(content)


def never_end(_: memoryview) -> None:
    """Hang, holding the interpreter's lock or not."""
    while True:
        time.sleep(1)


def multiply(content: memoryview, factor: int) -> bytes:
    """Return the file's content ``factor`` times."""
    return bytes(content) * factor


def write_first_byte(content: memoryview, out: Any, offset: int) -> None:
    """Fill ``out`` with the file's first byte plus ``offset``."""
    out[...] = content[0] + offset


def resize(images: torch.Tensor) -> torch.Tensor:
    """Halve images of shape (B, C, H, W) in a loop that PyTorch divides among its threads."""
    half = images.shape[-1] // 2
    return torch.nn.functional.interpolate(images, (half, half), mode="bicubic", antialias=True)


def resized_sum(content: memoryview) -> float:
    """Return the sum of a resized image with one value."""
    return float(resize(torch.full((1, 3, 2000, 2000), float(content[0]))).sum())


def fail(content: memoryview) -> None:
    """Raise an error that is a fault of this program."""
    raise ZeroDivisionError(f"{len(content)} bytes")


def install_crashing_decoders() -> None:
    """Let packing and loading crash on files that contain :data:`CRASH`."""
    for module, name in ((image_decoder, "_decode"), (image_metadata, "_hash")):
        setattr(module, name, _crashing(getattr(module, name)))


def _crashing(function: Any) -> Any:
    def crash_or_call(content: Any, *arguments: Any, **options: Any) -> Any:
        measure(content)
        return function(content, *arguments, **options)

    return crash_or_call
