"""Tables of commands that have time to import rich; the others use ``text_table``."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.table import Table


def rich_table(
    header: Sequence[str] = (),
    *,
    right: Collection[str] = (),
    gap: int = 2,
    below: int = 0,
    wrap: bool = True,
    title: str | None = None,
) -> Table:
    """Return a table without lines, to which the caller adds rows.

    ``right`` are the columns that are aligned right, ``gap`` the spaces after a column and
    ``below`` the empty lines after a row. Cells are shortened unless ``wrap``. A table without
    header has the columns of its rows.
    """
    from rich.table import Table

    table = Table(
        box=None,
        pad_edge=False,
        show_header=bool(header),
        header_style="bold",
        padding=(0, gap, below, 0),
        title=title,
        title_justify="left",
    )
    for name in header:
        table.add_column(name, justify="right" if name in right else "left", no_wrap=not wrap)
    return table
