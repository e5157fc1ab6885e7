"""Reads an image's metadata for packing: format, dimensions, digest, hash; detects corruption."""

from __future__ import annotations

import hashlib
import warnings
from dataclasses import dataclass

import numpy as np
import simplejpeg
from numpy.typing import NDArray
from PIL import Image, ImageFile
from sm_train.entrypoints.data_prep.deduplication.colors import signature
from sm_train.entrypoints.data_prep.packing.perceptual_hash import SIDE, perceptual_hash, shrink
from sm_train.entrypoints.images.color import find_conversion, to_rgb
from sm_train.entrypoints.images.image_header import (
    DecodeError,
    ImageHeader,
    corrupt_image_error,
    open_image,
    read_header,
)
from sm_train.entrypoints.images.stored_color import (
    StoredColor,
    check_hdr,
    read_stored_color,
)
from sm_train.entrypoints.job_interface.job_config import ColorPolicy
from sm_train.entrypoints.storage.stream_upload import BytesLike

Grey = NDArray[np.uint8]

MAX_PIXELS = 2**27
"""134 megapixels: the data loader rejects larger images, so packing does, too."""

_PNG_END = b"IEND\xaeB`\x82"
_MIN_REDUCED_SIDE = 64
"""Shorter side in pixels to which a JPEG is reduced for its hash; twice what the hash needs."""


@dataclass(frozen=True)
class ImageMetadata:
    """An image's ``format`` is "jpeg", "png" or "webp".

    ``width`` and ``height`` are pixels as displayed, with the EXIF ``orientation`` (1 to 8)
    applied. ``color`` is what it states about its colors. ``phash`` is None if the image was not
    decoded, and ``colors``, the signature of its colors, unless it was asked for; both are of the
    colors that the policy gives it.
    """

    format: str
    width: int
    height: int
    orientation: int
    sha256: str
    color: StoredColor
    phash: int | None
    colors: bytes | None = None


def read_image_metadata(
    content: BytesLike, policy: ColorPolicy, *, pixels: bool = True, colors: bool = False
) -> ImageMetadata:
    """Return an image's metadata. With ``pixels``, decode all of it, which detects any corruption.

    ``colors`` decodes it once more, to tell near-duplicates from images of other colors.

    Raises:
        DecodeError: it is empty, corrupt, too large, rejected by the policy, or not a JPEG, PNG or
            WebP.
    """
    if not content:
        raise DecodeError("image-empty", "zero bytes")
    header = read_header(content)
    if header.width * header.height > MAX_PIXELS:
        pixels_found = f"{header.width} × {header.height} pixels"
        raise DecodeError("image-bomb", f"{pixels_found}; {MAX_PIXELS:,} at most")
    color = read_stored_color(content, header)
    if policy.hdr == "reject":
        check_hdr(color)
    phash = _hash(content, header, color, policy) if pixels else None
    height, width = header.displayed_size
    digest = hashlib.sha256(content).hexdigest()
    found = _colors(content, header, color, policy) if colors and pixels else None
    return ImageMetadata(
        header.format, width, height, header.orientation, digest, color, phash, found
    )


def _colors(
    content: BytesLike, header: ImageHeader, color: StoredColor, policy: ColorPolicy
) -> bytes:
    """Return the signature of an image that can be decoded."""
    if (reduced := _decode_reduced(content, header, color, policy, "RGB")) is not None:
        return signature(*reduced)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with open_image(content) as image:
            pixels = np.asarray(to_rgb(image, color, policy))
    return signature(pixels, *pixels.shape[:2])


def _hash(content: BytesLike, header: ImageHeader, color: StoredColor, policy: ColorPolicy) -> int:
    """Return the perceptual hash, which decodes every bit of the image."""
    if (reduced := _decode_reduced(content, header, color, policy, "GRAY")) is not None:
        grey, height, width = reduced
        return perceptual_hash(shrink(grey[..., 0], height, width))
    small = _shrink_any(content, color, policy)
    if header.format == "png" and _PNG_END not in bytes(content):
        # Pillow stops reading after the last pixel; stricter decoders do not.
        raise DecodeError("image-corrupt", "the end of the PNG is missing")
    return perceptual_hash(small)


def _decode_reduced(
    content: BytesLike,
    header: ImageHeader,
    color: StoredColor,
    policy: ColorPolicy,
    colorspace: str,
) -> tuple[NDArray[np.uint8], float, float] | None:
    """Return a JPEG at up to an eighth of its size, with the height and width of the image in it.

    The decoder still reads everything, but its inverse DCT computes fewer pixels. None for other
    formats, and for a JPEG that is corrupt or merely unusual: Pillow decides.
    """
    if not header.is_scalable:
        return None
    mode = {1: "L", 3: "RGB"}.get(header.components, "CMYK")
    conversion = find_conversion(color, mode, policy)
    if mode == "CMYK" and conversion is not None:
        return None
    height, width = header.height, header.width
    factor = 8
    while factor > 1 and min(height, width) < factor * _MIN_REDUCED_SIDE:
        factor //= 2
    stored = colorspace if conversion is None else {"L": "GRAY"}.get(mode, "RGB")
    try:
        pixels = simplejpeg.decode_jpeg(
            content,
            stored,
            min_height=-(-height // factor),
            min_width=-(-width // factor),
            min_factor=factor,
        )
    except (ValueError, KeyError):
        return None
    if conversion is not None:
        pixels = conversion(pixels)
        if colorspace == "GRAY":
            pixels = np.asarray(Image.fromarray(pixels).convert("L"))[..., None]
    return pixels, height / factor, width / factor


def _shrink_any(content: BytesLike, color: StoredColor, policy: ColorPolicy) -> Grey:
    """Decode an image with Pillow and scale it to (32, 32) grey values."""
    ImageFile.LOAD_TRUNCATED_IMAGES = False  # a process-wide flag that other code may have set
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about unusual but intact files
        with open_image(content) as image:
            try:
                grey = to_rgb(image, color, policy).convert("L")
                return np.asarray(grey.resize((SIDE, SIDE), Image.Resampling.LANCZOS))
            except (MemoryError, DecodeError):
                raise
            except Exception as error:  # Pillow's decoders raise almost anything
                raise corrupt_image_error(error) from None
