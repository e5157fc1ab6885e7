"""Decodes images of many formats upright, and encodes them as JPEG while packing."""

from __future__ import annotations

import io
import struct
from functools import cache

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageFile, UnidentifiedImageError
from sm_train.entrypoints.base.pip_install import install_command
from sm_train.entrypoints.data_prep.packing.image_metadata import MAX_PIXELS
from sm_train.entrypoints.images.color import to_rgb
from sm_train.entrypoints.images.decoder_pool import Decoders
from sm_train.entrypoints.images.icc_profile import profile_space
from sm_train.entrypoints.images.image_header import (
    DecodeError,
    corrupt_image_error,
    file_kind,
    jpeg_2000_profile,
    primary_color_codes,
    read_header,
)
from sm_train.entrypoints.images.stored_color import StoredColor, read_stored_color
from sm_train.entrypoints.job_interface.job_config import ColorPolicy
from sm_train.entrypoints.storage.stream_upload import BytesLike

DEFAULT_QUALITY = 95
"""JPEG's highest useful quality: above it files grow without a visible difference."""

_MAX_JPEG_SIDE = 65_500
"""libjpeg's JPEG_MAX_DIMENSION."""

_CONVERTED = {
    "AVIF": "AVIF",
    "BMP": "BMP",
    "GIF": "GIF",
    "HEIC": "HEIF",
    "JPEG 2000": "JPEG2000",
    "TIFF": "TIFF",
}
"""The formats that are converted, and their names in Pillow."""

_TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
"""What displays an image of each EXIF orientation upright."""


def is_convertible(content: BytesLike) -> bool:
    """Return whether the content starts like a format that :func:`reencode` converts."""
    return file_kind(content) in _CONVERTED


def measure(content: BytesLike) -> tuple[int, int]:
    """Return height and width of an image of any format, perhaps before it is turned upright.

    Raises:
        DecodeError: the image is corrupt, or of a format that cannot be read here.
    """
    with _open(content) as image:
        return image.height, image.width


def reencode(content: BytesLike, max_side: int | None, quality: int, policy: ColorPolicy) -> bytes:
    """Return the image as an upright JPEG whose longer side has at most ``max_side`` pixels.

    Of several images in a file it is the first, or the primary one, without its gain map.
    Transparent images get a white background. Colors are converted by ``policy``; an RGB profile
    whose colors stay as stored is kept. Other metadata is not kept.

    Raises:
        DecodeError: the image is corrupt, too large, rejected by the policy, or of a format that
            cannot be read here.
    """
    result, profile = _decode_upright(content, None, policy)
    if max_side is not None and max(result.size) > max_side:
        result.thumbnail((max_side, max_side), Image.Resampling.LANCZOS)
    if max(result.size) > _MAX_JPEG_SIDE:
        size = f"{result.width} × {result.height} pixels"
        raise DecodeError("image-large", f"{size}; a side of a JPEG has at most {_MAX_JPEG_SIDE:,}")
    encoded = io.BytesIO()
    try:
        result.save(encoded, "JPEG", quality=quality, subsampling=0, icc_profile=profile)
    except (OSError, ValueError) as error:  # such as a profile of more than 16 MB
        raise corrupt_image_error(error) from None
    return encoded.getvalue()


def decode_upright(
    content: BytesLike, max_side: int, decoders: Decoders, policy: ColorPolicy
) -> NDArray[np.uint8]:
    """Return an upright image as RGB, uint8 (height, width, 3), decoded by one of ``decoders``.

    Its longer side has at most ``max_side`` pixels. A much larger JPEG is decoded at a reduced
    size.

    Raises:
        DecodeError: as in :func:`reencode`.
    """
    if is_convertible(content):
        return decoders.call(_convertible_pixels, content, max_side, policy)
    # With a known size the pixels are written to shared memory, and not pickled.
    height, width = _scaled(read_header(content).displayed_size, max_side)
    if height * width > MAX_PIXELS:
        raise DecodeError("image-bomb", f"{width} × {height} pixels; {MAX_PIXELS:,} at most")
    pixels = np.empty((height, width, 3), np.uint8)
    decoders.fill(_fill, content, pixels, height, width, policy)
    return pixels


def _fill(
    content: BytesLike, out: NDArray[np.uint8], height: int, width: int, policy: ColorPolicy
) -> None:
    image, _ = _decode_upright(content, max(height, width), policy)
    out.reshape(-1)[:] = _resized(image, height, width).reshape(-1)


def _convertible_pixels(
    content: BytesLike, max_side: int, policy: ColorPolicy
) -> NDArray[np.uint8]:
    image, _ = _decode_upright(content, max_side, policy)
    return _resized(image, *_scaled((image.height, image.width), max_side))


def _resized(image: Image.Image, height: int, width: int) -> NDArray[np.uint8]:
    if (height, width) != (image.height, image.width):
        image = image.resize((width, height), Image.Resampling.LANCZOS)
    return np.asarray(image)


def _scaled(size: tuple[int, int], max_side: int) -> tuple[int, int]:
    """Return height and width of an image that is scaled down to ``max_side``."""
    scale = max_side / max(size)
    if scale >= 1:
        return size
    return max(1, round(size[0] * scale)), max(1, round(size[1] * scale))


def _decode_upright(
    content: BytesLike, max_side: int | None, policy: ColorPolicy
) -> tuple[Image.Image, bytes | None]:
    """Return an upright RGB image, and the profile of colors that are as stored.

    A JPEG of more than twice ``max_side`` pixels is decoded at a reduced size.
    """
    ImageFile.LOAD_TRUNCATED_IMAGES = False  # a process-wide flag that other code may have set
    with _open(content) as image:
        if image.width * image.height > MAX_PIXELS:
            size = f"{image.width} × {image.height} pixels"
            raise DecodeError("image-bomb", f"{size}; {MAX_PIXELS:,} at most")
        try:
            if max_side is not None:
                image.draft(None, (2 * max_side, 2 * max_side))
            image.load()
            orientation = _orientation(content, image)
            color = _stored_color(content, image)
            result = to_rgb(image, color, policy)
        except (MemoryError, DecodeError):
            raise
        except Exception as error:  # Pillow's decoders raise almost anything
            raise corrupt_image_error(error) from None
    if orientation in _TURNS:
        result = result.transpose(_TURNS[orientation])
    is_rgb = color.profile is not None and profile_space(color.profile) == b"RGB "
    is_stored = policy.icc_profile == "ignore" or color.hdr is not None
    return result, color.profile if is_stored and is_rgb else None


def _stored_color(content: BytesLike, image: Image.Image) -> StoredColor:
    if image.format not in _CONVERTED.values():
        return read_stored_color(content)
    profile = image.info.get("icc_profile") or None
    if image.format == "JPEG2000":
        profile = profile or jpeg_2000_profile(content)
    codes = primary_color_codes(content) if image.format in ("AVIF", "HEIF") else None
    return StoredColor("RGB", _depth(content, image), profile, *(codes or ()))


def _depth(content: BytesLike, image: Image.Image) -> int:
    """Return the bits per channel of a JPEG 2000 file, 8 for other formats.

    They are in the first segment of its codestream, which follows the mark of its start (ITU-T
    T.800, A.5.1, "Image and tile size").
    """
    if image.format != "JPEG2000":
        return 8
    stream = bytes(content)
    start = stream.find(b"\xff\x4f\xff\x51")
    [channels] = struct.unpack_from(">H", stream, start + 40)
    depths = stream[start + 42 : start + 42 + 3 * channels : 3]
    return max((depth & 0x7F) + 1 for depth in depths)


def _open(content: BytesLike) -> Image.Image:
    kind = file_kind(content)
    formats = ["JPEG", "PNG", "WEBP"]
    if kind in _CONVERTED:
        formats = [_CONVERTED[kind]]
        if kind == "HEIC":
            _register_heif()
    try:
        return Image.open(io.BytesIO(content), formats=formats)
    except Image.DecompressionBombError as error:
        raise DecodeError("image-bomb", str(error)) from None
    except UnidentifiedImageError:
        detail = f"Pillow cannot read this {kind}" if kind else "not an image"
        raise DecodeError("image-corrupt", detail) from None
    except KeyError:  # this Pillow was built without the format
        raise DecodeError("image-kind", f"{kind}; this Pillow cannot read it") from None
    except MemoryError:
        raise
    except Exception as error:
        raise corrupt_image_error(error) from None


@cache
def _register_heif() -> None:
    try:
        from pillow_heif import register_heif_opener
    except ImportError:
        raise DecodeError(
            "image-kind", f"HEIC; pillow-heif is not installed: {install_command('heic')}"
        ) from None
    # Thumbnails and depth maps are other images of the file.
    register_heif_opener(thumbnails=False, depth_images=False, decode_threads=1)


def _orientation(content: BytesLike, image: Image.Image) -> int:
    """Return the EXIF orientation that is left to apply, 1 to 8."""
    if image.format not in _CONVERTED.values():
        return read_header(content).orientation
    try:
        value = image.getexif().get(0x0112)
    except Exception:  # the block is damaged; the image may still be intact
        return 1
    return value if value in _TURNS else 1
