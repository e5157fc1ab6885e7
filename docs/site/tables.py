"""Markdown tables."""

from __future__ import annotations

from collections.abc import Iterable


def code(text: object) -> str:
    """Return inline code, also for text that contains backticks."""
    shown = str(text)
    fence = "``" if "`" in shown else "`"
    return f"{fence}{shown}{fence}"


def row(*cells: str) -> str:
    """Return one row; line ends become spaces, and bars are escaped."""
    clean = (" ".join(cell.split()).replace("|", "\\|") for cell in cells)
    return f"| {' | '.join(clean)} |\n"


def table(heads: Iterable[str], rows: Iterable[str]) -> str:
    """Return a table with its head."""
    names = list(heads)
    return row(*names) + row(*("---" for _ in names)) + "".join(rows)
