"""Presents findings: as JSON for scripts, as a table or lines for users."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, TypedDict

from sm_train.toolkit.checks.finding import LEVELS, Finding, Level
from sm_train.toolkit.terminal.rich_table import rich_table

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
    return not any(finding.level == "error" for finding in findings)


def document(findings: Sequence[Finding]) -> CheckDocument:
    """Return the document of ``check --json``."""
    return {
        "ok": is_ok(findings),
        "findings": [
            {
                "level": finding.level,
                "code": finding.code,
                "where": finding.where,
                "message": finding.message,
                "fix": finding.fix,
            }
            for finding in findings
        ],
    }


def show(findings: Sequence[Finding], console: Console) -> None:
    """Print a table on a terminal, otherwise one line per finding."""
    if console.is_terminal:
        if findings:
            console.print(_table(findings))
    else:
        for finding in findings:
            what = f"{finding.where}: {finding.message}; {finding.fix}"
            line = f"{finding.level:<8} {finding.code:<22} {what}"
            console.print(line, markup=False, soft_wrap=True)
    verdict = "ok" if is_ok(findings) else "not ok: the errors above would make a job fail"
    console.print(f"{verdict} ({_counts(findings)})", soft_wrap=True)


def _counts(findings: Sequence[Finding]) -> str:
    counts = {level: sum(finding.level == level for finding in findings) for level in LEVELS}
    return ", ".join(
        f"{count} {level}{'s' if count != 1 and level != 'info' else ''}"
        for level, count in counts.items()
    )


def _table(findings: Sequence[Finding]) -> Table:
    from rich.text import Text

    table = rich_table(below=1)
    for finding in findings:
        cell = Text.assemble(
            (finding.code, "bold"),
            f"  {finding.where}\n{finding.message}\n",
            (f"fix: {finding.fix}", "italic"),
        )
        table.add_row(Text(finding.level, _STYLES[finding.level]), cell)
    return table
