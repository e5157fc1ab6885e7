"""Puts values of wrong types and ranges into every field of a stored record."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any

WRONG = ("a text", -3, 1e999, float("nan"), True, None, [], {}, [1], {"a": 1}, 2**70)


def leaves(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path of each value that is no object or list, and of each object and list."""
    yield path
    items = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    )
    for key, item in items:
        yield from leaves(item, (*path, key))


def with_value(document: Any, path: tuple[Any, ...], value: Any) -> Any:
    copy = json.loads(json.dumps(document))
    if not path:
        return value
    place = copy
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    return copy


def shape(value: Any) -> Any:
    """Return the types in a value, by which a program uses it; a number may be whole."""
    if isinstance(value, dict):
        return {name: shape(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [shape(item) for item in value]
    if isinstance(value, int | float) and not isinstance(value, bool):
        return "number"
    return type(value).__name__


def require_checked(
    document: Any, read: Callable[[Any], Any], error: type[Exception], per_field: int = 3
) -> None:
    """Require that a reader refuses wrong values in one line, or returns what has the valid types.

    At least ``per_field`` of the wrong values of a field are refused, on average.
    """
    valid = shape(plain(read(document)))
    refused = 0
    for path in leaves(document):
        for value in WRONG:
            found = outcome(read, with_value(document, path, value), error)
            if isinstance(found, str):
                assert "\n" not in found
                refused += 1
            else:
                require_shape(shape(plain(found)), valid)
    assert refused > per_field * len(list(leaves(document)))


def outcome(read: Callable[[Any], Any], document: Any, error: type[Exception]) -> Any:
    """Return what a reader returns, or the text of its error."""
    try:
        return read(document)
    except error as refusal:
        return str(refusal)


def plain(found: Any) -> Any:
    if isinstance(found, dict):
        return found
    return [asdict(item) for item in found] if isinstance(found, tuple) else asdict(found)


def require_shape(found: Any, valid: Any) -> None:
    """Require that each value has its type, or is None; lists may be empty."""
    if isinstance(valid, dict) and isinstance(found, dict):
        for name in found.keys() & valid.keys():
            require_shape(found[name], valid[name])
    elif isinstance(valid, list) and isinstance(found, list):
        for item in found:
            require_shape(item, valid[0])
    else:
        assert found in (valid, "NoneType")
