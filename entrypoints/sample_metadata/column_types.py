"""The types of the columns of a table that an index keeps for each sample."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import date, datetime
from decimal import Decimal
from typing import Any, Literal, TypeAlias, get_args

import pyarrow as pa
from sm_train.entrypoints.sample_metadata.dates import moment

ColumnType: TypeAlias = Literal[
    "boolean", "integer", "unsigned", "single", "number", "decimal", "date", "timestamp", "text"
]
"""``single`` and ``number`` are floats of 32 and 64 bits, ``decimal`` has at most nine digits after
the point, and a ``timestamp`` is one of UTC."""

COLUMN_TYPES = frozenset(get_args(ColumnType))

MISSING = frozenset(("", "nan"))
"""Texts that hold nothing, in lower case: pandas writes a missing number as an empty cell, and
NumPy as nan."""

SOURCE = "source"
"""The column with the path or address of each image, which needs no table."""

ENRICHED = "enrichments"
"""Option of an index: the enrichments of its shards, oldest first: ``columns``, and what is in
:data:`MadeBy`."""

MADE_CAPTIONS = "made_captions"
"""Option of an index: the columns of captions that `sm-train enrich` has made → :data:`MadeBy`."""

MadeBy: TypeAlias = Mapping[str, str]
"""What has made a column: ``function``, and the :class:`ColorPolicy` of the images that it got."""

ColumnTypes: TypeAlias = Mapping[str, ColumnType]
"""Column → the type of all of its values, any of which may be missing."""

_ARROW = {
    "boolean": pa.bool_(),
    "integer": pa.int64(),
    "unsigned": pa.uint64(),
    "single": pa.float32(),
    "number": pa.float64(),
    "decimal": pa.decimal128(38, 9),
    "date": pa.date32(),
    "timestamp": pa.timestamp("us"),
    "text": pa.string(),
}


def arrow_type(kind: ColumnType) -> pa.DataType:
    """Return the type of a column in an index."""
    return _ARROW[kind]


def declared_type(kind: pa.DataType) -> ColumnType | None:
    """Return the type of a column of a Parquet table; None if its values have to be looked at.

    Raises:
        ValueError: an index cannot hold it; the message says of what it is.
    """
    types = pa.types
    if types.is_dictionary(kind):
        return declared_type(kind.value_type)
    if types.is_time(kind):
        raise ValueError("times of day")
    if types.is_duration(kind) or types.is_interval(kind):
        raise ValueError("durations")
    if types.is_decimal(kind) and kind.scale > _SCALE:
        raise ValueError(f"decimals of {kind.scale} digits after the point, not {_SCALE} at most")
    checks: tuple[tuple[ColumnType, bool], ...] = (
        ("boolean", types.is_boolean(kind)),
        ("unsigned", kind == pa.uint64()),
        ("integer", types.is_integer(kind)),
        ("single", types.is_float16(kind) or types.is_float32(kind)),
        ("number", types.is_float64(kind)),
        ("decimal", types.is_decimal(kind)),
        ("date", types.is_date(kind)),
        ("timestamp", types.is_timestamp(kind)),
        ("text", types.is_string(kind) or types.is_large_string(kind)),
        ("text", types.is_string_view(kind) or str(kind) == "extension<arrow.uuid>"),
    )
    return next((name for name, fits in checks if fits), None)


_SCALE = _ARROW["decimal"].scale

_WIDER: dict[frozenset[str], ColumnType] = {
    frozenset(("integer", "number")): "number",
    frozenset(("unsigned", "number")): "number",
    frozenset(("single", "number")): "number",
    frozenset(("single", "integer")): "number",
    frozenset(("decimal", "number")): "number",
    frozenset(("decimal", "single")): "number",
    frozenset(("decimal", "integer")): "decimal",
    frozenset(("decimal", "unsigned")): "decimal",
    frozenset(("integer", "unsigned")): "decimal",
    frozenset(("date", "timestamp")): "timestamp",
}


def type_of(value: Any) -> ColumnType | None:
    """Return the type of a JSON value, None for null.

    Raises:
        ValueError: it is a list or an object, or an integer of more than 64 bits.
    """
    match value:
        case None:
            return None
        case bool():
            return "boolean"
        case int():
            if not -(2**63) <= value < 2**64:
                raise ValueError(f"{value:,} has more than 64 bits")
            return "integer" if value < 2**63 else "unsigned"
        case float():
            return "number"
        case str():
            return "text"
    raise ValueError("lists" if isinstance(value, list) else "objects")


def common_type(left: ColumnType | None, right: ColumnType | None) -> ColumnType | None:
    """Return the type that holds the values of both, text if nothing else does."""
    if left is None or right is None or left == right:
        return left or right
    return _WIDER.get(frozenset((left, right)), "text")


def as_type(value: Any, kind: ColumnType) -> Any:
    """Return a JSON value as a column of this type holds it; None stays None."""
    if value is None or (
        kind in ("date", "timestamp") and isinstance(value, str) and value.lower() in MISSING
    ):
        return None
    match kind:
        case "number" | "single":
            return float(value)
        case "decimal":
            return Decimal(str(value))
        case "date":
            return date.fromisoformat(value[:10]) if isinstance(value, str) else value
        case "timestamp":
            return _utc(value) if isinstance(value, str) else value
    if kind != "text" or isinstance(value, str):
        return value
    return str(value).lower() if isinstance(value, bool) else str(value)


def _utc(text: str) -> datetime:
    """Return the moment of a text in UTC, without a zone."""
    found = moment(text)
    if found is None:
        raise ValueError(f"{text!r} is neither a date nor a time")
    return found.replace(tzinfo=None)
