"""Findings as a script reads them, and as a person does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from sm_train.toolkit.checks.finding import LEVELS, Finding

if TYPE_CHECKING:
    from rich.console import Console

_STYLES = {"error": "bold red", "warning": "yellow", "info": "dim"}


def is_ok(findings: Sequence[Finding]) -> bool:
    """Whether nothing that was found would cost a job."""
    return not any(one.level == "error" for one in findings)


def document(findings: Sequence[Finding]) -> dict[str, Any]:
    """The contract of ``check --json``."""
    return {"ok": is_ok(findings), "findings": [one.as_dict() for one in findings]}


def show(findings: Sequence[Finding], console: Console) -> None:
    """A table on a terminal; a line for each finding elsewhere."""
    if console.is_terminal:
        if findings:
            console.print(_table(findings))
    else:
        for one in findings:
            line = f"{one.level:<8} {one.code:<22} {one.where}: {one.message}; {one.fix}"
            console.print(line, markup=False, soft_wrap=True)
    verdict = "ok" if is_ok(findings) else "not ok: errors above would cost a job"
    console.print(f"{verdict} ({_counted(findings)})", soft_wrap=True)


def _counted(findings: Sequence[Finding]) -> str:
    counts = {level: sum(one.level == level for one in findings) for level in LEVELS}
    return ", ".join(
        f"{count} {level}{'s' if count != 1 and level != 'info' else ''}"
        for level, count in counts.items()
    )


def _table(findings: Sequence[Finding]) -> Any:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 1, 0))
    for one in findings:
        cell = Text.assemble(
            (one.code, "bold"), f"  {one.where}\n{one.message}\n", (f"→ {one.fix}", "italic")
        )
        table.add_row(Text(one.level, _STYLES[one.level]), cell)
    return table
