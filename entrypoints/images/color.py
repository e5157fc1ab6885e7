"""Converts Pillow's images of any mode to RGB, on request from their ICC profile to sRGB."""

from __future__ import annotations

import io
from functools import lru_cache
from typing import Any

import numpy as np
from PIL import Image
from sm_train.entrypoints.images.image_header import DecodeError

_BITS_PER_SAMPLE, _PHOTOMETRIC, _MAX_SAMPLE_VALUE, _SAMPLE_FORMAT = 258, 262, 281, 339
_WHITE_IS_ZERO, _UNSIGNED = 0, 1
"""Tags of TIFF 6.0, the interpretation of levels of which 0 is white, and the sample format of
unsigned integers, which is the default."""

_CUBE_STEPS = 9
"""Colors along each axis that are compared to find out whether a profile is sRGB itself."""


def to_rgb(image: Image.Image, *, to_srgb: bool = False) -> Image.Image:
    """Return an image as RGB, on a white background if it is transparent.

    Deeper channels keep their upper 8 bits. With ``to_srgb``, an ICC profile is applied; one that
    is damaged or belongs to another color space is ignored.

    Raises:
        DecodeError: the pixels have no agreed range.
    """
    profile = image.info.get("icc_profile") if to_srgb else None
    if image.mode.startswith("I"):
        image = _to_eight_bits(image)
    if image.mode == "F":
        raise DecodeError("image-mode", "floating-point pixels have no agreed range")
    if image.has_transparency_data:
        foreground = image.convert("RGBA")
        if profile:
            colors = convert_to_srgb(foreground.convert("RGB"), profile)
            colors.putalpha(foreground.getchannel("A"))
            foreground = colors
        white = Image.new("RGBA", foreground.size, "white")
        return Image.alpha_composite(white, foreground).convert("RGB")
    if profile and image.mode not in ("L", "CMYK", "LAB"):
        image = image.convert("RGB")
    return convert_to_srgb(image, profile).convert("RGB") if profile else image.convert("RGB")


def _to_eight_bits(image: Image.Image) -> Image.Image:
    """Return a gray image of integers as one of 8 bits; what is transparent becomes white.

    Pillow's own conversion would clip everything above 255.

    Raises:
        DecodeError: the pixels have no agreed range.
    """
    levels, tags = np.asarray(image), getattr(image, "tag_v2", {})
    if image.format == "TIFF" and image.mode == "I":
        if tags.get(_SAMPLE_FORMAT, (1,))[0] != _UNSIGNED:
            raise DecodeError("image-mode", "signed pixels of 32 bits have no agreed range")
        # Pillow reads unsigned numbers as signed ones.
        shallow = levels.view(np.uint32) >> 24
    else:
        [depth, *_] = tags.get(_BITS_PER_SAMPLE, (16,))
        # Cameras and microscopes store 10 to 14 bits in 16, and say so here.
        most = tags.get(_MAX_SAMPLE_VALUE, (2**depth - 1,))[0]
        shallow = np.clip(levels, 0, 65535) >> max(0, min(most, 65535).bit_length() - 8)
    if tags.get(_PHOTOMETRIC) == _WHITE_IS_ZERO:  # Pillow 13 obeys it up to 8 bits only
        shallow = 255 - np.clip(shallow, 0, 255)
    transparent: Any = image.info.get("transparency")
    if isinstance(transparent, int):
        shallow = np.where(levels == transparent, 255, shallow)
    return Image.fromarray(np.clip(shallow, 0, 255).astype(np.uint8))


def convert_to_srgb(image: Image.Image, profile: bytes) -> Image.Image:
    """Return ``image`` in sRGB; unchanged if ``profile`` is sRGB or does not fit its mode."""
    transform = _transform(profile, image.mode)
    return image if transform is None else transform.apply(image)


@lru_cache(maxsize=64)
def _transform(profile: bytes, mode: str) -> Any:
    """Return a transform from a profile to sRGB, or None if there is nothing to change."""
    from PIL import ImageCms

    try:
        transform: Any = ImageCms.buildTransform(
            io.BytesIO(profile), ImageCms.createProfile("sRGB"), mode, "RGB"
        )
    except (ImageCms.PyCMSError, OSError, ValueError, TypeError):
        return None
    if mode == "RGB" and _is_identity(transform):
        return None
    return transform


def _is_identity(transform: Any) -> bool:
    levels = np.linspace(0, 255, _CUBE_STEPS).astype(np.uint8)
    cube = np.stack(np.meshgrid(levels, levels, levels), axis=-1).reshape(1, -1, 3)
    changed = np.asarray(transform.apply(Image.fromarray(cube)), np.int16)
    return int(np.abs(changed - cube).max()) <= 1
