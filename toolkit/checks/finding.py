"""A finding, and the check that makes it: its code, and what ``docs/checks.md`` says of it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Literal

Level = Literal["error", "warning", "info"]

LEVELS: tuple[Level, ...] = ("error", "warning", "info")
"""The gravest first: with an error a job would fail or be refused."""


@dataclass(frozen=True)
class Finding:
    """One finding; ``where`` is a place in the run file, ``fix`` says what to do."""

    level: Level
    code: str
    where: str
    message: str
    fix: str

    def as_dict(self) -> dict[str, str]:
        return asdict(self)


@dataclass(frozen=True)
class Check:
    """A code with its page. Findings are made by :meth:`found` alone, so none is without one.

    ``means``, ``impact`` and ``fix`` are Markdown; ``source`` is the document that says so, with
    its date.
    """

    code: str
    levels: tuple[Level, ...]
    means: str
    impact: str
    fix: str
    source: str = ""

    def found(self, level: Level, where: str, message: str, fix: str) -> Finding:
        assert level in self.levels, f"{self.code} is documented as {self.levels}, not {level}"
        return Finding(level, self.code, where, message, fix)
