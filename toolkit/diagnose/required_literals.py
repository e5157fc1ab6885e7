"""Derives plain text that every match of a regular expression contains, to search for it first.

The method is that of code search engines (Cox, "Regular Expression Matching with a Trigram Index",
2012): a sequence of characters is followed as long as it stands for few different strings, and the
longest such part of the expression is required.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Sequence
from re import _constants as ops  # type: ignore[attr-defined]
from re import _parser as parser  # type: ignore[attr-defined]
from typing import Any

_MAX_STRINGS = 64
"""Most strings that a part of an expression may stand for."""
_MAX_CLASS = 4
"""Largest class of characters, as ``[Ee]``, whose members are tried one by one."""
_ENOUGH = 8
"""A longer literal is no better: fewer strings are then preferred."""

_Strings = frozenset[str]


def required_literals(pattern: str) -> _Strings:
    """Return literals of which every match of ``pattern`` contains at least one.

    Raises:
        ValueError: a match needs no fixed text of two characters or more.
    """
    best = _best(_parts(parser.parse(pattern)))
    if best is None or min(map(len, best)) < 2:
        raise ValueError(f"{pattern}: has no text that every match contains")
    return best


def _parts(items: Iterable[tuple[Any, Any]]) -> list[_Strings]:
    """Return the sets of strings of which every match of a sequence contains one of each."""
    found: list[_Strings] = []
    run: _Strings = frozenset({""})
    for operator, argument in items:
        exact = _exact([(operator, argument)])
        longer = None if exact is None else _joined(run, exact)
        if longer is not None:
            run = longer
            continue
        found.append(run)
        run = frozenset({""}) if exact is None else exact
        found += _inner(operator, argument)
    found.append(run)
    return found


def _inner(operator: Any, argument: Any) -> list[_Strings]:
    """Return what every match of one part contains."""
    if operator is ops.SUBPATTERN and not argument[1] & re.IGNORECASE:
        return _parts(argument[3])
    if operator in (ops.MAX_REPEAT, ops.MIN_REPEAT) and argument[0] >= 1:
        return _parts(argument[2])
    if operator is ops.BRANCH:
        branches = [_best(_parts(branch)) for branch in argument[1]]
        if all(branches):
            return [frozenset(itertools.chain.from_iterable(one for one in branches if one))]
    return []


def _exact(items: Sequence[tuple[Any, Any]]) -> _Strings | None:
    """Return all strings that ``items`` match, None if there are too many."""
    strings: _Strings | None = frozenset({""})
    for operator, argument in items:
        part: _Strings | None = None
        if operator is ops.LITERAL:
            part = frozenset({chr(argument)})
        elif operator in (ops.AT, ops.ASSERT, ops.ASSERT_NOT):
            part = frozenset({""})
        elif operator is ops.IN and len(argument) <= _MAX_CLASS:
            if all(kind is ops.LITERAL for kind, _ in argument):
                part = frozenset(chr(code) for _, code in argument)
        elif operator is ops.SUBPATTERN and not argument[1] & re.IGNORECASE:
            part = _exact(argument[3])
        elif operator is ops.BRANCH:
            branches = [_exact(branch) for branch in argument[1]]
            if all(one is not None for one in branches):
                part = frozenset(itertools.chain.from_iterable(one or () for one in branches))
        elif operator in (ops.MAX_REPEAT, ops.MIN_REPEAT) and argument[1] == 1:
            inner = _exact(argument[2])
            part = None if inner is None else inner | {""}
        if part is None or strings is None:
            return None
        strings = _joined(strings, part)
    return strings


def _joined(before: _Strings, after: _Strings) -> _Strings | None:
    if len(before) * len(after) > _MAX_STRINGS:
        return None
    return frozenset(one + two for one, two in itertools.product(before, after))


def _best(parts: Iterable[_Strings]) -> _Strings | None:
    """Return the part whose shortest string is longest; None if none has text."""
    useful = [part for part in parts if part and min(map(len, part)) > 0]
    return max(useful, key=lambda part: (min(_ENOUGH, *map(len, part)), -len(part)), default=None)
