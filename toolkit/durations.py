"""Durations as a person writes them on the command line."""

from __future__ import annotations

import re

from sm_train.toolkit.errors import UserError

_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


def seconds(option: str, text: str) -> float:
    """``90s``, ``30m``, ``36h`` or ``5d``.

    Raises:
        UserError: ``text`` is no duration; the message names ``option``.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([smhd])", text)
    if match is None:
        raise UserError(f"{option}: {text!r}: write a duration such as 90s, 30m, 36h or 5d")
    return float(match[1]) * _UNITS[match[2]]
