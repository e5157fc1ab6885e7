"""Read prompts from a text file or from a table in PartiPrompts' format."""

from __future__ import annotations

import csv
from pathlib import Path

from sm_train.toolkit.base.errors import UserError

_COLUMN = "prompt"
"""Column of a tab-separated table, in any case (PartiPrompts has ``Prompt``)."""


def read_prompts(path: Path) -> list[str]:
    """Return the lines of a text file or, if its name ends in ``.tsv``, its column ``Prompt``.

    Raises:
        UserError: the file does not exist, is not text, or has no prompt.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise UserError(f"--prompts: {path}: no such file; write one prompt per line") from None
    except IsADirectoryError:
        raise UserError(f"--prompts: {path}: is a folder; give a text file") from None
    except UnicodeDecodeError as error:
        raise UserError(f"--prompts: {path}: not UTF-8 (byte {error.start})") from None
    lines = _column(path, text) if path.suffix.lower() == ".tsv" else text.splitlines()
    prompts = [line.strip() for line in lines if line.strip()]
    if not prompts:
        raise UserError(f"--prompts: {path}: is empty; write one prompt per line")
    return prompts


def _column(path: Path, text: str) -> list[str]:
    # Quotation marks are part of a prompt, not of the format.
    rows = csv.reader(text.splitlines(), delimiter="\t", quoting=csv.QUOTE_NONE)
    header = [name.strip().lower() for name in next(rows, [])]
    if _COLUMN not in header:
        columns = ", ".join(header) or "nothing"
        raise UserError(f"--prompts: {path}: has no column Prompt, its first line has {columns}")
    index = header.index(_COLUMN)
    return [row[index] for row in rows if len(row) > index]
