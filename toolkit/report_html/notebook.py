"""Small HTML tables and data frames for notebooks."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from sm_train.toolkit.base.extras import require_extra
from sm_train.toolkit.report_html.html_page import render

if TYPE_CHECKING:
    import pandas as pd


def html_table(
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    caption: str = "",
    notes: Sequence[str] = (),
) -> str:
    """Return an HTML table; all text is escaped. ``notes`` are lines below it.

    Columns of figures are aligned right, others left.
    """
    aligned = [_alignment([row[index] for row in rows]) for index in range(len(columns))]
    return render(
        "table.html", columns=columns, rows=rows, aligned=aligned, caption=caption, notes=notes
    )


def _alignment(cells: Sequence[str]) -> str:
    texts = [cell for cell in cells if cell]
    figures = texts and all(re.match(r"[~$<≥−+-]*\d", text) for text in texts)
    return "right" if figures else "left"


def data_frame(rows: Sequence[Mapping[str, Any]]) -> pd.DataFrame:
    """Return a pandas data frame with a row for each mapping.

    Raises:
        UserError: pandas is not installed.
    """
    require_extra("notebook", "pandas", purpose="to_frame()")
    import pandas as pd

    return pd.DataFrame(list(rows))
