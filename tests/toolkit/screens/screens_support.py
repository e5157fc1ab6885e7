"""Helpers of the tests of screens, which other tests use as well."""

from __future__ import annotations

import os
from pathlib import Path

FOLDER = Path(__file__).parent


def compare(name: str, columns: int, text: str) -> None:
    """Compare a screen with its file, or write it with UPDATE_SCREENS."""
    file = FOLDER / str(columns) / f"{name}.txt"
    if os.environ.get("UPDATE_SCREENS"):
        file.parent.mkdir(exist_ok=True)
        file.write_text(text, encoding="utf-8")
    expected = file.read_text(encoding="utf-8") if file.exists() else ""
    assert text == expected, f"{file.relative_to(FOLDER)} differs; `make screens` writes it again"
