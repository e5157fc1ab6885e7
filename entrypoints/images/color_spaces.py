"""RGB color spaces by their primaries, as linear levels to XYZ."""

from __future__ import annotations

from functools import cache
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

Matrix = NDArray[np.float64]
"""Linear RGB, or XYZ, to another space: float64 (3, 3), applied to columns."""

_D65, _D50 = (0.3127, 0.3290), (0.3457, 0.3585)

_SRGB = ((0.640, 0.330), (0.300, 0.600), (0.150, 0.060), _D65)
_SPACES = MappingProxyType(
    {
        "sRGB": _SRGB,
        "Adobe RGB": ((0.640, 0.330), (0.210, 0.710), (0.150, 0.060), _D65),
        "Display P3": ((0.680, 0.320), (0.265, 0.690), (0.150, 0.060), _D65),
        "ProPhoto RGB": ((0.7347, 0.2653), (0.1596, 0.8404), (0.0366, 0.0001), _D50),
        "BT.2020": ((0.708, 0.292), (0.170, 0.797), (0.131, 0.046), _D65),
        "BT.601 (625 lines)": ((0.640, 0.330), (0.290, 0.600), (0.150, 0.060), _D65),
        "BT.601 (525 lines)": ((0.630, 0.340), (0.310, 0.595), (0.155, 0.070), _D65),
    }
)
"""Name → chromaticities of red, green, blue and white (IEC 61966-2-1, Adobe RGB (1998),
SMPTE EG 432-1, ISO 22028-2, and ITU-R BT.2020 and BT.601)."""

SPACE_NAMES = tuple(_SPACES)

_CONE_RESPONSE = np.array(
    [[0.8951, 0.2664, -0.1614], [-0.7502, 1.7135, 0.0367], [0.0389, -0.0685, 1.0296]]
)
"""Bradford's, with which ICC profiles adapt colors to their white (ICC.1:2022, annex E)."""

_PROFILE_WHITE = np.array([0.9642, 1.0, 0.8249])
"""XYZ of D50, the white of ICC profiles."""


@cache
def to_xyz(name: str) -> Matrix:
    """Return the matrix from linear levels of a space to XYZ as ICC profiles state it."""
    *primaries, white = _SPACES[name]
    columns = np.stack([_xyz(point) for point in primaries], axis=1)
    stored_white = _xyz(white)
    scales = np.linalg.solve(columns, stored_white)
    gains = (_CONE_RESPONSE @ _PROFILE_WHITE) / (_CONE_RESPONSE @ stored_white)
    adaptation = np.linalg.inv(_CONE_RESPONSE) @ np.diag(gains) @ _CONE_RESPONSE
    result: Matrix = adaptation @ (columns * scales)
    return result


def srgb_levels(linear: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return linear levels from 0 to 1 as sRGB stores them (IEC 61966-2-1)."""
    return np.where(linear <= 0.0031308, 12.92 * linear, 1.055 * linear ** (1 / 2.4) - 0.055)


def linear_levels(stored: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return levels from 0 to 1 that sRGB stores as linear ones (IEC 61966-2-1)."""
    return np.where(stored <= 0.04045, stored / 12.92, ((stored + 0.055) / 1.055) ** 2.4)


def _xyz(point: tuple[float, float]) -> NDArray[np.float64]:
    """Return XYZ of a chromaticity at a luminance of 1."""
    x, y = point
    return np.array([x / y, 1.0, (1 - x - y) / y])
