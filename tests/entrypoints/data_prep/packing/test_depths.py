"""Every depth, format and interpretation that ``pack --convert`` takes, against other codecs.

tifffile and imagecodecs write the files from known levels, and read them back to prove it. What
Pillow reads as other levels is refused.
"""

from __future__ import annotations

import io
import struct
from collections.abc import Callable
from typing import Any

import imagecodecs
import numpy as np
import pillow_heif
import pytest
import tifffile
from numpy.typing import NDArray
from PIL import Image
from sm_train.entrypoints.data_prep.packing.reencode import reencode
from sm_train.entrypoints.images.image_header import DecodeError
from sm_train.entrypoints.job_interface.job_config import DEFAULT_COLOR

Array = NDArray[Any]

HEIGHT, WIDTH = 64, 96
_rows, _columns = np.mgrid[0:HEIGHT, 0:WIDTH]
RGB = np.stack(
    [_columns / (WIDTH - 1), _rows / (HEIGHT - 1), (_rows + _columns) / (HEIGHT + WIDTH - 2)], -1
)
GRAY = RGB[..., 0]
ALPHA = np.full((HEIGHT, WIDTH, 1), 0.5)
TRANSPARENT = np.concatenate([RGB, ALPHA], -1)
INKS = np.concatenate([1 - RGB, np.full((HEIGHT, WIDTH, 1), 0.2)], -1)
BLACK = GRAY > 0.5
DECODER_LEVELS = 3.0
"""Mean difference of the JPEG of quality 100 that comes out, and of lossy formats."""


def levels(picture: Array, bits: int) -> Array:
    """Return values from 0 to 1 as integers of ``bits``."""
    kind = np.uint8 if bits <= 8 else np.uint16 if bits <= 16 else np.uint32
    return np.rint(picture * (2**bits - 1)).astype(kind)


def planes(picture: Array) -> Array:
    return np.moveaxis(picture, -1, 0)


def tiff(stored: Array, photometric: str, **options: Any) -> bytes:
    """Return a TIFF that tifffile reads as the levels that were stored."""
    content = io.BytesIO()
    tifffile.imwrite(content, stored, photometric=photometric, **options)
    if options.get("compression") != "jpeg":
        read = tifffile.imread(io.BytesIO(content.getvalue()))
        assert np.array_equal(np.squeeze(read), np.squeeze(stored))
    return content.getvalue()


def off(content: bytes, expected: Array) -> float:
    """Return by how many levels the converted image differs on average from values in 0 to 1."""
    with Image.open(io.BytesIO(reencode(content, None, 100, DEFAULT_COLOR))) as image:
        pixels = np.asarray(image.convert("RGB")).astype(np.float64)
    shown = np.broadcast_to(expected[..., None] if expected.ndim == 2 else expected, pixels.shape)
    return float(np.abs(pixels - 255 * shown).mean())


TIFFS: dict[str, tuple[Callable[[], bytes], Array]] = {
    "RGB 8, planes": (
        lambda: tiff(planes(levels(RGB, 8)), "rgb", planarconfig="separate"),
        RGB,
    ),
    "RGB 16, planes, compressed": (
        lambda: tiff(
            planes(levels(RGB, 16)), "rgb", planarconfig="separate", compression="deflate"
        ),
        RGB,
    ),
    "RGB 16, tiles": (lambda: tiff(levels(RGB, 16), "rgb", tile=(16, 16)), RGB),
    "RGB 16, predictor": (
        lambda: tiff(levels(RGB, 16), "rgb", compression="lzw", predictor=True),
        RGB,
    ),
    "RGB 8, BigTIFF": (lambda: tiff(levels(RGB, 8), "rgb", bigtiff=True), RGB),
    "alpha 8, unassociated": (
        lambda: tiff(levels(TRANSPARENT, 8), "rgb", extrasamples=["unassalpha"]),
        RGB * 0.5 + 0.5,
    ),
    "alpha 16, unassociated": (
        lambda: tiff(levels(TRANSPARENT, 16), "rgb", extrasamples=["unassalpha"]),
        RGB * 0.5 + 0.5,
    ),
    "alpha 8, associated": (
        lambda: tiff(
            levels(np.concatenate([RGB * 0.5, ALPHA], -1), 8), "rgb", extrasamples=["assocalpha"]
        ),
        RGB * 0.5 + 0.5,
    ),
    "gray and alpha": (
        lambda: tiff(
            levels(TRANSPARENT[..., [0, 3]], 8), "minisblack", extrasamples=["unassalpha"]
        ),
        GRAY * 0.5 + 0.5,
    ),
    "CMYK 8": (lambda: tiff(levels(INKS, 8), "separated"), RGB * 0.8),
    "CMYK 16": (lambda: tiff(levels(INKS, 16), "separated"), RGB * 0.8),
    "palette": (
        lambda: tiff(
            levels(GRAY, 8),
            "palette",
            colormap=np.stack([65535 - np.arange(256) * 257, *[np.arange(256) * 257] * 2]).astype(
                np.uint16
            ),
        ),
        np.stack([1 - GRAY, GRAY, GRAY], -1),
    ),
    "bilevel": (lambda: tiff(BLACK, "minisblack"), BLACK.astype(float)),
    "bilevel, 0 is white": (lambda: tiff(~BLACK, "miniswhite"), BLACK.astype(float)),
    "gray 12, packed": (lambda: tiff(levels(GRAY, 12), "minisblack", bitspersample=12), GRAY),
}
for bits in (2, 4, 8, 16):
    packed = {} if bits in (8, 16) else {"bitspersample": bits}
    rounded = levels(GRAY, bits) / (2**bits - 1)
    TIFFS[f"gray {bits}"] = (
        lambda bits=bits, packed=packed: tiff(levels(GRAY, bits), "minisblack", **packed),
        rounded,
    )
    TIFFS[f"gray {bits}, 0 is white"] = (
        lambda bits=bits, packed=packed: tiff(
            (2**bits - 1 - levels(GRAY, bits)).astype(levels(GRAY, bits).dtype),
            "miniswhite",
            **packed,
        ),
        rounded,
    )
for order in "<>":
    TIFFS[f"RGB 16 {order}"] = (
        lambda order=order: tiff(levels(RGB, 16), "rgb", byteorder=order),
        RGB,
    )
for compression in ("lzw", "deflate", "packbits", "jpeg", "zstd", "lzma"):
    TIFFS[f"RGB 8 {compression}"] = (
        lambda compression=compression: tiff(levels(RGB, 8), "rgb", compression=compression),
        RGB,
    )
TIFFS["gray 32"] = (lambda: tiff(levels(GRAY, 32), "minisblack"), GRAY)


@pytest.mark.parametrize(("write", "expected"), TIFFS.values(), ids=TIFFS)
def test_tiff_levels_are_those_that_were_written(
    write: Callable[[], bytes], expected: Array
) -> None:
    assert off(write(), expected) < DECODER_LEVELS


REFUSED_TIFFS: dict[str, Callable[[], bytes]] = {
    "RGB 16, planes": lambda: tiff(planes(levels(RGB, 16)), "rgb", planarconfig="separate"),
    "CMYK 16, planes": lambda: tiff(planes(levels(INKS, 16)), "separated", planarconfig="separate"),
    "signed 8": lambda: tiff(levels(GRAY, 7).astype(np.int8), "minisblack"),
    "signed 16": lambda: tiff(levels(GRAY, 15).astype(np.int16), "minisblack"),
    "signed 32": lambda: tiff(levels(GRAY, 31).astype(np.int32), "minisblack"),
    "float 16": lambda: tiff(RGB.astype(np.float16), "rgb"),
    "float 32": lambda: tiff(GRAY.astype(np.float32), "minisblack"),
    "RGB 32": lambda: tiff(levels(RGB, 32), "rgb"),
    "RGB 12, packed": lambda: tiff(levels(RGB, 12), "rgb", bitspersample=12),
    "gray 10, packed": lambda: tiff(levels(GRAY, 10), "minisblack", bitspersample=10),
    "gray 32, 0 is white": lambda: tiff(levels(GRAY, 32), "miniswhite"),
    "palette 16": lambda: tiff(
        levels(GRAY, 16), "palette", colormap=np.stack([np.arange(65536)] * 3).astype(np.uint16)
    ),
}


@pytest.mark.parametrize("write", REFUSED_TIFFS.values(), ids=REFUSED_TIFFS)
def test_tiffs_that_pillow_misreads_or_cannot_read_are_refused(write: Callable[[], bytes]) -> None:
    """Pillow 13 reads deep planes and signed bytes without an error, as other levels."""
    with pytest.raises(DecodeError, match=r"image-(mode|corrupt)"):
        reencode(write(), None, 95, DEFAULT_COLOR)


def jpeg_2000(picture: Array, bits: int, container: str = "jp2") -> bytes:
    content: bytes = imagecodecs.jpeg2k_encode(
        levels(picture, bits), codecformat=container, level=0, reversible=True, bitspersample=bits
    )
    assert np.array_equal(imagecodecs.jpeg2k_decode(content), levels(picture, bits))
    return content


@pytest.mark.parametrize("container", ["jp2", "j2k"])
@pytest.mark.parametrize(
    ("picture", "bits", "expected"),
    [
        (GRAY, 8, GRAY),
        (GRAY, 10, GRAY),
        (GRAY, 12, GRAY),
        (GRAY, 16, GRAY),
        (RGB, 8, RGB),
        (TRANSPARENT, 8, RGB * 0.5 + 0.5),
    ],
)
def test_jpeg_2000_levels_are_those_that_were_written(
    picture: Array, bits: int, expected: Array, container: str
) -> None:
    if picture is TRANSPARENT and container == "j2k":
        return  # a codestream alone does not say that a channel is alpha
    assert off(jpeg_2000(picture, bits, container), expected) < DECODER_LEVELS


@pytest.mark.parametrize("bits", [10, 12, 16])
@pytest.mark.parametrize("picture", [RGB, TRANSPARENT], ids=["RGB", "RGBA"])
def test_deep_colors_of_jpeg_2000_are_refused(picture: Array, bits: int) -> None:
    """Pillow 13 rounds the last half level up to 256 and stores 0, so white becomes black."""
    with pytest.raises(DecodeError, match=rf"image-mode: .*{bits} bits"):
        reencode(jpeg_2000(picture, bits), None, 95, DEFAULT_COLOR)


@pytest.mark.parametrize("bits", [8, 10, 12])
@pytest.mark.parametrize("layout", ["yuv444", "yuv422", "yuv420", "yuv400"])
def test_avif_levels_are_those_that_were_written(layout: str, bits: int) -> None:
    picture = GRAY if layout == "yuv400" else RGB
    content = imagecodecs.avif_encode(
        levels(picture, bits), level=95, pixelformat=layout, bitspersample=bits
    )
    assert off(content, picture) < DECODER_LEVELS


@pytest.mark.parametrize("mode", ["RGB", "RGB;16", "RGBA", "L", "L;16"])
def test_heic_levels_are_those_that_were_written(mode: str) -> None:
    picture = {"L": GRAY, "RGBA": TRANSPARENT}.get(mode.partition(";")[0], RGB)
    stored = levels(picture, 16 if mode.endswith("16") else 8)
    content = io.BytesIO()
    written = pillow_heif.from_bytes(mode=mode, size=(WIDTH, HEIGHT), data=stored.tobytes())
    written.save(content, quality=95, chroma=444)
    expected = RGB * 0.5 + 0.5 if mode == "RGBA" else picture
    assert off(content.getvalue(), expected) < DECODER_LEVELS


def bitmap(bits: int, rows: list[bytes], palette: bytes = b"", masks: bytes = b"") -> bytes:
    """Return a Windows bitmap of rows from the bottom to the top, padded to four bytes."""
    pixels = b"".join(row + bytes(-len(row) % 4) for row in rows)
    start = 54 + len(masks) + len(palette)
    method = 3 if masks else 0
    header = struct.pack(
        "<IiiHHIIiiII", 40, WIDTH, HEIGHT, 1, bits, method, len(pixels), 0, 0, len(palette) // 4, 0
    )
    file = b"BM" + struct.pack("<IHHI", start + len(pixels), 0, 0, start)
    return file + header + masks + palette + pixels


def bitmaps() -> dict[str, tuple[bytes, Array]]:
    colors, indexes = levels(RGB, 8)[::-1], levels(GRAY, 8)[::-1]
    wide = colors.astype(np.uint16)
    fives = (wide[..., 0] >> 3 << 10 | wide[..., 1] >> 3 << 5 | wide[..., 2] >> 3).astype("<u2")
    sixes = (wide[..., 0] >> 3 << 11 | wide[..., 1] >> 2 << 5 | wide[..., 2] >> 3).astype("<u2")
    falling = b"".join(bytes([255 - level, level, level, 0]) for level in range(256))
    fourth = levels(GRAY, 4)
    nibbles = [bytes((row[::2] << 4 | row[1::2]).tolist()) for row in fourth[::-1]]
    grays = b"".join(bytes([17 * level] * 3 + [0]) for level in range(16))
    bits = [np.packbits(row).tobytes() for row in BLACK[::-1]]
    padded = np.concatenate([colors[..., ::-1], np.zeros((HEIGHT, WIDTH, 1), np.uint8)], -1)
    return {
        "24": (bitmap(24, [row[:, ::-1].tobytes() for row in colors]), RGB),
        "32": (bitmap(32, [row.tobytes() for row in padded]), RGB),
        "16": (bitmap(16, [row.tobytes() for row in fives]), RGB),
        "16, masks": (
            bitmap(16, [r.tobytes() for r in sixes], masks=struct.pack("<3I", 0xF800, 0x7E0, 0x1F)),
            RGB,
        ),
        "8": (
            bitmap(8, [row.tobytes() for row in indexes], falling),
            np.stack([GRAY, GRAY, 1 - GRAY], -1),
        ),
        "4": (bitmap(4, nibbles, grays), fourth / 15),
        "1": (bitmap(1, bits, bytes([0, 0, 0, 0, 255, 255, 255, 0])), BLACK.astype(float)),
        "1, white first": (
            bitmap(1, bits, bytes([255, 255, 255, 0, 0, 0, 0, 0])),
            (~BLACK).astype(float),
        ),
    }


BITMAPS = bitmaps()


@pytest.mark.parametrize(("content", "expected"), BITMAPS.values(), ids=BITMAPS)
def test_bitmap_levels_are_those_that_were_written(content: bytes, expected: Array) -> None:
    assert off(content, expected) < DECODER_LEVELS


def test_gif_levels_are_those_that_were_written() -> None:
    content = imagecodecs.gif_encode(levels(GRAY, 8))
    assert off(content, GRAY) < DECODER_LEVELS
