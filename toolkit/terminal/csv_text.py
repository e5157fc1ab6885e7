"""CSV that a spreadsheet displays and does not execute."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from sm_train.toolkit.terminal.formatting import printable

# OWASP, "CSV Injection" (2026-11): spreadsheets evaluate a cell that starts with one of these
# characters, some also after spaces and in their full-width form.
_FORMULA = re.compile(r"\s*[=+@\-\uff1d\uff0b\uff0d\uff20]|[\t\r]")
# In some countries spreadsheets separate cells at semicolons, and some guess the separator.
_SEPARATOR = re.compile(r"[,;|\t\n\"]")


def format_csv(columns: Sequence[str], rows: Iterable[Mapping[str, object]]) -> str:
    """Return ``rows`` as CSV with a header; a missing value is empty, other keys are left out.

    Text that a spreadsheet would take for a formula starts with an apostrophe. Numbers stay.
    """
    lines = [columns, *([row.get(name) for name in columns] for row in rows)]
    return "".join(f"{','.join(map(_cell, line))}\n" for line in lines)


def _cell(value: object) -> str:
    if not isinstance(value, str):
        return "" if value is None else str(value)
    text = printable(value)
    # The text after removed controls may be a formula as well.
    if _FORMULA.match(value) or _FORMULA.match(text):
        text = f"'{text}"
    if _SEPARATOR.search(text):
        text = text.replace('"', '""')
        return f'"{text}"'
    return text
