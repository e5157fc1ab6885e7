"""Defines findings, and the checks that produce them and document them in ``docs/checks.md``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Level = Literal["error", "warning", "info"]

LEVELS: tuple[Level, ...] = ("error", "warning", "info")
"""Most severe first: with an error a job would fail or be rejected."""


@dataclass(frozen=True)
class Finding:
    """One problem: ``where`` is a key of the run file, ``fix`` says what to change."""

    level: Level
    code: str
    where: str
    message: str
    fix: str


@dataclass(frozen=True)
class Check:
    """A code and its page. Findings are only created by :meth:`found`, so each has a page.

    ``means``, ``impact`` and ``fix`` are Markdown; ``source`` is the supporting document with its
    date.
    """

    code: str
    levels: tuple[Level, ...]
    means: str
    impact: str
    fix: str
    source: str = ""

    def found(self, level: Level, where: str, message: str, fix: str) -> Finding:
        """Create a finding with this check's code; ``level`` must be a documented one."""
        assert level in self.levels, f"{self.code} is documented as {self.levels}, not {level}"
        return Finding(level, self.code, where, message, fix)
