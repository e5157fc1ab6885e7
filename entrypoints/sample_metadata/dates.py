"""Reads dates and times of columns, and of texts in ISO 8601.

They are compared as moments. Texts of several time zones, or with and without one, have another
order than what they say.
"""

from __future__ import annotations

from datetime import UTC, date, datetime, time
from typing import Any


def moment(value: Any) -> datetime | None:
    """Return the moment that a date, a time or a text of one states, in UTC; None if it is none.

    A date is its midnight, and a time without a zone is one of UTC.
    """
    if isinstance(value, date) and not isinstance(value, datetime):
        return datetime.combine(value, time(), UTC)
    if isinstance(value, datetime):
        return value.replace(tzinfo=UTC) if value.tzinfo is None else value.astimezone(UTC)
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


def is_date(value: Any) -> bool:
    """Return whether a value of which the moment is known is a date without a time."""
    if isinstance(value, str):
        return len(value.strip()) <= len("2027-06-01")
    return not isinstance(value, datetime)
