"""Images of other formats become JPEGs that look the same."""

from __future__ import annotations

import io
import struct
from typing import Any

import numpy as np
import pillow_heif
import pytest
from PIL import Image, ImageOps, TiffImagePlugin
from sm_train.entrypoints.data_prep.packing.image_metadata import read_image_metadata
from sm_train.entrypoints.data_prep.packing.reencode import is_convertible, reencode
from sm_train.entrypoints.images.image_header import DecodeError, file_kind
from sm_train.entrypoints.job_interface.job_config import DEFAULT_COLOR as SRGB

from tests.support.image_files import image_bytes

pillow_heif.register_heif_opener()

FORMATS = ["AVIF", "BMP", "GIF", "HEIF", "JPEG2000", "TIFF"]


def picture() -> Image.Image:
    with Image.open(io.BytesIO(image_bytes(3, (96, 64), "PNG"))) as image:
        return image.convert("RGB")


def encode(image: Image.Image, image_format: str, **options: Any) -> bytes:
    content = io.BytesIO()
    image.save(content, image_format, **options)
    return content.getvalue()


def decoded(content: bytes) -> Image.Image:
    """Return what Pillow decodes: some of the formats lose detail."""
    with Image.open(io.BytesIO(content)) as image:
        return image.convert("RGB")


def mean_difference(content: bytes, expected: Image.Image) -> float:
    with Image.open(io.BytesIO(content)) as image:
        assert (image.format, image.size) == ("JPEG", expected.size)
        levels = np.asarray(image.convert("RGB"), int) - np.asarray(expected.convert("RGB"), int)
    return float(np.abs(levels).mean())


@pytest.mark.parametrize("image_format", FORMATS)
def test_each_format_is_recognized_and_converted(image_format: str) -> None:
    content = encode(picture(), image_format)
    assert is_convertible(content)
    assert mean_difference(reencode(content, None, 95, SRGB), decoded(content)) < 3
    assert read_image_metadata(reencode(content, 48, 95, SRGB), SRGB).width == 48
    with pytest.raises(DecodeError, match="image-kind"):
        read_image_metadata(content, SRGB)


@pytest.mark.parametrize("image_format", ["AVIF", "HEIF", "TIFF"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_converted_images_are_upright(image_format: str, orientation: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    content = encode(picture(), image_format, exif=exif)
    with Image.open(io.BytesIO(content)) as image:
        expected = ImageOps.exif_transpose(image).convert("RGB")
    converted = reencode(content, None, 95, SRGB)
    assert mean_difference(converted, expected) < 3
    assert read_image_metadata(converted, SRGB).orientation == 1


@pytest.mark.parametrize("image_format", ["GIF", "TIFF", "AVIF"])
def test_the_first_image_of_a_file_is_packed(image_format: str) -> None:
    other = Image.new("RGB", (96, 64), "blue")
    content = encode(picture(), image_format, save_all=True, append_images=[other])
    assert mean_difference(reencode(content, None, 95, SRGB), picture()) < 9


def test_sixteen_bits_and_transparency_and_cmyk() -> None:
    ramp = np.linspace(0, 65535, 64 * 64).reshape(64, 64).astype(np.uint16)
    deep = encode(Image.fromarray(ramp), "TIFF")
    assert (
        mean_difference(reencode(deep, None, 95, SRGB), Image.fromarray((ramp >> 8).astype("u1")))
        < 2
    )
    clear = encode(Image.new("RGBA", (32, 32), (200, 0, 0, 0)), "TIFF")
    assert mean_difference(reencode(clear, None, 95, SRGB), Image.new("RGB", (32, 32), "white")) < 1
    cmyk = encode(picture().convert("CMYK"), "TIFF")
    assert mean_difference(reencode(cmyk, None, 95, SRGB), picture()) < 6
    with pytest.raises(DecodeError, match="image-mode"):
        reencode(encode(Image.new("F", (8, 8)), "TIFF"), None, 95, SRGB)


@pytest.mark.parametrize(
    ("dtype", "most", "tags"),
    [
        (np.uint16, 65535, {}),
        (np.uint16, 4095, {281: 4095}),
        (np.int32, 2**32 - 1, {}),
    ],
    ids=["16 bits", "12 bits in 16", "32 bits"],
)
def test_deep_tiff_files_keep_their_range(dtype: type, most: int, tags: dict[int, int]) -> None:
    ramp = np.linspace(0, most, 64 * 64).reshape(64, 64).astype(np.uint32)
    directory = TiffImagePlugin.ImageFileDirectory_v2()
    for tag, value in tags.items():
        directory[tag] = value
    content = encode(Image.fromarray(ramp.astype(dtype)), "TIFF", tiffinfo=directory)
    # Pillow writes 32 bits as signed numbers only: set the sample format to unsigned.
    signed, unsigned = (struct.pack("<HHIHH", 339, 3, 1, kind, 0) for kind in (2, 1))
    content = content.replace(signed, unsigned)
    expected = Image.fromarray((ramp / most * 255).astype(np.uint8))
    assert mean_difference(reencode(content, None, 95, SRGB), expected) < 2


def test_signed_pixels_of_32_bits_are_refused() -> None:
    content = encode(Image.fromarray(np.full((8, 8), -100, np.int32)), "TIFF")
    with pytest.raises(DecodeError, match="image-mode"):
        reencode(content, None, 95, SRGB)


@pytest.mark.parametrize("image_format", FORMATS)
def test_damaged_files_are_refused(image_format: str) -> None:
    content = encode(picture(), image_format)
    for size in (40, len(content) // 2):
        with pytest.raises(DecodeError, match="image-corrupt"):
            reencode(content[:size], None, 95, SRGB)


@pytest.mark.parametrize(
    ("content", "kind"),
    [
        (b"<svg xmlns=''/>", "SVG"),
        (b"\n <svg/>", "SVG"),
        (b"8BPS\0\1", "PSD"),
        (b"\0\0\0\x20ftypmp42", "MP4"),
        (b"%PDF-1.7", "PDF"),
        (b"text", None),
    ],
)
def test_other_files_are_named_by_kind(content: bytes, kind: str | None) -> None:
    assert file_kind(content) == kind
    assert not is_convertible(content)
