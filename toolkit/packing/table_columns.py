"""What a table says of an image besides its caption: further captions, and columns to keep."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import date, datetime, time
from decimal import Decimal
from typing import Any

from sm_train.toolkit.errors import UserError

_INTEGER = re.compile(r"[+-]?(0|[1-9]\d{0,17})", re.ASCII)
_NUMBER = re.compile(r"[+-]?(0|[1-9]\d*)?(\.\d*)?([eE][+-]?\d+)?", re.ASCII)
_BOOLEANS = {"true": True, "false": False}


def table_fields(captions: Mapping[str, Any], kept: Mapping[str, Any]) -> str | None:
    """Return the JSON object that becomes part of a sample's JSON file; None if it is empty.

    It has the ``captions`` and the ``kept`` columns.
    """
    document: dict[str, Any] = {}
    if captions:
        document["captions"] = {name: json_value(name, text) for name, text in captions.items()}
    if kept:
        document["columns"] = {name: json_value(name, value) for name, value in kept.items()}
    return json.dumps(document) if document else None


def json_value(column: str, value: Any) -> Any:
    """Return a cell as JSON has it: times and dates in ISO 8601, NaN as null.

    Raises:
        UserError: JSON cannot hold it.
    """
    match value:
        case None | bool() | int():
            return value
        case str():
            return value.encode(errors="replace").decode()  # bytes of the table that are not UTF-8
        case float():
            return value if value == value and abs(value) != float("inf") else None
        case datetime() | date() | time():
            return value.isoformat()
        case Decimal():
            return int(value) if value == value.to_integral_value() else float(value)
        case list() | tuple():
            return [json_value(column, item) for item in value]
        case dict():
            return {str(name): json_value(column, item) for name, item in value.items()}
    kind = type(value).__name__
    raise UserError(f"--keep: the column {column} holds {kind}; keep texts, numbers and booleans")


class CsvTypes:
    """The types of columns of a CSV table, each that of all of its cells that are not empty.

    A column of numbers has none with leading zeros, as identifiers have.
    """

    def __init__(self, reader: csv.DictReader[str], columns: Sequence[str]) -> None:
        """Read all rows."""
        self._candidates = {name: dict.fromkeys(_PATTERNS, True) for name in columns}
        for row in reader:
            for name, candidates in self._candidates.items():
                _exclude(candidates, row.get(name))

    def cell(self, column: str, text: str | None) -> Any:
        """Return a cell in the type of its column; None if it is empty."""
        if not text:
            return None
        candidates = self._candidates[column]
        if candidates["boolean"]:
            return _BOOLEANS[text.lower()]
        if candidates["integer"]:
            return int(text)
        return float(text) if candidates["number"] else text


def _is_number(text: str) -> bool:
    return bool(_NUMBER.fullmatch(text)) and any(map(str.isdigit, text))


_PATTERNS = {
    "boolean": lambda text: text.lower() in _BOOLEANS,
    "integer": lambda text: bool(_INTEGER.fullmatch(text)),
    "number": _is_number,
}


def _exclude(candidates: dict[str, bool], text: str | None) -> None:
    """Exclude the types that a cell does not have."""
    if text:
        for kind, fits in _PATTERNS.items():
            candidates[kind] = candidates[kind] and fits(text)


def unique(names: Iterable[str]) -> tuple[str, ...]:
    """Return the names without repetitions, in order."""
    return tuple(dict.fromkeys(names))
