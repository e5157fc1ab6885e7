"""Converts stored pixels to sRGB: at the speed of table lookups where a profile allows it.

A profile of curves and a matrix becomes three tables, one for each channel, of its share in linear
sRGB as 16-bit integers; their sum is looked up in a table of sRGB's curve. A pixel is off by at
most a level (tests/entrypoints/images/test_color.py), in two thirds of the time of Little CMS,
which converts everything else and confirms each such table when it is made.
"""

from __future__ import annotations

import io
from functools import lru_cache
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from sm_train.entrypoints.images.color_spaces import (
    Matrix,
    linear_levels,
    srgb_levels,
    to_xyz,
)
from sm_train.entrypoints.images.icc_profile import profile_space, read_matrix_profile

Pixels = NDArray[np.uint8]


class Conversion(Protocol):
    """Converts pixels to sRGB."""

    def __call__(self, pixels: Pixels, out: Pixels | None = None) -> Pixels:
        """Return pixels (H, W, channels) in sRGB, (H, W, 3), in ``out`` if that is given."""
        ...


_SPACES = {"L": (b"GRAY", b"RGB "), "RGB": (b"RGB ",), "CMYK": (b"CMYK",)}
"""Pillow's modes, and the spaces of the profiles that apply to them. Browsers apply an RGB profile
to a gray picture (Chromium 156), which Adobe's programs write."""

_LEAST_STEPS, _MOST_STEPS = 2**13, 2**14
"""Steps of linear light in the table of sRGB's curve. Each is less than half a level, the table
stays in the cache, and the largest sum fits in 16 bits with all usual primaries."""

_BLOCK = 2**14
"""Pixels that are converted at once, so that intermediate results stay in the cache."""

_CUBE_STEPS = 9
"""Colors along each axis on which two conversions are compared."""

_LCMS_LEVELS = 2
"""By how much Little CMS may differ from a table: its own fixed-point numbers are off by up to 1.5
levels (2.16, ProPhoto RGB)."""


@lru_cache(maxsize=64)
def profile_conversion(profile: bytes, mode: str) -> Conversion | None:
    """Return the conversion of pixels of one of Pillow's modes L, RGB and CMYK.

    None if the profile is sRGB, is damaged, or is of another color space.
    """
    if profile_space(profile) not in _SPACES.get(mode, ()):
        return None
    cms_mode = "L" if profile_space(profile) == b"GRAY" else "RGB" if mode == "L" else mode
    try:
        cms = _CmsConversion(profile, cms_mode)
    except _CMS_ERRORS:
        return None
    if mode == "L":
        return _level_conversion(cms, channels=1 if cms_mode == "L" else 3)
    if mode == "CMYK":
        return cms
    cube = _cube()
    converted = cms(cube)
    if _largest_difference(converted, cube) <= 1:
        return None
    matrix = read_matrix_profile(profile)
    table = None if matrix is None else _matrix_conversion(matrix.curves, matrix.to_xyz)
    if table is None or _largest_difference(table(cube), converted) > _LCMS_LEVELS:
        return cms
    return table


@lru_cache(maxsize=16)
def space_conversion(name: str) -> Conversion | None:
    """Return the conversion of RGB of a known space's primaries with the curve of sRGB."""
    curve = linear_levels(np.arange(256) / 255)
    return _matrix_conversion(np.stack([curve] * 3), to_xyz(name))


class _CmsConversion:
    """Little CMS, by the profile's perceptual tables if it has any."""

    def __init__(self, profile: bytes, mode: str) -> None:
        """Prepare a conversion from one of Pillow's modes.

        Raises:
            PyCMSError, OSError, ValueError, TypeError: the profile is damaged.
        """
        from PIL import ImageCms

        srgb = ImageCms.createProfile("sRGB")
        self._mode = mode
        self._transform: Any = ImageCms.buildTransform(io.BytesIO(profile), srgb, mode, "RGB")

    def __call__(self, pixels: Pixels, out: Pixels | None = None) -> Pixels:
        height, width = pixels.shape[:2]
        data = np.ascontiguousarray(pixels).data
        image = Image.frombytes(self._mode, (width, height), data)
        converted = np.asarray(self._transform.apply(image))
        if out is None:
            return converted.copy()
        out[:] = converted
        return out


def _cms_errors() -> tuple[type[Exception], ...]:
    from PIL import ImageCms

    return ImageCms.PyCMSError, OSError, ValueError, TypeError


_CMS_ERRORS = _cms_errors()


def _level_conversion(cms: Conversion, channels: int) -> Conversion | None:
    """Return the conversion of gray levels, each of which is looked up."""
    levels = np.arange(256, dtype=np.uint8).reshape(1, 256, 1)
    gray = levels.repeat(channels, axis=2)
    table = cms(gray)[0]
    if _largest_difference(table, levels[0].repeat(3, axis=1)) <= 1:
        return None

    def convert(pixels: Pixels, out: Pixels | None = None) -> Pixels:
        converted: Pixels = table.take(pixels[..., 0], axis=0, mode="clip", out=out)
        return converted

    return convert


def _matrix_conversion(curves: NDArray[np.float64], to_profile_xyz: Matrix) -> Conversion | None:
    """Return the conversion by curves, float64 (3, 256), and a matrix; None if a sum overflows."""
    to_srgb = np.linalg.solve(to_xyz("sRGB"), to_profile_xyz)
    most = max(np.clip(sign * to_srgb, 0, None).sum(axis=1).max() for sign in (1, -1))
    if most == 0:
        return None
    steps = min(_MOST_STEPS, int(np.iinfo(np.int16).max / most))
    if steps < _LEAST_STEPS:
        return None
    # Four numbers of 16 bits for each level, so that one lookup of 64 bits takes all of them.
    shares = np.zeros((3, 256, 4), np.int16)
    for channel in range(3):
        share = curves[channel, :, None] * to_srgb[None, :, channel]
        shares[channel, :, :3] = np.rint(share * (steps - 1))
    packed = shares.view(np.int64)[..., 0]
    encoded = np.rint(255 * srgb_levels(np.arange(steps) / (steps - 1))).astype(np.uint8)

    def convert(pixels: Pixels, out: Pixels | None = None) -> Pixels:
        flat = pixels.reshape(-1, 3)
        out = np.empty_like(pixels) if out is None else out
        result = out.reshape(-1, 3)
        total, share = np.empty((2, min(_BLOCK, len(flat))), np.int64)
        for start in range(0, len(flat), _BLOCK):
            block = flat[start : start + _BLOCK]
            size = len(block)
            sums, added = (memory[:size].view(np.int16) for memory in (total, share))
            packed[0].take(block[:, 0], mode="clip", out=total[:size])
            for channel in (1, 2):
                packed[channel].take(block[:, channel], mode="clip", out=share[:size])
                np.add(sums, added, out=sums)
            # Colors outside of sRGB are clipped to it.
            encoded.take(
                sums.reshape(-1, 4)[:, :3], mode="clip", out=result[start : start + _BLOCK]
            )
        return out

    return convert


def _cube() -> Pixels:
    """Return colors on a grid in RGB, and all grays, uint8 (1, n, 3)."""
    levels = np.linspace(0, 255, _CUBE_STEPS).astype(np.uint8)
    grid = np.stack(np.meshgrid(levels, levels, levels), axis=-1).reshape(1, -1, 3)
    grays = np.arange(256, dtype=np.uint8)[None, :, None].repeat(3, axis=2)
    return np.concatenate([grid, grays], axis=1)


def _largest_difference(left: Pixels, right: Pixels) -> int:
    return int(np.abs(left.astype(np.int16) - right).max())
