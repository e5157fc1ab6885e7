"""Converts Pillow's images of any mode to RGB, on request from their ICC profile to sRGB."""

from __future__ import annotations

import io
from functools import lru_cache
from typing import Any

import numpy as np
from PIL import Image
from sm_train.entrypoints.images.image_header import DecodeError

_CUBE_STEPS = 9
"""Colors along each axis that are compared to find out whether a profile is sRGB itself."""


def to_rgb(image: Image.Image, *, to_srgb: bool = False) -> Image.Image:
    """Return an image as RGB, on a white background if it is transparent.

    16-bit channels keep their upper 8 bits. With ``to_srgb``, an ICC profile is applied; one that
    is damaged or belongs to another color space is ignored.

    Raises:
        DecodeError: the pixels have no agreed range.
    """
    profile = image.info.get("icc_profile") if to_srgb else None
    if image.mode.startswith("I"):
        # Pillow's own conversion would clip everything above 255.
        image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
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
