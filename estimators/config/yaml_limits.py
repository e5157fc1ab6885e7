"""Limit the size, depth, aliases and numbers of YAML before it is constructed.

Aliases let a few hundred bytes describe billions of values ("billion laughs"), and deep nesting
exhausts the stack of every recursive function that visits the values.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

import yaml

MAX_BYTES = 2**20
MAX_DEPTH = 50
MAX_NODES = 100_000
"""Values of a document, with every alias counted as the values that it repeats."""
MAX_DIGITS = 40
"""Characters of an integer: Python converts longer ones in quadratic time, or refuses to."""

# YAML 1.1, int: with a prefix for its base, or with colons for base 60.
_INTEGER = re.compile(r"[-+]?(0b[01_]+|0x[0-9A-Fa-f_]+|[0-9][0-9_:]*)")


class YamlLimitError(ValueError):
    """A document exceeds a limit; ``line`` counts from 1."""

    def __init__(self, line: int, message: str) -> None:
        super().__init__(message)
        self.line = line


@dataclass
class _Collection:
    """A mapping or sequence whose end has not been parsed yet."""

    anchor: str | None
    nodes: int = 1


def check_limits(text: str, loader: type[yaml.SafeLoader]) -> None:
    """Parse ``text`` into events, without recursion and without values.

    Raises:
        YamlLimitError: the document is nested too deeply, or has too many or too long values.
        yaml.YAMLError: the text is not YAML.
    """
    anchors = dict[str, int]()
    open_collections = [_Collection(None)]
    for event in _parse(text, loader):
        if isinstance(event, yaml.CollectionStartEvent):
            open_collections.append(_Collection(event.anchor))
            added = 0
        elif isinstance(event, yaml.CollectionEndEvent):
            collection = open_collections.pop()
            added = collection.nodes
            if collection.anchor:
                anchors[collection.anchor] = added
        elif isinstance(event, yaml.AliasEvent):
            # An alias in its own anchor is an endless document; the anchor is not complete yet.
            added = anchors.get(event.anchor or "", MAX_NODES)
        elif isinstance(event, yaml.ScalarEvent):
            added = 1
            if event.anchor:
                anchors[event.anchor] = added
        else:
            continue
        open_collections[-1].nodes += added
        line = event.start_mark.line + 1 if event.start_mark else 1
        if isinstance(event, yaml.ScalarEvent) and _is_long_integer(event):
            raise YamlLimitError(line, f"a number of more than {MAX_DIGITS} digits; quote it")
        if len(open_collections) > MAX_DEPTH:
            raise _too_deep(line)
        if sum(collection.nodes for collection in open_collections) > MAX_NODES:
            raise YamlLimitError(
                line, f"has more than {MAX_NODES:,} values; an alias counts as what it repeats"
            )


def _parse(text: str, loader: type[yaml.SafeLoader]) -> Iterator[yaml.Event]:
    try:
        yield from yaml.parse(text, loader)
    except yaml.MarkedYAMLError as error:
        # The libyaml of PyYAML 6.0.4 has a limit of its own, 1000 levels, which its scanner reports
        # before the parser returns the first of them.
        if error.problem_mark and "maximum nesting depth" in (error.problem or ""):
            raise _too_deep(error.problem_mark.line + 1) from None
        raise


def _too_deep(line: int) -> YamlLimitError:
    return YamlLimitError(line, f"is nested in more than {MAX_DEPTH} levels")


def _is_long_integer(event: yaml.ScalarEvent) -> bool:
    is_plain, _ = event.implicit
    return is_plain and len(event.value) > MAX_DIGITS and bool(_INTEGER.fullmatch(event.value))
