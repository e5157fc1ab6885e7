"""Reads format, size and orientation of an image file without decoding it."""

from __future__ import annotations

import io

import simplejpeg
from PIL import Image, UnidentifiedImageError

_ORIENTATION_TAG = 0x0112
"""EXIF's tag of the orientation."""


class DecodeError(ValueError):
    """An image cannot be used; ``reason`` is a fixed code, the message adds the detail."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason


def image_size(content: bytes | memoryview) -> tuple[int, int]:
    """Return height and width in pixels after EXIF rotation, from the header alone.

    Raises:
        DecodeError: the content is not a JPEG, PNG or WebP.
    """
    if is_jpeg(content):
        height, width = jpeg_size(content)
        return (width, height) if jpeg_orientation(content) >= 5 else (height, width)
    with open_image(content) as image:
        is_transposed = exif_orientation(image.info.get("exif", b"")) >= 5
        return (image.width, image.height) if is_transposed else (image.height, image.width)


def is_jpeg(content: bytes | memoryview) -> bool:
    """Return whether the content starts like a JPEG."""
    return bytes(content[:3]) == b"\xff\xd8\xff"


def jpeg_size(content: bytes | memoryview) -> tuple[int, int]:
    """Return height and width of a JPEG as stored, before EXIF rotation.

    Raises:
        DecodeError: the header is damaged.
    """
    try:
        height, width, _, _ = simplejpeg.decode_jpeg_header(content, strict=False)
    except ValueError as error:
        raise corrupt_image_error(error) from None
    except KeyError:  # simplejpeg looks up a color space that a truncated header does not have
        raise DecodeError("image-corrupt", "the header is cut short") from None
    return height, width


def jpeg_orientation(content: bytes | memoryview) -> int:
    """Return the EXIF orientation of a JPEG, 1 to 8; 1 if it has none."""
    offset = 2  # after the start-of-image marker
    # A segment is 0xFF, its marker, and two bytes of length, big-endian, which count themselves.
    # Markers from 0xE0 on are application segments, which come first; EXIF is in 0xE1 (APP1).
    while len(content) >= offset + 10 and content[offset] == 0xFF and content[offset + 1] >= 0xE0:
        end = offset + 2 + content[offset + 2] * 256 + content[offset + 3]
        if content[offset + 1] == 0xE1 and content[offset + 4 : offset + 10] == b"Exif\0\0":
            return exif_orientation(bytes(content[offset + 4 : end]))
        offset = end
    return 1


def exif_orientation(block: bytes) -> int:
    """Return the orientation in an EXIF block, 1 to 8; 1 if there is none that can be read."""
    exif = Image.Exif()
    try:
        exif.load(block)
        value = exif.get(_ORIENTATION_TAG)
    except Exception:  # the block is damaged; the image may still be intact
        return 1
    return value if isinstance(value, int) and 1 <= value <= 8 else 1


def open_image(content: bytes | memoryview) -> Image.Image:
    """Open an image with Pillow, without decoding it.

    Raises:
        DecodeError: the content is not a JPEG, PNG or WebP, or has too many pixels.
    """
    try:
        return Image.open(io.BytesIO(content), formats=("JPEG", "PNG", "WEBP"))
    except UnidentifiedImageError:
        raise DecodeError("image-corrupt", "not a JPEG, PNG or WebP") from None
    except Image.DecompressionBombError as error:
        raise DecodeError("image-bomb", str(error)) from None
    except MemoryError:
        raise
    except Exception as error:  # Pillow's decoders raise almost anything on damaged files
        raise corrupt_image_error(error) from None


def corrupt_image_error(error: Exception) -> DecodeError:
    """Wrap an error of a decoder, reduced to its first line."""
    detail = next(iter(str(error).splitlines()), "") or type(error).__name__
    return DecodeError("image-corrupt", detail)
