"""Small images of every format, and mutations of their bytes for a fuzzer."""

from __future__ import annotations

import io
import random
import struct
from collections.abc import Iterator
from typing import Any

import numpy as np
import pillow_heif
from PIL import Image, ImageCms

from tests.support.image_files import image_bytes
from tests.support.images.lossless_jpeg import lossless_jpeg

pillow_heif.register_heif_opener()

_INTERESTING = (0, 1, 0x7F, 0x80, 0xFE, 0xFF)


def small_images() -> list[bytes]:
    """Return at least one image of every format and of the unusual variants of JPEG and PNG."""
    with Image.open(io.BytesIO(image_bytes(5, (200, 136), "PNG"))) as image:
        picture = image.convert("RGB")
    profile = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
    exif = Image.Exif()
    exif[0x0112] = 6
    seeds = [
        _encode(picture, "JPEG", quality=90),
        _encode(picture, "JPEG", progressive=True, exif=exif, icc_profile=profile),
        _encode(picture, "JPEG", subsampling=2, restart_marker_blocks=2),
        _encode(picture.convert("L"), "JPEG"),
        _encode(picture.convert("CMYK"), "JPEG"),
        image_bytes(5, (200, 136), "MPO"),
        lossless_jpeg(np.asarray(picture.resize((64, 48)))),
        lossless_jpeg(np.asarray(picture.convert("L"))),
        _encode(picture, "PNG", exif=exif, icc_profile=profile),
        _encode(picture.convert("P"), "PNG"),
        _encode(picture, "WEBP"),
        _encode(picture, "WEBP", lossless=True, exif=exif),
    ]
    for image_format in ("AVIF", "BMP", "GIF", "HEIF", "JPEG2000", "TIFF"):
        seeds.append(_encode(picture, image_format))
    for compression in ("jpeg", "tiff_lzw", "tiff_deflate", "packbits"):
        seeds.append(_encode(picture, "TIFF", compression=compression))
    return seeds


def _encode(image: Image.Image, image_format: str, **options: Any) -> bytes:
    content = io.BytesIO()
    image.save(content, image_format, **options)
    return content.getvalue()


def mutations(seeds: list[bytes], seed: int) -> Iterator[bytes]:
    """Yield damaged versions of ``seeds`` without end; equal arguments yield equal files."""
    rng = random.Random(seed)
    while True:
        content = bytearray(rng.choice(seeds))
        for _ in range(rng.choice((1, 1, 2, 4, 16))):
            rng.choice(_MUTATIONS)(content, rng, seeds)
        yield bytes(content)


def _position(content: bytearray, rng: random.Random) -> int:
    """Return a position; half of them are in the first 1,000 bytes, where the headers are."""
    return rng.randrange(min(len(content), rng.choice((1000, len(content)))) or 1)


def _set_byte(content: bytearray, rng: random.Random, _: list[bytes]) -> None:
    if content:
        content[_position(content, rng)] = rng.choice((*_INTERESTING, rng.randrange(256)))


def _flip_bit(content: bytearray, rng: random.Random, _: list[bytes]) -> None:
    if content:
        content[_position(content, rng)] ^= 1 << rng.randrange(8)


def _set_number(content: bytearray, rng: random.Random, _: list[bytes]) -> None:
    """Replace two or four bytes: sides, lengths and offsets."""
    at = _position(content, rng) if content else 0
    value = rng.choice((0, 1, 0x7FFF, 0xFFFF, 0x7FFFFFFF, 0xFFFFFFFF, rng.randrange(4096)))
    form = rng.choice((">H", "<H", ">I", "<I"))
    number = struct.pack(form, value & (0xFFFF if "H" in form else 0xFFFFFFFF))
    content[at : at + len(number)] = number


def _remove(content: bytearray, rng: random.Random, _: list[bytes]) -> None:
    at = _position(content, rng)
    del content[at : at + rng.choice((1, 2, 16, 300))]


def _repeat(content: bytearray, rng: random.Random, _: list[bytes]) -> None:
    at = _position(content, rng)
    content[at:at] = content[at : at + rng.choice((1, 4, 64, 600))]


def _truncate(content: bytearray, rng: random.Random, _: list[bytes]) -> None:
    del content[_position(content, rng) :]


def _splice(content: bytearray, rng: random.Random, seeds: list[bytes]) -> None:
    """Replace a part by a part of another file."""
    other = rng.choice(seeds)
    at, start = _position(content, rng), rng.randrange(len(other))
    part = other[start : start + rng.choice((8, 64, 1000))]
    content[at : at + len(part)] = part


_MUTATIONS = (
    _set_byte,
    _set_byte,
    _flip_bit,
    _set_number,
    _set_number,
    _remove,
    _repeat,
    _truncate,
    _splice,
)
