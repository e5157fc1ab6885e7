"""Finds the type of a column of texts, which is that of all of its cells that are not empty.

CSV has texts only, and JSON no dates: so `pack --where`, the index and a sample's JSON file agree
on what a column holds.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from sm_train.entrypoints.sample_metadata.column_types import MISSING, ColumnType
from sm_train.entrypoints.sample_metadata.dates import moment

_INTEGER = re.compile(r"[+-]?(0|[1-9]\d{0,19})", re.ASCII)
_NUMBER = re.compile(r"[+-]?((0|[1-9]\d*)(\.\d*)?|\.\d+)([eE][+-]?\d+)?", re.ASCII)
_DATE = re.compile(r"\d{4}-\d\d-\d\d", re.ASCII)
_TIMESTAMP = re.compile(
    r"\d{4}-\d\d-\d\d([T ]\d\d:\d\d(:\d\d(\.\d{1,6})?)?(Z|[+-]\d\d:?\d\d)?)?", re.ASCII
)
_KINDS: tuple[ColumnType, ...] = (
    *("boolean", "integer", "unsigned", "number", "date", "timestamp"),
)
"""What the cells of a column may be, from the narrowest on; everything is a text."""

_RANGES = {"integer": range(-(2**63), 2**63), "unsigned": range(2**64)}
"""Whole numbers of 64 bits, with and without a sign."""


def is_missing(text: str | None) -> bool:
    """Return whether a cell holds nothing."""
    return text is None or text.lower() in MISSING


def fits(text: str, kind: ColumnType) -> bool:
    """Return whether a cell is one of a type; a number has no leading zeros, as identifiers have.

    Dates and times are those of ISO 8601; a date is its midnight among times.
    """
    if kind == "boolean":
        return text.lower() in ("true", "false")
    if kind in _RANGES:
        return _INTEGER.fullmatch(text) is not None and int(text) in _RANGES[kind]
    if kind == "number":
        return _NUMBER.fullmatch(text) is not None
    if kind == "date":
        return _DATE.fullmatch(text) is not None and moment(text) is not None
    if kind == "timestamp":
        return _TIMESTAMP.fullmatch(text) is not None and moment(text) is not None
    return True


def typed(text: str, kind: ColumnType) -> bool | int | float | str:
    """Return a text that fits a type as a value of JSON, which has no dates."""
    if kind == "boolean":
        return text.lower() == "true"
    if kind in _RANGES:
        return int(text)
    return float(text) if kind == "number" else text


def cell_kind(text: str) -> ColumnType:
    """Return the narrowest type of a cell of CSV."""
    return next((kind for kind in _KINDS if fits(text, kind)), "text")


def text_kind(text: str) -> ColumnType:
    """Return whether a text of a JSON file is a date, a time or another text."""
    return next((kind for kind in ("date", "timestamp") if fits(text, kind)), "text")


@dataclass
class TextColumn:
    """The cells of a column so far: the types that all have, and the first without a number."""

    candidates: list[ColumnType] = field(default_factory=lambda: list(_KINDS))
    count: int = 0
    numbers: int = 0
    first_other: tuple[int, str] | None = None

    def add(self, row: int, text: str | None) -> None:
        """Take the cell of a row; a missing one says nothing."""
        if text is None or is_missing(text):
            return
        self.count += 1
        self.candidates = [kind for kind in self.candidates if fits(text, kind)]
        if fits(text, "number"):
            self.numbers += 1
        elif self.first_other is None:
            self.first_other = row, text

    @property
    def kind(self) -> ColumnType:
        """The narrowest type of all cells, text for a column without any."""
        return self.candidates[0] if self.count and self.candidates else "text"
