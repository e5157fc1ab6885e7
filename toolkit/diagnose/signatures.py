"""Loads and compiles the table of failure signatures, ``signatures.toml``."""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

SignatureRole = Literal["cause", "symptom", "echo", "warning"]
Confidence = Literal["high", "medium", "low"]

AUTOMATON_BYTES = 64 << 20
"""The most memory of RE2 for one automaton; 8 MiB by default, too little for all literals."""

_TABLE = Path(__file__).with_name("signatures.toml")
_STRENGTH: dict[SignatureRole, int] = {"cause": 3, "symptom": 2, "echo": 1, "warning": 0}


@dataclass(frozen=True)
class Signature:
    """One failure and how to recognize it; the head of the table describes each field."""

    code: str
    title: str
    role: SignatureRole
    confidence: Confidence
    retryable: bool
    action: str
    source: str
    literals: tuple[str, ...]
    regex: re.Pattern[str]
    explains: frozenset[str]
    examples: tuple[str, ...]


@cache
def signatures() -> dict[str, Signature]:
    """Return all signatures by code, in the order of the table."""
    with _TABLE.open("rb") as file:
        rows = tomllib.load(file)["signature"]
    parsed = (
        Signature(
            **{key: row[key] for key in ("code", "title", "role", "confidence", "retryable")},
            action=row["action"],
            source=row["source"],
            literals=tuple(row["literals"]),
            regex=re.compile(row["regex"]),
            explains=frozenset(row.get("explains", ())),
            examples=tuple(row["examples"]),
        )
        for row in rows
    )
    return {one.code: one for one in parsed}


@cache
def literals() -> tuple[str, ...]:
    """Return the literals of all signatures: a line without any of them matches no signature."""
    return tuple(dict.fromkeys(text for one in signatures().values() for text in one.literals))


@cache
def _literal_set() -> tuple[Any, list[list[int]]]:
    """Compile all literals to one set, with the table indices of each literal's signatures."""
    import re2

    options = re2.Options()
    options.max_mem = AUTOMATON_BYTES
    literal_set, indices = re2.Set.SearchSet(options), []
    for literal in literals():
        literal_set.Add(re2.escape(literal))
        indices.append(
            [index for index, one in enumerate(signatures().values()) if literal in one.literals]
        )
    literal_set.Compile()
    return literal_set, indices


def matching(text: str) -> list[Signature]:
    """Return the signatures of the strongest role that match ``text``, a line without prefix."""
    literal_set, indices = _literal_set()
    # One RE2 pass finds all literals in the line; only their signatures' regexes are tried.
    candidates = sorted(
        {index for literal in literal_set.Match(text) or () for index in indices[literal]}
    )
    table = list(signatures().values())
    matched = [table[index] for index in candidates if table[index].regex.search(text)]
    strongest = max((_STRENGTH[one.role] for one in matched), default=0)
    return [one for one in matched if _STRENGTH[one.role] == strongest]
