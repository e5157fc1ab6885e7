"""Encodes lossless JPEGs (T.81, annex H), which no library here writes."""

from __future__ import annotations

import struct

import numpy as np
from numpy.typing import NDArray

_CATEGORIES = 17
"""Classes of differences, by their number of bits; each gets a Huffman code of five bits."""


def lossless_jpeg(pixels: NDArray[np.uint8]) -> bytes:
    """Return ``pixels``, (H, W) grey or (H, W, 3) RGB, as a lossless JPEG (SOF3)."""
    height, width, channels = (*pixels.shape, 1)[:3]
    numbers = list(b"RGB"[:channels]) if channels > 1 else [1]  # libjpeg reads these as RGB
    components = b"".join(bytes((number, 0x11, 0)) for number in numbers)
    frame = struct.pack(">BHHB", 8, height, width, channels) + components
    lengths = bytes(_CATEGORIES if bits == 5 else 0 for bits in range(1, 17))
    table = b"\0" + lengths + bytes(range(_CATEGORIES))
    scan = bytes((channels,)) + b"".join(bytes((number, 0)) for number in numbers)
    scan += bytes((1, 0, 0))  # predictor 1: the sample to the left
    header = _segment(0xC3, frame) + _segment(0xC4, table) + _segment(0xDA, scan)
    return b"\xff\xd8" + header + _entropy(pixels.reshape(height, width, channels)) + b"\xff\xd9"


def _segment(marker: int, content: bytes) -> bytes:
    return bytes((0xFF, marker)) + struct.pack(">H", len(content) + 2) + content


def _entropy(pixels: NDArray[np.uint8]) -> bytes:
    samples = pixels.astype(np.int64)
    predicted = np.empty_like(samples)
    predicted[:, 1:] = samples[:, :-1]
    predicted[1:, 0] = samples[:-1, 0]  # the first sample of a row is predicted from above
    predicted[0, 0] = 128
    bits = "".join(map(_code, (samples - predicted).ravel().tolist()))
    bits += "1" * (-len(bits) % 8)
    content = int(bits, 2).to_bytes(len(bits) // 8, "big")
    return content.replace(b"\xff", b"\xff\0")


def _code(difference: int) -> str:
    """Return a difference's category, in five bits, and its value within the category."""
    size = abs(difference).bit_length()
    if not size:
        return f"{0:05b}"
    value = difference if difference > 0 else difference + (1 << size) - 1
    return f"{size:05b}{value:0{size}b}"
