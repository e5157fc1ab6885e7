"""The result of the preflight checks as a value."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from sm_train.toolkit.base.errors import PreflightError
from sm_train.toolkit.checks.check_report import is_ok
from sm_train.toolkit.checks.finding import LEVELS, Finding
from sm_train.toolkit.report_html.notebook import data_frame, html_table

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True, repr=False)
class Checks:
    """The findings of the preflight checks, most severe first.

    A finding has a ``level`` ("error", "warning", "info"), a ``code`` that docs/checks.md
    describes, ``where`` (the key of the run file), a ``message`` and a ``fix``.
    """

    findings: tuple[Finding, ...]

    @property
    def ok(self) -> bool:
        """Whether there is no error: a job would start and could succeed."""
        return is_ok(self.findings)

    @property
    def errors(self) -> tuple[Finding, ...]:
        """The findings that would make a job fail or be rejected."""
        return tuple(finding for finding in self.findings if finding.level == "error")

    def require_ok(self) -> None:
        """Raise the errors, if there are any.

        Raises:
            PreflightError: there is an error; the message has one line for each.
        """
        if not self.ok:
            lines = [f"{error.where}: {error.message}; {error.fix}" for error in self.errors]
            raise PreflightError("\n".join(lines))

    def to_frame(self) -> pd.DataFrame:
        """Return a data frame with one row for each finding.

        Raises:
            Error: pandas is not installed (the extra ``notebook``).
        """
        return data_frame([asdict(finding) for finding in self.findings])

    def __repr__(self) -> str:
        counts = {
            level: sum(finding.level == level for finding in self.findings) for level in LEVELS
        }
        found = ", ".join(_count(level, number) for level, number in counts.items() if number)
        return f"Checks({'ok' if self.ok else 'not ok'}{f': {found}' if found else ''})"

    def _repr_html_(self) -> str:
        rows = [
            [finding.code, finding.level, finding.where, finding.message, finding.fix]
            for finding in self.findings
        ]
        return html_table(("code", "level", "where", "message", "fix"), rows, caption=repr(self))


def _count(level: str, number: int) -> str:
    plural = "s" if number != 1 and level != "info" else ""
    return f"{number} {level}{plural}"
