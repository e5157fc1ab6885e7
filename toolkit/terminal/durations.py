"""Durations among the options of commands."""

from __future__ import annotations

from sm_train.cost.durations import duration_seconds
from sm_train.toolkit.errors import UserError


def parse_duration(option: str, text: str) -> float:
    """``90s``, ``30m``, ``36h`` or ``5d``.

    Raises:
        UserError: ``text`` is no duration; the message names ``option``.
    """
    found = duration_seconds(text)
    if found is None:
        raise UserError(f"{option}: {text!r} must be a time such as 90s, 30m, 36h or 14d")
    return found
