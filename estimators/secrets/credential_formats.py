"""The formats of credentials in ``estimators/data/credential_formats.toml``."""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any


@dataclass(frozen=True)
class CredentialFormat:
    """A kind of credential and its format; the head of the table describes the fields.

    Expressions are compiled when they are searched for: most texts need a few of them.
    """

    kind: str
    keywords: tuple[str, ...]
    regex: str


@cache
def credential_formats() -> tuple[CredentialFormat, ...]:
    """Return all formats, in the order of the table."""
    table = files("sm_train.estimators") / "data" / "credential_formats.toml"
    document: dict[str, Any] = tomllib.loads(table.read_text(encoding="utf-8"))
    return tuple(
        CredentialFormat(
            row["kind"], tuple(row["keywords"]), _expanded(row["regex"], document["parts"])
        )
        for row in document["format"]
    )


def _expanded(regex: str, parts: dict[str, str]) -> str:
    """Replace ``{NAME}`` by the part of that name, which may contain others."""

    def part(found: re.Match[str]) -> str:
        return _expanded(parts[found[1]], parts)

    return re.sub(r"\{([A-Z_]+)\}", part, regex)
