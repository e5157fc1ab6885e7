"""Plain-text tables of at most 100 columns, without the import time of rich."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

WIDTH = 100
_GAP = "  "


def text_table(header: Sequence[str], rows: Sequence[Sequence[str]], *, left: int) -> list[str]:
    """Return the lines of a table whose first ``left`` columns are left-aligned, the others right.

    If the table is too wide, the left-aligned columns are wrapped, widest first; the others, which
    hold numbers, never are.
    """
    widths = [max(1, *(len(row[index]) for row in (header, *rows))) for index in range(len(header))]
    excess = sum(widths) + len(_GAP) * (len(widths) - 1) - WIDTH
    for index in sorted(range(left), key=lambda column: -widths[column]):
        reduction = max(0, min(excess, widths[index] - 8))
        widths[index] -= reduction
        excess -= reduction
    return [line for row in (header, *rows) for line in _lines(row, widths, left)]


def _lines(row: Sequence[str], widths: Sequence[int], left: int) -> list[str]:
    cells = [
        textwrap.wrap(cell, width) or [""] if index < left else [cell]
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
