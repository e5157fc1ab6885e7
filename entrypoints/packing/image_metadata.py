"""What packing knows of an image: whether it is whole, its kind, sides, digest and hash."""

from __future__ import annotations

import hashlib
import io
import warnings
from dataclasses import dataclass

import numpy as np
import simplejpeg
from numpy.typing import NDArray
from PIL import Image, ImageFile, ImageOps
from sm_train.entrypoints.data.image_header import (
    DecodeError,
    corrupt_image_error,
    exif_orientation,
    is_jpeg,
    jpeg_orientation,
    jpeg_size,
    open_image,
)
from sm_train.entrypoints.packing.perceptual_hash import SIDE, perceptual_hash, shrink
from sm_train.entrypoints.packing.storage import BytesLike

Grey = NDArray[np.uint8]

MAX_PIXELS = 2**27
"""134 megapixels: training rejects larger images, so packing does."""

_KINDS = {"JPEG": "jpeg", "MPO": "jpeg", "PNG": "png", "WEBP": "webp"}
"""Pillow's name → ours. An MPO (telephones write it) is a JPEG with more images behind it."""

_PNG_END = b"IEND\xaeB`\x82"
_HASHED_SIDE = 64  # of the reduced JPEG that is hashed, at least; twice what the hash needs


@dataclass(frozen=True)
class ImageMetadata:
    """``width`` and ``height`` are pixels as shown, after the EXIF ``orientation`` (1 to 8).

    ``phash`` is None where pixels were not looked at.
    """

    kind: str
    width: int
    height: int
    orientation: int
    sha256: str
    phash: int | None


def read_image_metadata(content: BytesLike, *, pixels: bool = True) -> ImageMetadata:
    """Describe an image; with ``pixels`` decode all of it, which finds every damage.

    Raises:
        DecodeError: it is empty, damaged, of no kind that is known here, or too large.
    """
    if not content:
        raise DecodeError("image-empty", "zero bytes")
    kind, width, height, orientation = _header(content)
    if width * height > MAX_PIXELS:
        raise DecodeError("image-bomb", f"{width} × {height} pixels; {MAX_PIXELS:,} at most")
    phash = _hash(content, kind, height, width) if pixels else None
    if orientation >= 5:
        width, height = height, width
    digest = hashlib.sha256(content).hexdigest()
    return ImageMetadata(kind, width, height, orientation, digest, phash)


def _header(content: BytesLike) -> tuple[str, int, int, int]:
    """Kind, width and height as stored, and orientation."""
    if is_jpeg(content):
        height, width = jpeg_size(content)
        return "jpeg", width, height, jpeg_orientation(content)
    with open_image(content) as image:
        orientation = exif_orientation(image.info.get("exif", b""))
        return _KINDS[image.format or ""], image.width, image.height, orientation


def _hash(content: BytesLike, kind: str, height: int, width: int) -> int:
    """The perceptual hash; every bit of the image is decoded for it."""
    if kind == "jpeg":
        # At an eighth of its size or so: the decoder reads all, and computes less.
        factor = 8
        while factor > 1 and min(height, width) < factor * _HASHED_SIDE:
            factor //= 2
        try:
            grey = simplejpeg.decode_jpeg(
                content,
                "GRAY",
                min_height=-(-height // factor),
                min_width=-(-width // factor),
                min_factor=factor,
            )
        except (ValueError, KeyError):
            pass  # damaged, or merely odd: Pillow tells the two apart
        else:
            return perceptual_hash(shrink(grey[..., 0], height / factor, width / factor))
    small = _shrink_any(content)
    if kind == "png" and _PNG_END not in bytes(content):
        # Pillow is content once it has every pixel; stricter decoders are not.
        raise DecodeError("image-corrupt", "the end of the PNG is missing")
    return perceptual_hash(small)


def _shrink_any(content: BytesLike) -> Grey:
    ImageFile.LOAD_TRUNCATED_IMAGES = False  # whatever other code set
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Pillow's remarks on odd but whole files
        with open_image(content) as image:
            try:
                grey = image.convert("L")
                return np.asarray(grey.resize((SIDE, SIDE), Image.Resampling.LANCZOS))
            except MemoryError:
                raise
            except Exception as error:  # Pillow's decoders raise almost anything
                raise corrupt_image_error(error) from None


def reencode(content: BytesLike, max_side: int | None, quality: int) -> bytes:
    """The image as a JPEG, upright, its longer side ``max_side`` pixels at most.

    Transparency is laid on white. The ICC profile stays; other metadata goes.

    Raises:
        DecodeError: the image is damaged.
    """
    with open_image(content) as image:
        try:
            profile = image.info.get("icc_profile")
            upright = ImageOps.exif_transpose(image)
            if upright.has_transparency_data:
                layered = upright.convert("RGBA")
                white = Image.new("RGBA", layered.size, "white")
                upright = Image.alpha_composite(white, layered)
            picture = upright.convert("RGB")
        except MemoryError:
            raise
        except Exception as error:
            raise corrupt_image_error(error) from None
    if max_side is not None and max(picture.size) > max_side:
        picture.thumbnail((max_side, max_side), Image.Resampling.LANCZOS)
    out = io.BytesIO()
    picture.save(out, "JPEG", quality=quality, subsampling=0, icc_profile=profile)
    return out.getvalue()
