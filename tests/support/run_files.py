"""Writes run files for tests of the command line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from tests.support.run_documents import run


def write_run(folder: Path, **changes: Any) -> Path:
    """Write ``folder/run.yaml`` and return its path."""
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(run(**changes)))
    return path


def one_line(text: str) -> str:
    """Return the only error line of a command's standard error; fail on a traceback."""
    [line] = [line for line in text.splitlines() if line.startswith("sm-train: ")]
    assert "Traceback" not in text
    return line
