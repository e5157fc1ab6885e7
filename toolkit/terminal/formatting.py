"""Numbers as a person reads them: rounded here, exact everywhere else."""

from __future__ import annotations

from typing import Any


def format_days(seconds: float | None) -> str:
    """Days with one decimal; hours, minutes or seconds below one."""
    if seconds is None:
        return "unknown"
    if seconds >= 86400:
        return f"{seconds / 86400:.1f}"
    if seconds >= 3600:
        return f"{seconds / 3600:.1f} h"
    return f"{seconds / 60:.0f} min" if seconds >= 60 else f"{seconds:.0f} s"


def format_duration(seconds: float) -> str:
    """:func:`format_days` with its unit."""
    return f"{seconds / 86400:.3g} days" if seconds >= 86400 else format_days(seconds)


def format_usd(amount: float | None) -> str:
    """Whole dollars; cents below 100."""
    if amount is None:
        return "unknown"
    return f"${amount:,.0f}" if amount >= 100 else f"${amount:,.2f}"


def format_total_usd(total: dict[str, Any]) -> str:
    """The total; with an unknown part, the known part and "at least"."""
    if total["cost_usd"] is not None:
        return format_usd(total["cost_usd"])
    least = total["cost_at_least_usd"]
    return f"at least {format_usd(least)}" if least else "unknown"


def format_usd_range(priced: dict[str, Any]) -> str:
    """Low to high; nothing where either is unknown."""
    low, high = priced["cost_low_usd"], priced["cost_high_usd"]
    return "" if low is None or high is None else f"{format_usd(low)}–{format_usd(high)}"


def format_quantity(value: float, unit: str) -> str:
    """Format a measurement in a readable unit: B/s as GB/s, s as µs, others unchanged."""
    if unit == "B/s":
        return f"{value / 1e9:.3g} GB/s"
    if unit == "s":
        return f"{value * 1e6:.0f} µs"
    return f"{value:.3g} {unit}"


def format_percent(share: float) -> str:
    """A share of 1."""
    return f"{share:.1%}"


def format_number(value: float | None) -> str:
    """Three digits."""
    return "unknown" if value is None else f"{value:.3g}"
