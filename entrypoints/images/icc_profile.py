"""Reads ICC profiles (ICC.1:2022): of which color space one is, and its matrix and curves."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray
from sm_train.entrypoints.images.color_spaces import SPACE_NAMES, Matrix, to_xyz

_TAGS_START, _TAG_BYTES = 132, 12

_COLORANTS = (b"rXYZ", b"gXYZ", b"bXYZ")
_CURVES = (b"rTRC", b"gTRC", b"bTRC")

_NEAR = 0.004
"""Two profiles of one space differ by less: programs round and adapt in their own ways."""


@dataclass(frozen=True, eq=False)
class MatrixProfile:
    """RGB through curves and a matrix: linear levels, float64 (3, 256), to XYZ, float64 (3, 3)."""

    curves: NDArray[np.float64]
    to_xyz: Matrix


def profile_space(profile: bytes) -> bytes:
    """Return the space of a profile's device, such as ``b"RGB "``."""
    return profile[16:20]


@lru_cache(maxsize=64)
def profile_name(profile: bytes) -> str:
    """Return the name of a profile's color space, by its content; otherwise what it is of."""
    space = profile_space(profile)
    if space != b"RGB ":
        return {b"CMYK": "CMYK", b"GRAY": "gray", b"Lab ": "Lab"}.get(space, "other")
    colorants = _colorants(profile)
    if colorants is None:
        return "other RGB"
    near = (name for name in SPACE_NAMES if np.abs(colorants - to_xyz(name)).max() < _NEAR)
    return next(near, "other RGB")


def profile_transfer(profile: bytes) -> int:
    """Return the transfer function that a profile states in its tag `cicp`; 2 without one."""
    tag = _tag(profile, b"cicp")
    return tag[9] if len(tag) >= 12 else 2


def has_tables(profile: bytes) -> bool:
    """Return whether a profile states its colors by tables, which take precedence."""
    return bool(_tag(profile, b"A2B0"))


def read_matrix_profile(profile: bytes) -> MatrixProfile | None:
    """Return the curves and the matrix of a profile; None if it has tables, or is damaged."""
    if profile_space(profile) != b"RGB " or has_tables(profile):
        return None
    colorants = _colorants(profile)
    curves = [_curve(_tag(profile, name)) for name in _CURVES]
    if colorants is None or any(curve is None for curve in curves):
        return None
    return MatrixProfile(np.stack([curve for curve in curves if curve is not None]), colorants)


def _colorants(profile: bytes) -> Matrix | None:
    columns = [_tag(profile, name) for name in _COLORANTS]
    if any(len(column) < 20 or column[:4] != b"XYZ " for column in columns):
        return None
    values = [struct.unpack(">3i", column[8:20]) for column in columns]
    columns_of_matrix: Matrix = np.array(values, np.float64).T / 65536
    return columns_of_matrix


def _tag(profile: bytes, name: bytes) -> bytes:
    """Return the content of a tag; empty if the profile does not have it."""
    if len(profile) < _TAGS_START:
        return b""
    (count,) = struct.unpack(">I", profile[_TAGS_START - 4 : _TAGS_START])
    for start in range(_TAGS_START, _TAGS_START + _TAG_BYTES * min(count, 256), _TAG_BYTES):
        if profile[start : start + 4] == name and len(profile) >= start + _TAG_BYTES:
            offset, size = struct.unpack(">II", profile[start + 4 : start + _TAG_BYTES])
            return profile[offset : offset + size]
    return b""


def _curve(tag: bytes) -> NDArray[np.float64] | None:
    """Return a curve's value at each of 256 levels, from 0 to 1; None if it is damaged."""
    levels = np.arange(256) / 255
    if tag[:4] == b"para" and len(tag) >= 12:
        return _parametric(levels, tag)
    if tag[:4] != b"curv" or len(tag) < 12:
        return None
    (count,) = struct.unpack(">I", tag[8:12])
    if len(tag) < 12 + 2 * count:
        return None
    if count == 0:
        return levels
    values = np.frombuffer(tag, ">u2", count, 12).astype(np.float64)
    if count == 1:
        powers: NDArray[np.float64] = np.power(levels, values[0] / 256)
        return powers
    curve: NDArray[np.float64] = np.interp(levels, np.linspace(0, 1, count), values / 65535)
    return curve


_PARAMETERS = {0: 1, 1: 3, 2: 4, 3: 5, 4: 7}
"""The number of parameters of each parametric curve (ICC.1:2022, table 68)."""


def _parametric(levels: NDArray[np.float64], tag: bytes) -> NDArray[np.float64] | None:
    (kind,) = struct.unpack(">H", tag[8:10])
    count = _PARAMETERS.get(kind)
    if count is None or len(tag) < 12 + 4 * count:
        return None
    stored = struct.unpack(f">{count}i", tag[12 : 12 + 4 * count])
    gamma, *rest = (value / 65536 for value in stored)
    # Y = (aX + b)^g + e from d on, and cX + f below.
    a, b, c, d, e, f = 1.0, 0.0, 0.0, 0.0, 0.0, 0.0
    if kind in (1, 2):
        a, b = rest[:2]
        e = f = rest[2] if kind == 2 else 0.0
        d = -b / a if a else 0.0
    elif kind in (3, 4):
        a, b, c, d = rest[:4]
        e, f = rest[4:] if kind == 4 else (0.0, 0.0)
    with np.errstate(all="ignore"):  # a damaged one is compared, and found to be wrong
        upper = np.power(np.maximum(a * levels + b, 0.0), gamma) + e
    return np.clip(np.where(levels >= d, upper, c * levels + f), 0.0, 1.0)
