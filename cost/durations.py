"""Parse durations such as ``36h``."""

from __future__ import annotations

import re

_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


def duration_seconds(text: str) -> float | None:
    """Seconds of ``90s``, ``30m``, ``36h`` or ``5d``; None for any other text."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([smhd])", text)
    return float(match[1]) * _UNITS[match[2]] if match else None
