"""Formats numbers for display, rounded; parses durations; removes terminal control from text."""

from __future__ import annotations

import re
from typing import Any

from sm_train.cost.durations import duration_seconds
from sm_train.toolkit.base.errors import UserError


def parse_duration(option: str, text: str) -> float:
    """Parse ``90s``, ``30m``, ``36h`` or ``5d`` as seconds.

    Raises:
        UserError: ``text`` is not a duration; the message names ``option``.
    """
    seconds = duration_seconds(text)
    if seconds is None:
        raise UserError(f"{option}: {text!r} must be a duration such as 90s, 30m, 36h or 14d")
    return seconds


def plural(number: int, noun: str) -> str:
    """Return ``1 sample``, ``2 samples`` or ``2 processes``."""
    ending = "es" if noun.endswith("s") else "s"
    return f"{number:,} {noun}{'' if number == 1 else ending}"


def format_days(seconds: float | None) -> str:
    """Format as days with one decimal; below a day as hours, minutes or seconds."""
    if seconds is None:
        return "unknown"
    if seconds >= 86400:
        return f"{seconds / 86400:.1f} days"
    if seconds >= 3600:
        return f"{seconds / 3600:.1f} h"
    return f"{seconds / 60:.0f} min" if seconds >= 60 else f"{seconds:.0f} s"


def format_duration(seconds: float) -> str:
    """Format like :func:`format_days`, with three significant digits."""
    return f"{seconds / 86400:.3g} days" if seconds >= 86400 else format_days(seconds)


def format_usd(amount: float | None) -> str:
    """Format as whole dollars, with cents below 100."""
    if amount is None:
        return "unknown"
    return f"${amount:,.0f}" if amount >= 100 else f"${amount:,.2f}"


def format_signed_usd(amount: float | None) -> str:
    """Format a difference in dollars with its sign."""
    if amount is None:
        return "unknown"
    return f"{'+' if amount >= 0 else '−'}{format_usd(abs(amount))}"


def format_total_usd(total: dict[str, Any]) -> str:
    """Format the total; if a part is unknown, the known part with "at least"."""
    if total["cost_usd"] is not None:
        return format_usd(total["cost_usd"])
    minimum = total["cost_at_least_usd"]
    return f"at least {format_usd(minimum)}" if minimum else "unknown"


def format_usd_range(priced: dict[str, Any]) -> str:
    """Format the range from low to high; empty if either is unknown."""
    low, high = priced["cost_low_usd"], priced["cost_high_usd"]
    return "" if low is None or high is None else f"{format_usd(low)}–{format_usd(high)}"


def format_quantity(value: float, unit: str) -> str:
    """Format a measurement in a readable unit: B/s as GB/s, s as µs, others unchanged."""
    if unit == "B/s":
        return f"{value / 1e9:.3g} GB/s"
    if unit == "s":
        return f"{value * 1e6:.0f} µs"
    return f"{value:.3g} {unit}"


def format_bytes(size: float) -> str:
    """Format a size with three significant digits, in decimal units."""
    for factor, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if size >= factor:
            return f"{size / factor:.3g} {unit}"
    return f"{size:.0f} B"


def format_percent(share: float) -> str:
    """Format a share of 1 as percent."""
    return f"{share:.1%}"


def format_number(value: float | None) -> str:
    """Format with three significant digits."""
    return "unknown" if value is None else f"{value:.3g}"


def format_projection(
    spent: float | str | None, remaining: float | None, total: float | None
) -> str:
    """Format what a run has cost and will cost, in dollars, as every command shows it."""
    past = spent if isinstance(spent, str) else format_usd(spent)
    return f"spent {past}, remaining {format_usd(remaining)}, total {format_usd(total)}"


# ECMA-48: a control sequence (CSI), a string (OSC, DCS, SOS, PM, APC) with its terminator, and any
# other escape sequence; each starts with ESC or with one character of the C1 set.
_SEQUENCES = re.compile(
    r"(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]"
    r"|(?:\x1b[\]PX^_]|[\x9d\x90\x98\x9e\x9f])[^\x07\x1b\x9c]*(?:\x07|\x1b\\|\x9c)"
    r"|\x1b[ -/]*[0-Z\\^-~]"
)
# C0 except tab and line feed, DEL and C1; line separators; and the controls that reorder text
# (Unicode's Bidi_Control property, and the deprecated ones that follow them).
_CONTROLS = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u061c\u200e\u200f\u202a-\u202e\u2066-\u206f]"
)
# What os.fsdecode makes of a byte that is no UTF-8, which a terminal may take for C1.
_SURROGATES = re.compile("[\ud800-\udfff]")


def without_sequences(text: str) -> str:
    """Return ``text`` without escape sequences; single control characters stay."""
    return _SEQUENCES.sub("", text)


def printable(text: str) -> str:
    """Return ``text`` without escape sequences, control characters and bidirectional controls.

    Tabs and line feeds stay; half a surrogate pair becomes U+FFFD. A terminal then displays the
    text and does nothing else: it changes no title, clipboard, color or cursor, and displays the
    characters in their order.
    """
    without = _CONTROLS.sub("", without_sequences(text.replace("\r\n", "\n")))
    return _SURROGATES.sub("\ufffd", without)
