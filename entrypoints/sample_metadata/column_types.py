"""The types of the columns of a table that an index keeps for each sample."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, TypeAlias

import pyarrow as pa

ColumnType: TypeAlias = Literal["boolean", "integer", "number", "text"]

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
    "number": pa.float64(),
    "text": pa.string(),
}


def arrow_type(kind: ColumnType) -> pa.DataType:
    """Return the type of a column in an index."""
    return _ARROW[kind]


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
            if not -(2**63) <= value < 2**63:
                raise ValueError(f"{value:,} has more than 64 bits")
            return "integer"
        case float():
            return "number"
        case str():
            return "text"
    raise ValueError("lists" if isinstance(value, list) else "objects")


def common_type(left: ColumnType | None, right: ColumnType | None) -> ColumnType | None:
    """Return the type that holds the values of both, text if nothing else does."""
    if left is None or right is None or left == right:
        return left or right
    return "number" if {left, right} == {"integer", "number"} else "text"


def as_type(value: Any, kind: ColumnType) -> Any:
    """Return a JSON value as a column of this type holds it; None stays None."""
    if value is None:
        return None
    if kind == "number":
        return float(value)
    if kind != "text" or isinstance(value, str):
        return value
    return str(value).lower() if isinstance(value, bool) else str(value)
