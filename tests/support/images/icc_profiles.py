"""Writes small ICC profiles (ICC.1:2022), and computes in floating point what they mean in sRGB."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Curve = Callable[[Floats], Floats]

_D50 = np.array([0.9642, 1.0, 0.8249])

# Colorants adapted to D50, as published for each space: rows are X, Y and Z of red, green and blue.
# sRGB, Adobe RGB, ProPhoto: brucelindbloom.com, "RGB/XYZ Matrices", read November 2026.
SRGB = np.array(
    [
        [0.4360747, 0.3850649, 0.1430804],
        [0.2225045, 0.7168786, 0.0606169],
        [0.0139322, 0.0971045, 0.7141733],
    ]
)
ADOBE = np.array(
    [
        [0.6097559, 0.2052401, 0.1492240],
        [0.3111242, 0.6256560, 0.0632197],
        [0.0194811, 0.0608902, 0.7448387],
    ]
)
# Apple's "Display P3.icc".
P3 = np.array(
    [[0.51512, 0.29198, 0.15710], [0.24120, 0.69225, 0.06657], [-0.00105, 0.04189, 0.78407]]
)
PROPHOTO = np.array(
    [
        [0.7976749, 0.1351917, 0.0313534],
        [0.2880402, 0.7118741, 0.0000857],
        [0.0000000, 0.0000000, 0.8252100],
    ]
)


def srgb_curve(stored: Floats) -> Floats:
    return np.where(stored <= 0.04045, stored / 12.92, ((stored + 0.055) / 1.055) ** 2.4)


def gamma(exponent: float) -> Curve:
    return lambda stored: np.asarray(stored) ** exponent


SPACES: dict[str, tuple[Floats, Curve]] = {
    "sRGB": (SRGB, srgb_curve),
    "Adobe RGB": (ADOBE, gamma(563 / 256)),
    "Display P3": (P3, srgb_curve),
    "ProPhoto RGB": (PROPHOTO, gamma(1.8)),
    # A calibrated display, whose black gives light.
    "black of 1 %": (ADOBE, lambda stored: 0.01 + 0.99 * np.asarray(stored) ** 2.2),
    "sRGB, black of 5 %": (SRGB, lambda stored: 0.05 + 0.95 * srgb_curve(np.asarray(stored))),
}
GRAYS: dict[str, Curve] = {
    "gamma 1.8": gamma(1.8),
    "dot gain 20 %": lambda stored: 0.9 * stored**1.75 + 0.1 * stored,
    "black of 1 %": lambda stored: 0.01 + 0.99 * stored**2.2,
}


def rgb_profile(name: str, kind: str = "curv") -> bytes:
    """Return the profile of one of :data:`SPACES`, with tables or parametric curves."""
    matrix, curve = SPACES[name]
    stored = _parametric(curve) if kind == "para" else _table(curve)
    tags = [(f"{color}TRC", stored) for color in "rgb"]
    tags += [(f"{color}XYZ", _xyz(matrix[:, at])) for at, color in enumerate("rgb")]
    return _profile("mntr", "RGB ", "XYZ ", tags)


def gray_profile(name: str) -> bytes:
    """Return the profile of one of :data:`GRAYS`."""
    return _profile("mntr", "GRAY", "XYZ ", [("kTRC", _table(GRAYS[name]))])


def table_profile(space: str, to_lab: Callable[[Floats], Floats], steps: int = 9) -> bytes:
    """Return a profile with a table: ``to_lab`` takes device values (n, channels) from 0 to 1."""
    channels = 4 if space == "CMYK" else 3
    axes = [np.linspace(0, 1, steps)] * channels
    grid = np.stack(np.meshgrid(*axes, indexing="ij"), axis=-1).reshape(-1, channels)
    lab = to_lab(grid)
    encoded = np.stack([lab[:, 0] / 100 * 65280, *((lab[:, 1:] + 128) * 256).T], axis=1)
    values = np.clip(np.rint(encoded), 0, 65535).astype(">u2").tobytes()
    ramp = struct.pack(">2H", 0, 65535)
    identity = b"".join(_s15(value) for value in np.eye(3).ravel())
    table = b"mft2\0\0\0\0" + bytes([channels, 3, steps, 0]) + identity + struct.pack(">2H", 2, 2)
    return _profile("prtr", space, "Lab ", [("A2B0", table + ramp * channels + values + ramp * 3)])


def with_tag(profile: bytes, name: str, content: bytes) -> bytes:
    """Return a profile with a further tag, whose content goes to the end."""
    (count,) = struct.unpack(">I", profile[128:132])
    table, body = profile[132 : 132 + 12 * count], profile[132 + 12 * count :]
    entries = [struct.unpack(">4sII", table[at : at + 12]) for at in range(0, len(table), 12)]
    moved = b"".join(struct.pack(">4sII", tag, offset + 12, size) for tag, offset, size in entries)
    moved += struct.pack(">4sII", name.encode(), len(profile) + 12, len(content))
    size = struct.pack(">I", len(profile) + 12 + len(content))
    return size + profile[4:128] + struct.pack(">I", count + 1) + moved + body + content


def in_srgb(pixels: NDArray[np.uint8], name: str) -> Floats:
    """Return pixels (…, 3) of a space in sRGB, not rounded; what is outside of it is clipped."""
    matrix, curve = SPACES[name]
    return _encoded(curve(pixels / 255) @ (np.linalg.inv(SRGB) @ matrix).T)


def gray_in_srgb(levels: NDArray[np.uint8], name: str) -> Floats:
    """Return gray levels in sRGB, not rounded."""
    return _encoded(GRAYS[name](levels / 255))


def _encoded(linear: Floats) -> Floats:
    clipped = np.clip(linear, 0, 1)
    curved: Floats = np.where(
        clipped <= 0.0031308, clipped * 12.92, 1.055 * clipped ** (1 / 2.4) - 0.055
    )
    return 255 * curved


def _profile(kind: str, space: str, pcs: str, tags: Sequence[tuple[str, bytes]]) -> bytes:
    description = b"test\0"
    desc = b"desc\0\0\0\0" + struct.pack(">I", len(description)) + description + bytes(78)
    every = [("desc", desc), ("cprt", b"text\0\0\0\0none\0"), ("wtpt", _xyz(_D50)), *tags]
    start = 132 + 12 * len(every)
    table, body = b"", b""
    for name, content in every:
        table += struct.pack(">4sII", name.encode(), start + len(body), len(content))
        body += content + bytes(-len(content) % 4)
    header = struct.pack(
        ">I4sI4s4s4s", start + len(body), b"test", 0x02400000, *_codes(kind, space, pcs)
    )
    header += struct.pack(">6H", 2026, 1, 1, 0, 0, 0) + b"acsp" + bytes(28)
    header += b"".join(map(_s15, _D50))
    return header + bytes(128 - len(header)) + struct.pack(">I", len(every)) + table + body


def _codes(*names: str) -> list[bytes]:
    return [name.encode() for name in names]


def _s15(value: float) -> bytes:
    return struct.pack(">i", round(float(value) * 65536))


def _xyz(values: Floats) -> bytes:
    return b"XYZ \0\0\0\0" + b"".join(map(_s15, values))


def _table(curve: Curve, steps: int = 1024) -> bytes:
    values = np.rint(65535 * curve(np.linspace(0, 1, steps))).astype(">u2")
    return b"curv\0\0\0\0" + struct.pack(">I", steps) + values.tobytes()


def _parametric(curve: Curve) -> bytes:
    """Return the curve of sRGB with its five parameters, or a power with one."""
    if curve is srgb_curve:
        values = (2.4, 1 / 1.055, 0.055 / 1.055, 1 / 12.92, 0.04045)
        return b"para\0\0\0\0" + struct.pack(">HH", 3, 0) + b"".join(map(_s15, values))
    exponent = float(np.log(curve(np.array(0.5))) / np.log(0.5))
    return b"para\0\0\0\0" + struct.pack(">HH", 0, 0) + _s15(exponent)
