"""Reads dates and times of columns: texts in ISO 8601.

They are compared as moments. Texts of several time zones, or with and without one, have another
order than what they say.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any


def moment(value: Any) -> datetime | None:
    """Return the moment that a text states, in UTC; None if it is no date.

    A date is its midnight, and a time without a zone is one of UTC.
    """
    if not isinstance(value, str):
        return None
    try:
        found = datetime.fromisoformat(value.strip())
    except ValueError:
        return None
    if found.tzinfo is None:
        return found.replace(tzinfo=UTC)
    try:
        return found.astimezone(UTC)
    except OverflowError:  # the last or the first day that can be stated: never, or always
        return found.replace(tzinfo=UTC)


def is_date(value: str) -> bool:
    """Return whether a text is a date without a time."""
    return len(value.strip()) <= len("2027-06-01")
