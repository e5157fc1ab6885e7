"""Image files of one chart, with each way to state colors that a format has."""

from __future__ import annotations

import io
import struct
import zlib
from typing import Any

import numpy as np
import pillow_heif
from numpy.typing import NDArray
from PIL import Image

from tests.support.images.icc_profiles import gray_profile, rgb_profile, table_profile

SIDE, PATCH = 8, 24
"""Patches of the chart along a side, and pixels of a patch."""

_random = np.random.default_rng(3)
COLORS: NDArray[np.uint8] = _random.integers(0, 256, (SIDE, SIDE, 3)).astype(np.uint8)
LEVELS: NDArray[np.uint8] = (np.arange(SIDE**2, dtype=np.uint8) * 4).reshape(SIDE, SIDE)


def patches(values: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Return an image of patches, from the color of each."""
    return values.repeat(PATCH, 0).repeat(PATCH, 1)


def centers(pixels: NDArray[np.uint8]) -> NDArray[np.float64]:
    """Return the color in the middle of each patch."""
    return pixels[PATCH // 2 :: PATCH, PATCH // 2 :: PATCH].astype(np.float64)


CHART = Image.fromarray(patches(COLORS))
GRAY_CHART = Image.fromarray(patches(LEVELS))


def encode(image: Image.Image, image_format: str, **options: Any) -> bytes:
    content = io.BytesIO()
    lossless: dict[str, dict[str, Any]] = {
        "JPEG": {"quality": 100, "subsampling": 0},
        "WEBP": {"lossless": True},
        "AVIF": {"quality": 100, "subsampling": "4:4:4"},
    }
    image.save(content, image_format, **lossless.get(image_format, {}), **options)
    return content.getvalue()


def png_chunk(kind: bytes, content: bytes) -> bytes:
    checksum = struct.pack(">I", zlib.crc32(kind + content))
    return struct.pack(">I", len(content)) + kind + content + checksum


def png_with(*chunks: tuple[bytes, bytes], image: Image.Image = CHART) -> bytes:
    """Return a PNG with chunks after its header."""
    content = encode(image, "PNG")
    return content[:33] + b"".join(png_chunk(*chunk) for chunk in chunks) + content[33:]


def deep_png(pixels: NDArray[np.uint16], profile: bytes) -> bytes:
    """Return a PNG of 16 bits for each of three channels, which Pillow does not write."""
    height, width, _ = pixels.shape
    rows = b"".join(b"\0" + row.astype(">u2").tobytes() for row in pixels)
    header = struct.pack(">IIBBBBB", width, height, 16, 2, 0, 0, 0)
    chunks = [(b"IHDR", header), (b"iCCP", b"x\0\0" + zlib.compress(profile))]
    chunks += [(b"IDAT", zlib.compress(rows)), (b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(png_chunk(*chunk) for chunk in chunks)


def avif(primaries: int, transfer: int) -> bytes:
    """Return an AVIF whose color codes are these: two numbers in its `nclx` box."""
    content = bytearray(encode(CHART, "AVIF"))
    at = content.index(b"nclx") + 4
    content[at : at + 4] = struct.pack(">HH", primaries, transfer)
    return bytes(content)


def heic(primaries: int, transfer: int) -> bytes:
    content = io.BytesIO()
    pillow_heif.from_pillow(CHART).save(
        content,
        quality=-1,
        chroma=444,
        color_primaries=primaries,
        transfer_characteristics=transfer,
        matrix_coefficients=6,
        full_range_flag=1,
    )
    return content.getvalue()


def cmyk_profile() -> bytes:
    """Return a profile of inks that absorb a part of the light each, and black with L* of 5."""

    def to_lab(inks: NDArray[np.float64]) -> NDArray[np.float64]:
        cyan, magenta, yellow, black = inks.T
        light = 100 - 95 * (
            1 - (1 - 0.4 * cyan) * (1 - 0.5 * magenta) * (1 - 0.1 * yellow) * (1 - black)
        )
        strength = 1 - black
        a = strength * (70 * magenta - 40 * cyan) * (1 - 0.3 * yellow)
        b = strength * (85 * yellow - 45 * cyan - 10 * magenta)
        return np.stack([light, a, b], axis=1)

    return table_profile("CMYK", to_lab)


def rgb_table_profile() -> bytes:
    """Return an RGB profile with a table, as scanners and printers have."""

    def to_lab(rgb: NDArray[np.float64]) -> NDArray[np.float64]:
        red, green, blue = (rgb**1.1).T
        light = 100 * (0.25 * red + 0.65 * green + 0.1 * blue)
        return np.stack([light, 60 * (red - green), 70 * (0.5 * (red + green) - blue)], axis=1)

    return table_profile("RGB ", to_lab)


def browser_pictures() -> dict[str, bytes]:
    """Return the files that a browser shows in the colors that their data state, by name."""
    adobe, prophoto = rgb_profile("Adobe RGB"), rgb_profile("ProPhoto RGB")
    p3 = rgb_profile("Display P3")
    transparent = CHART.convert("RGBA")
    transparent.putalpha(128)
    files = {
        f"JPEG {name}": encode(CHART, "JPEG", icc_profile=rgb_profile(name))
        for name in ("sRGB", "Adobe RGB", "Display P3", "ProPhoto RGB")
    }
    files |= {
        "JPEG with parametric curves": encode(
            CHART, "JPEG", icc_profile=rgb_profile("Display P3", "para")
        ),
        "PNG Adobe RGB": encode(CHART, "PNG", icc_profile=adobe),
        "PNG half transparent": encode(transparent, "PNG", icc_profile=adobe),
        "PNG with a palette": encode(CHART.quantize(64), "PNG", icc_profile=adobe),
        "PNG 16 bits": deep_png(patches(COLORS).astype(np.uint16) * 257, prophoto),
        "WebP Display P3": encode(CHART, "WEBP", icc_profile=p3),
        "AVIF with a profile": encode(CHART, "AVIF", icc_profile=p3),
        "AVIF nclx Display P3": avif(12, 13),
        "AVIF nclx BT.2020": avif(9, 14),
        "AVIF nclx video": avif(1, 1),
        "MPO with a gain map": encode(
            CHART, "MPO", save_all=True, append_images=[GRAY_CHART.convert("RGB")], icc_profile=p3
        ),
        "JPEG with a CMYK profile": encode(CHART, "JPEG", icc_profile=cmyk_profile()),
        "JPEG CMYK without a profile": encode(CHART.convert("CMYK"), "JPEG"),
    }
    for name in ("gamma 1.8", "dot gain 20 %"):
        profile = gray_profile(name)
        files[f"gray JPEG {name}"] = encode(GRAY_CHART, "JPEG", icc_profile=profile)
        files[f"gray PNG {name}"] = encode(GRAY_CHART, "PNG", icc_profile=profile)
        alpha = GRAY_CHART.convert("LA")
        alpha.putalpha(200)
        files[f"gray and alpha PNG {name}"] = encode(alpha, "PNG", icc_profile=profile)
    for name, profile in (("Adobe RGB", adobe), ("ProPhoto RGB", prophoto)):
        files[f"gray JPEG {name}"] = encode(GRAY_CHART, "JPEG", icc_profile=profile)
        files[f"gray PNG {name}"] = encode(GRAY_CHART, "PNG", icc_profile=profile)
    return files
