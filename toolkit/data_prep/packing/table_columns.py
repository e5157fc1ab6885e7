"""What a table says of an image besides its caption: further captions, and columns to keep."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from datetime import date, datetime, time
from decimal import Decimal
from typing import Any
from uuid import UUID

from sm_train.entrypoints.sample_metadata.text_columns import TextColumn, is_missing, typed
from sm_train.toolkit.base.errors import UserError


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
            if value == value.to_integral_value():
                return int(value)
            # As a number if that is exact enough to find the decimal again.
            return float(value) if Decimal(repr(float(value))) == value else str(value)
        case UUID():
            return str(value)
        case list() | tuple():
            return [json_value(column, item) for item in value]
        case dict():
            return {str(name): json_value(column, item) for name, item in value.items()}
    kind = type(value).__name__
    raise UserError(f"--keep: the column {column} holds {kind}; keep texts, numbers and booleans")


class CsvTypes:
    """The types of columns of a CSV table, each that of all of its cells that are not empty."""

    def __init__(
        self, rows: Iterable[tuple[int, Mapping[str, str]]], columns: Sequence[str]
    ) -> None:
        """Read all numbered rows."""
        self._columns = {name: TextColumn() for name in columns}
        for number, row in rows:
            for name, column in self._columns.items():
                column.add(number, row.get(name))

    def cell(self, column: str, text: str | None) -> Any:
        """Return a cell in the type of its column; None if it is empty. Dates stay texts."""
        if text is None or is_missing(text):
            return None
        return typed(text, self._columns[column].kind)


def unique(names: Iterable[str]) -> tuple[str, ...]:
    """Return the names without repetitions, in order."""
    return tuple(dict.fromkeys(names))
