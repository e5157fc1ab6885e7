"""Checks the fields of JSON records from storage, which others may write or cut.

Each function returns its argument, or raises ValueError.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

T = TypeVar("T")

LARGEST = 1e300
"""Amounts are below it: a larger one is damage, and an integer may be no float at all."""

LATEST_TIME = 4e10
"""Times beyond it are no Unix seconds: the year 3237."""


def _shown(value: Any) -> str:
    """Return a value for a message of one line."""
    shown = repr(value)
    return shown if len(shown) <= 60 else f"{shown[:60]}…"


def text(value: Any) -> str:
    """Return a text."""
    if not isinstance(value, str):
        raise ValueError(f"{_shown(value)} is not text")
    return value


def timestamp(value: Any) -> float:
    """Return a time in Unix seconds, which is finite and not negative."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{_shown(value)} is not a number")
    if not 0 <= value <= LATEST_TIME:
        raise ValueError(f"{_shown(value)} is not a time in Unix seconds")
    return float(value)


def seconds(value: Any) -> float:
    """Return a duration in seconds, which is finite and not negative."""
    return timestamp(value)


def amount(value: Any) -> float:
    """Return a number that is finite and not negative."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{_shown(value)} is not a number")
    if not 0 <= value < LARGEST:
        raise ValueError(f"{_shown(value)} is no amount")
    return float(value)


def integer(value: Any) -> int:
    """Return an integer that fits into 32 bits."""
    if isinstance(value, bool) or not isinstance(value, int) or abs(value) >= 2**31:
        raise ValueError(f"{_shown(value)} is not an integer of 32 bits")
    return value


def positive(value: Any) -> int:
    """Return a positive integer."""
    if integer(value) < 1:
        raise ValueError(f"{_shown(value)} is not positive")
    return int(value)


def optional(check: Callable[[Any], T]) -> Callable[[Any], T | None]:
    """Return a check that also accepts None."""
    return lambda value: None if value is None else check(value)


def one_of(*allowed: str) -> Callable[[Any], Any]:
    """Return a check that accepts these texts."""

    def check(value: Any) -> str:
        if not isinstance(value, str) or value not in allowed:
            raise ValueError(f"{_shown(value)} is none of {', '.join(allowed)}")
        return value

    return check


def flag(value: Any) -> bool:
    """Return true or false."""
    if not isinstance(value, bool):
        raise ValueError(f"{_shown(value)} is neither true nor false")
    return value


def anything(value: Any) -> Any:
    """Return a value that is only compared."""
    return value


def size(value: Any) -> int:
    """Return a number of bytes, samples or steps: an integer that is not negative."""
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**63:
        raise ValueError(f"{_shown(value)} is not a number of bytes, samples or steps")
    return value


def positive_size(value: Any) -> int:
    """Return a number of bytes that is positive."""
    if size(value) < 1:
        raise ValueError(f"{_shown(value)} is not positive")
    return int(value)


def list_of(check: Callable[[Any], T], *, min_items: int = 0) -> Callable[[Any], list[T]]:
    """Return a check of a list of at least ``min_items``, which pass ``check``."""

    def check_all(value: Any) -> list[T]:
        if not isinstance(value, list):
            raise ValueError(f"{_shown(value)} is no list")
        if len(value) < min_items:
            raise ValueError(f"it has {len(value)} items; at least {min_items} are needed")
        return [check(item) for item in value]

    return check_all


def record_of(checks: Mapping[str, Callable[[Any], Any]]) -> Callable[[Any], dict[str, Any]]:
    """Return a check of an object with all of these fields; others are ignored."""

    def check_all(value: Any) -> dict[str, Any]:
        fields = checked_fields(value, checks)
        if missing := checks.keys() - fields.keys():
            raise ValueError(f"{min(missing)} is missing")
        return fields

    return check_all


def mapping_of(check: Callable[[Any], T]) -> Callable[[Any], dict[str, T]]:
    """Return a check of an object whose values pass ``check``."""

    def check_all(value: Any) -> dict[str, T]:
        if not isinstance(value, dict):
            raise ValueError(f"{_shown(value)} is no object")
        return {text(name): check(item) for name, item in value.items()}

    return check_all


def checked_fields(document: Any, checks: Mapping[str, Callable[[Any], Any]]) -> dict[str, Any]:
    """Return the fields of ``document`` that have a check; others are ignored.

    Raises:
        ValueError: it is no object, or a field has another type or range; the message names it.
    """
    if not isinstance(document, dict):
        raise ValueError("it is no JSON object")
    fields = {}
    for name, check in checks.items():
        if name in document:
            try:
                fields[name] = check(document[name])
            except ValueError as error:
                raise ValueError(f"{name}: {error}") from None
    return fields
