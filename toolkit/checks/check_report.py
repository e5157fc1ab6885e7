"""Presents findings: as JSON for scripts, as a table or lines for users."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, TypedDict

from sm_train.toolkit.checks.finding import LEVELS, Finding, Level

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

_STYLES = {"error": "bold red", "warning": "yellow", "info": "dim"}


class FindingDocument(TypedDict):
    """A finding in ``check --json``."""

    level: Level
    code: str
    where: str
    message: str
    fix: str


class CheckDocument(TypedDict):
    """The document of ``check --json``; ``ok`` is true if there is no error."""

    ok: bool
    findings: list[FindingDocument]


def is_ok(findings: Sequence[Finding]) -> bool:
    """Return whether no finding is an error."""
    return not any(one.level == "error" for one in findings)


def document(findings: Sequence[Finding]) -> CheckDocument:
    """Return the document of ``check --json``."""
    return {
        "ok": is_ok(findings),
        "findings": [
            {
                "level": one.level,
                "code": one.code,
                "where": one.where,
                "message": one.message,
                "fix": one.fix,
            }
            for one in findings
        ],
    }


def show(findings: Sequence[Finding], console: Console) -> None:
    """Print a table on a terminal, otherwise one line per finding."""
    if console.is_terminal:
        if findings:
            console.print(_table(findings))
    else:
        for one in findings:
            line = f"{one.level:<8} {one.code:<22} {one.where}: {one.message}; {one.fix}"
            console.print(line, markup=False, soft_wrap=True)
    verdict = "ok" if is_ok(findings) else "not ok: the errors above would make a job fail"
    console.print(f"{verdict} ({_counts(findings)})", soft_wrap=True)


def _counts(findings: Sequence[Finding]) -> str:
    counts = {level: sum(one.level == level for one in findings) for level in LEVELS}
    return ", ".join(
        f"{count} {level}{'s' if count != 1 and level != 'info' else ''}"
        for level, count in counts.items()
    )


def _table(findings: Sequence[Finding]) -> Table:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 1, 0))
    for one in findings:
        cell = Text.assemble(
            (one.code, "bold"), f"  {one.where}\n{one.message}\n", (f"fix: {one.fix}", "italic")
        )
        table.add_row(Text(one.level, _STYLES[one.level]), cell)
    return table
