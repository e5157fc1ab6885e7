"""Converts stored pixels to sRGB.

OpenColorIO converts RGB: by the curves and the matrix of a profile, or by a table of colors that
Little CMS makes of any other profile. Curves and a matrix are exact to rounding; by a table, fewer
colors are off than by Little CMS itself, whose own table has 33 steps
(tests/entrypoints/images/test_color.py), in a third of its time. Gray is looked up, and CMYK, for
which OpenColorIO has no table, is left to Little CMS.
"""

from __future__ import annotations

import io
from functools import lru_cache
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from PyOpenColorIO import (
    BIT_DEPTH_UINT8,
    CHANNEL_ORDERING_RGB,
    INTERP_TETRAHEDRAL,
    OPTIMIZATION_DEFAULT,
    Config,
    GroupTransform,
    Lut1DTransform,
    Lut3DTransform,
    MatrixTransform,
    PackedImageDesc,
)
from sm_train.entrypoints.images.color_spaces import (
    Matrix,
    linear_levels,
    srgb_levels,
    to_xyz,
)
from sm_train.entrypoints.images.icc_profile import has_tables, profile_space, read_matrix_profile

Pixels = NDArray[np.uint8]


class Conversion(Protocol):
    """Converts pixels to sRGB."""

    def __call__(self, pixels: Pixels, out: Pixels | None = None) -> Pixels:
        """Return pixels (H, W, channels) in sRGB, (H, W, 3), in ``out`` if that is given."""
        ...


_SPACES = {"L": (b"GRAY", b"RGB "), "RGB": (b"RGB ",), "CMYK": (b"CMYK",)}
"""Pillow's modes, and the spaces of the profiles that apply to them. Browsers apply an RGB profile
to a gray picture (Chromium 156), which Adobe's programs write."""

_CURVE_STEPS = 2**14
"""Steps of linear light in the table of sRGB's curve."""

_TABLE_STEPS = 65
"""Colors along each axis of a table: 4 MB, which 86 would double for half as many colors off."""

_SLOPE_OF_ALL = 1.0
"""Output levels for each level that are added to the slope of the grays, so that no part of an axis
is without steps."""

_CUBE_STEPS = 9
"""Colors along each axis on which two conversions are compared."""


@lru_cache(maxsize=64)
def profile_conversion(profile: bytes, mode: str) -> Conversion | None:
    """Return the conversion of pixels of one of Pillow's modes L, RGB and CMYK.

    None if the profile is sRGB, is damaged, or is of another color space. Making a table takes
    0.1 s.
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
    if matrix is not None:
        conversion = _matrix_conversion(matrix.curves, matrix.to_xyz)
        if _largest_difference(conversion(cube), converted) <= 1:
            return conversion
    return _table_conversion(cms)


@lru_cache(maxsize=16)
def space_conversion(name: str) -> Conversion | None:
    """Return the conversion of RGB of a known space's primaries with the curve of sRGB."""
    curve = linear_levels(np.arange(256) / 255)
    return _matrix_conversion(np.stack([curve] * 3), to_xyz(name))


class _CmsConversion:
    """Little CMS, by the profile's perceptual tables if it has any.

    Curves are taken as they are, as browsers do: by the perceptual intent, Little CMS moves a black
    above 0 to 0 (2.19, with the profile of sRGB that Pillow makes).
    """

    def __init__(self, profile: bytes, mode: str) -> None:
        """Prepare a conversion from one of Pillow's modes.

        Raises:
            PyCMSError, OSError, ValueError, TypeError: the profile is damaged.
        """
        from PIL import ImageCms

        srgb = ImageCms.createProfile("sRGB")
        self._mode = mode
        # RGB is converted once for each step of a table, and is compared: exactly, by the profile's
        # own tables instead of one of 33 steps.
        flags = ImageCms.Flags.NOOPTIMIZE if mode == "RGB" else ImageCms.Flags.NONE
        intent = ImageCms.Intent.RELATIVE_COLORIMETRIC
        if has_tables(profile):
            intent = ImageCms.Intent.PERCEPTUAL
        self._transform: Any = ImageCms.buildTransform(
            io.BytesIO(profile), srgb, mode, "RGB", intent, flags
        )

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


def _matrix_conversion(curves: NDArray[np.float64], to_profile_xyz: Matrix) -> Conversion:
    """Return the conversion by curves, float64 (3, 256), and a matrix."""
    matrix = np.eye(4)
    matrix[:3, :3] = np.linalg.solve(to_xyz("sRGB"), to_profile_xyz)
    encoded = srgb_levels(np.linspace(0, 1, _CURVE_STEPS))
    return _OcioConversion(
        _curves(curves),
        MatrixTransform(matrix.reshape(-1).tolist()),
        # Colors outside of sRGB are clipped to it.
        _curves(np.stack([encoded] * 3)),
    )


def _table_conversion(cms: Conversion) -> Conversion:
    """Return the conversion by a table of what Little CMS makes of a grid of colors.

    Grays decide where the grid is fine: their levels are often steep where they are dark.
    """
    levels = np.arange(256, dtype=np.uint8)
    grays = cms(levels[None, :, None].repeat(3, axis=2))[0].astype(np.float64)
    slopes = np.abs(np.diff(grays, axis=0)).max(axis=1) + _SLOPE_OF_ALL
    ends = np.concatenate([[0], slopes.cumsum()]) / slopes.sum()
    steps = np.rint(np.interp(np.linspace(0, 1, _TABLE_STEPS), ends, levels))
    steps = np.unique(steps).astype(np.uint8)
    grid = np.stack(np.meshgrid(steps, steps, steps, indexing="ij"), axis=-1)
    colors = cms(grid.reshape(1, -1, 3)).astype(np.float32) / 255
    table = Lut3DTransform(len(steps))
    table.setInterpolation(INTERP_TETRAHEDRAL)
    table.setData(colors.reshape(-1))
    positions = np.interp(levels, steps, np.linspace(0, 1, len(steps)))
    return _OcioConversion(_curves(np.stack([positions] * 3)), table)


def _curves(levels: NDArray[np.float64]) -> Any:
    """Return a transform that looks each channel up in its curve: float64 (3, n), from 0 to 1."""
    transform = Lut1DTransform(levels.shape[1], inputHalfDomain=False)
    transform.setData(np.ascontiguousarray(levels.T, np.float32).reshape(-1))
    return transform


class _OcioConversion:
    """OpenColorIO's transforms, one after the other."""

    def __init__(self, *transforms: Any) -> None:
        processor = Config.CreateRaw().getProcessor(GroupTransform(list(transforms)))
        depth = BIT_DEPTH_UINT8
        self._processor: Any = processor.getOptimizedCPUProcessor(
            depth, depth, OPTIMIZATION_DEFAULT
        )

    def __call__(self, pixels: Pixels, out: Pixels | None = None) -> Pixels:
        stored = np.ascontiguousarray(pixels)
        is_direct = out is not None and out.flags.c_contiguous
        converted = out if out is not None and is_direct else np.empty_like(stored)
        self._processor.apply(_described(stored), _described(converted))
        if out is None or is_direct:
            return converted
        out[:] = converted
        return out


def _described(pixels: Pixels) -> Any:
    """Return what OpenColorIO has to know of pixels (H, W, 3)."""
    height, width = pixels.shape[:2]
    order, depth = CHANNEL_ORDERING_RGB, BIT_DEPTH_UINT8
    return PackedImageDesc(pixels, width, height, order, depth, 1, 3, 3 * width)


def _cube() -> Pixels:
    """Return colors on a grid in RGB, and all grays, uint8 (1, n, 3)."""
    levels = np.linspace(0, 255, _CUBE_STEPS).astype(np.uint8)
    grid = np.stack(np.meshgrid(levels, levels, levels), axis=-1).reshape(1, -1, 3)
    grays = np.arange(256, dtype=np.uint8)[None, :, None].repeat(3, axis=2)
    return np.concatenate([grid, grays], axis=1)


def _largest_difference(left: Pixels, right: Pixels) -> int:
    return int(np.abs(left.astype(np.int16) - right).max())
