"""The color policy: how the stored colors of any image become the RGB that training sees.

Both readers, `sm-train enrich` and `sm-train pack` follow it, whatever decodes the image. With
``icc_profile: srgb`` the colors that a profile or the codes of HEIC and AVIF state are converted to
sRGB; transparent images are laid on white afterwards. With ``ignore`` levels stay as stored.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from PIL import Image
from sm_train.entrypoints.images.conversions import (
    Conversion,
    Pixels,
    profile_conversion,
    space_conversion,
)
from sm_train.entrypoints.images.image_header import DecodeError
from sm_train.entrypoints.images.stored_color import StoredColor, check_hdr
from sm_train.entrypoints.job_interface.job_config import ColorPolicy

_BITS_PER_SAMPLE, _COMPRESSION, _PHOTOMETRIC, _MAX_SAMPLE_VALUE = 258, 259, 262, 281
_PLANES, _SAMPLE_FORMAT = 284, 339
_WHITE_IS_ZERO, _UNCOMPRESSED, _SEPARATE, _SIGNED = 0, 1, 2, 2
"""Tags of TIFF 6.0, and values of them: levels of which 0 is white, no compression, a plane for
each channel, and signed integers."""

_CHANNELS = {"L": 1, "RGB": 3, "CMYK": 4}


def find_conversion(color: StoredColor, mode: str, policy: ColorPolicy) -> Conversion | None:
    """Return what makes sRGB of pixels of one of Pillow's modes L, RGB and CMYK; None for nothing.

    Raises:
        DecodeError: the policy rejects the image.
    """
    if policy.hdr == "reject":
        check_hdr(color)
    if policy.icc_profile == "ignore" or color.hdr is not None:
        return None
    if color.profile is not None:
        return profile_conversion(color.profile, mode)
    return space_conversion(color.space) if color.space is not None and mode == "RGB" else None


def to_rgb(image: Image.Image, color: StoredColor, policy: ColorPolicy) -> Image.Image:
    """Return an image as RGB, on a white background if it is transparent.

    Deeper channels keep their upper 8 bits.

    Raises:
        DecodeError: the pixels have no agreed range, or the policy rejects the image.
    """
    pixels, conversion = stored_pixels(image, color, policy)
    return Image.fromarray(pixels if conversion is None else conversion(pixels))


def stored_pixels(
    image: Image.Image, color: StoredColor, policy: ColorPolicy
) -> tuple[Pixels, Conversion | None]:
    """Return an image's pixels (H, W, channels), and what makes RGB of them; None if they are RGB.

    Scaling and cropping may come between, so that what is cut off is not converted.

    Raises:
        DecodeError: as in :func:`to_rgb`.
    """
    _require_known_levels(image, color)
    mode = _converted_mode(image.mode)
    if mode == "RGB" and color.channels == "gray":  # Pillow reads deep gray with alpha as RGBA
        mode = "L"
    conversion = find_conversion(color, mode, policy)
    if image.mode.startswith("I"):
        image = _to_eight_bits(image)
    if image.has_transparency_data:
        return np.asarray(_on_white(image, mode, conversion)), None
    if conversion is None:
        return np.asarray(image.convert("RGB")), None
    pixels = np.asarray(image.convert(mode))
    return pixels.reshape(image.height, image.width, _CHANNELS[mode]), conversion


def _require_known_levels(image: Image.Image, color: StoredColor) -> None:
    """Refuse what has no agreed range, and what Pillow 13 reads without an error as other levels.

    Raises:
        DecodeError: the image is of such a kind.
    """
    if image.mode == "F":
        raise DecodeError("image-mode", "floating-point pixels have no agreed range")
    if image.format == "JPEG2000" and color.depth > 8 and not image.mode.startswith("I"):
        detail = f"the brightest of its colors of {color.depth} bits would become black"
        raise DecodeError("image-mode", f"{detail} in Pillow; convert it to 8 bits")
    if image.format != "TIFF":
        return
    tags: Any = getattr(image, "tag_v2", {})
    if {*tags.get(_SAMPLE_FORMAT, ())} & {_SIGNED}:
        raise DecodeError("image-mode", "signed pixels have no agreed range")
    is_raw = tags.get(_COMPRESSION, _UNCOMPRESSED) == _UNCOMPRESSED
    depths = tags.get(_BITS_PER_SAMPLE, ())
    if is_raw and tags.get(_PLANES) == _SEPARATE and max(depths, default=8) > 8 and len(depths) > 1:
        detail = "deep channels in separate planes are read as others by Pillow"
        raise DecodeError("image-mode", f"{detail}; write it with compression, or in one plane")


def _converted_mode(mode: str) -> str:
    """Return the mode in which the colors of an image of one of Pillow's modes are converted."""
    if mode in ("CMYK", "LAB"):  # Pillow makes sRGB of Lab, which needs no profile
        return mode
    return "L" if mode in ("1", "L", "LA", "La") or mode.startswith("I") else "RGB"


def _on_white(image: Image.Image, mode: str, conversion: Conversion | None) -> Image.Image:
    foreground = image.convert("RGBA")
    if conversion is not None:
        colors = np.asarray(foreground)[..., : _CHANNELS[mode]]
        converted = Image.fromarray(conversion(np.ascontiguousarray(colors)))
        converted.putalpha(foreground.getchannel("A"))
        foreground = converted
    white = Image.new("RGBA", foreground.size, "white")
    return Image.alpha_composite(white, foreground).convert("RGB")


def _to_eight_bits(image: Image.Image) -> Image.Image:
    """Return a gray image of integers as one of 8 bits; what is transparent becomes white.

    Pillow's own conversion would clip everything above 255.

    Raises:
        DecodeError: the pixels have no agreed range.
    """
    levels, tags = np.asarray(image), getattr(image, "tag_v2", {})
    if image.format == "TIFF" and image.mode == "I":
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
