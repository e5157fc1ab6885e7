"""Plain-text tables within the terminal's width, without the import time of rich."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Sequence

WIDTH = 100
"""Columns where the terminal's width is unknown, as in a pipe."""

_NARROWEST, _WIDEST = 60, 120
_GAP = "  "


def terminal_width() -> int:
    """Return the columns to print in: the terminal's (or ``COLUMNS``), from 60 to 120."""
    columns = shutil.get_terminal_size((WIDTH, 24)).columns
    return min(max(columns, _NARROWEST), _WIDEST)


def text_table(
    header: Sequence[str], rows: Sequence[Sequence[str]], *, left: int, width: int = WIDTH
) -> list[str]:
    """Return the lines of a table whose first ``left`` columns are left-aligned, the others right.

    If the table is too wide, the left-aligned columns are wrapped between words, widest first; the
    others, which hold numbers, never are.
    """
    cells = (header, *rows)
    widths = [max(1, *(len(row[index]) for row in cells)) for index in range(len(header))]
    excess = sum(widths) + len(_GAP) * (len(widths) - 1) - width
    for index in sorted(range(left), key=lambda column: -widths[column]):
        reduction = max(0, min(excess, widths[index] - _longest_word(cells, index)))
        widths[index] -= reduction
        excess -= reduction
    return [line for row in cells for line in _lines(row, widths, left)]


def narrowest(header: Sequence[str], rows: Sequence[Sequence[str]], *, left: int) -> int:
    """Return the least width of the table without a broken word."""
    cells = (header, *rows)
    widths = [
        _longest_word(cells, index) if index < left else max(len(row[index]) for row in cells)
        for index in range(len(header))
    ]
    return sum(widths) + len(_GAP) * (len(widths) - 1)


def _longest_word(cells: Sequence[Sequence[str]], index: int) -> int:
    return max(len(word) for row in cells for word in row[index].split() or [" "])


def _lines(row: Sequence[str], widths: Sequence[int], left: int) -> list[str]:
    cells = [
        textwrap.wrap(cell, width, break_on_hyphens=False) or [""] if index < left else [cell]
        for index, (cell, width) in enumerate(zip(row, widths, strict=True))
    ]
    height = max(len(cell) for cell in cells)
    lines = []
    for level in range(height):
        parts = [cell[level] if level < len(cell) else "" for cell in cells]
        aligned = [
            part.ljust(width) if index < left else part.rjust(width)
            for index, (part, width) in enumerate(zip(parts, widths, strict=True))
        ]
        lines.append(_GAP.join(aligned).rstrip())
    return lines
