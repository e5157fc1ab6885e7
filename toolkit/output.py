"""Where words go: results for scripts on standard output, the rest on standard error."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console


def write_json(document: Any) -> None:
    """Print one JSON document, and nothing else, on standard output."""
    sys.stdout.write(json.dumps(document, indent=2, allow_nan=False) + "\n")


def people() -> Console:
    """The console for words to people: standard error."""
    return _console(stderr=True)


def result() -> Console:
    """The console for a result that a person reads: standard output."""
    return _console(stderr=False)


def _console(*, stderr: bool) -> Console:
    """Colours only on a terminal without NO_COLOR; elsewhere lines of at most 100 columns."""
    from rich.console import Console

    terminal = (sys.stderr if stderr else sys.stdout).isatty()
    return Console(stderr=stderr, highlight=False, width=None if terminal else 100)
