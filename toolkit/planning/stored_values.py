"""Converts JSON values from storage to data classes, and checks their types and ranges."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, is_dataclass
from typing import Any, TypeVar

import msgspec
from sm_train.entrypoints.base.stored_fields import LARGEST

Record = TypeVar("Record")


def as_record(value: Any, kind: type[Record]) -> Record:
    """Return ``value`` as a data class whose numbers are amounts: finite and not negative.

    Raises:
        ValueError: a field is missing, or has another type or range; the message names it.
    """
    record = msgspec.convert(value, kind)
    assert is_dataclass(record)
    assert not isinstance(record, type)
    for name, number in _numbers(asdict(record), ""):
        if not 0 <= number < LARGEST:
            raise ValueError(f"{name}: {str(number)[:20]} is no amount")
    return record


def _numbers(value: Any, name: str) -> Iterator[tuple[str, float]]:
    """Yield all numbers in ``value`` with their names."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _numbers(item, str(key))
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _numbers(item, name)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield name, value
