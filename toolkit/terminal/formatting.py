"""Numbers as a person reads them: rounded here, exact everywhere else."""

from __future__ import annotations

from typing import Any


def days(seconds: float | None) -> str:
    """Days with one decimal; hours, minutes or seconds below one."""
    if seconds is None:
        return "unknown"
    if seconds >= 86400:
        return f"{seconds / 86400:.1f}"
    if seconds >= 3600:
        return f"{seconds / 3600:.1f} h"
    return f"{seconds / 60:.0f} min" if seconds >= 60 else f"{seconds:.0f} s"


def span(seconds: float) -> str:
    """:func:`days` with its unit."""
    return f"{seconds / 86400:.3g} days" if seconds >= 86400 else days(seconds)


def dollars(amount: float | None) -> str:
    """Whole dollars; cents below 100."""
    if amount is None:
        return "unknown"
    return f"${amount:,.0f}" if amount >= 100 else f"${amount:,.2f}"


def total_dollars(total: dict[str, Any]) -> str:
    """The total; with an unknown part, the known part and "at least"."""
    if total["cost_usd"] is not None:
        return dollars(total["cost_usd"])
    least = total["cost_at_least_usd"]
    return f"at least {dollars(least)}" if least else "unknown"


def dollar_range(priced: dict[str, Any]) -> str:
    """Low to high; nothing where either is unknown."""
    low, high = priced["cost_low_usd"], priced["cost_high_usd"]
    return "" if low is None or high is None else f"{dollars(low)}–{dollars(high)}"


def percent(share: float) -> str:
    """A share of 1."""
    return f"{share:.1%}"


def number(value: float | None) -> str:
    """Three digits."""
    return "unknown" if value is None else f"{value:.3g}"
