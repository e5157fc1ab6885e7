"""Derives JSON documents from records: dataclasses, whose fields are the keys."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any, get_type_hints

INLINE = {"inline": True}
"""Metadata of a field whose own fields are keys of the record around it."""


def record_document(record: Any) -> dict[str, Any]:
    """Return a record, and the records in it, as dictionaries and lists."""
    document: dict[str, Any] = {}
    for field in fields(record):
        value = _plain(getattr(record, field.name))
        document |= value if field.metadata == INLINE else {field.name: value}
    return document


def _plain(value: Any) -> Any:
    if is_dataclass(value):
        return record_document(value)
    if isinstance(value, Mapping):
        return {key: _plain(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(inner) for inner in value]
    return value


def record_keys(kind: Any) -> Iterator[tuple[str, Any]]:
    """Yield the keys of a record's document with their types; also of a typed dictionary."""
    hints = get_type_hints(kind)
    inline = {field.name for field in fields(kind) if field.metadata} if is_dataclass(kind) else ()
    for name, hint in hints.items():
        if name in inline:
            yield from record_keys(hint)
        else:
            yield name, hint
