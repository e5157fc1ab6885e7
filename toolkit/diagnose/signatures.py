"""What failures of training jobs say: the table ``signatures.toml``, compiled."""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

Role = Literal["cause", "symptom", "echo", "warning"]
Confidence = Literal["high", "medium", "low"]

_TABLE = Path(__file__).with_name("signatures.toml")
_STRENGTH: dict[Role, int] = {"cause": 3, "symptom": 2, "echo": 1, "warning": 0}


@dataclass(frozen=True)
class Signature:
    """One way to fail; the table's head says what each field means."""

    code: str
    title: str
    role: Role
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
    """Every signature by its code, in the table's order."""
    with _TABLE.open("rb") as file:
        rows = tomllib.load(file)["signature"]
    found = (
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
    return {one.code: one for one in found}


@cache
def literals() -> tuple[str, ...]:
    """The texts of which a line must hold one to match any signature."""
    return tuple(dict.fromkeys(text for one in signatures().values() for text in one.literals))


@cache
def _literal_set() -> tuple[Any, list[list[int]]]:
    """All literals as one set, and for each the places of its signatures in the table."""
    import re2

    holds, owners = re2.Set.SearchSet(), []
    for literal in literals():
        holds.Add(re2.escape(literal))
        owners.append(
            [place for place, one in enumerate(signatures().values()) if literal in one.literals]
        )
    holds.Compile()
    return holds, owners


def matching(text: str) -> list[Signature]:
    """The signatures of the strongest role that ``text``, a message without prefix, matches."""
    holds, owners = _literal_set()
    asked = sorted({one for literal in holds.Match(text) or () for one in owners[literal]})
    table = list(signatures().values())
    found = [table[one] for one in asked if table[one].regex.search(text)]
    strongest = max((_STRENGTH[one.role] for one in found), default=0)
    return [one for one in found if _STRENGTH[one.role] == strongest]
