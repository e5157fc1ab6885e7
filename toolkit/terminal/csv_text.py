"""CSV that a spreadsheet displays and does not execute."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Mapping, Sequence

from sm_train.toolkit.terminal.printable import printable

# OWASP, "CSV Injection": spreadsheets evaluate a cell that starts with one of these characters.
_FORMULA_STARTS = ("=", "+", "-", "@", "\t", "\r")


def format_csv(columns: Sequence[str], rows: Iterable[Mapping[str, object]]) -> str:
    """Return ``rows`` as CSV with a header; a missing value is empty, other keys are left out.

    Text that a spreadsheet would take for a formula starts with an apostrophe. Numbers stay.
    """
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, "", extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows({name: _cell(value) for name, value in row.items()} for row in rows)
    return text.getvalue()


def _cell(value: object) -> object:
    if not isinstance(value, str):
        return value
    quote = "'" if value.startswith(_FORMULA_STARTS) else ""
    return quote + printable(value)
