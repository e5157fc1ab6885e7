"""Where words go: results for scripts on standard output, the rest on standard error."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console


def write_json(document: Any) -> None:
    """Print one JSON document, and nothing else, on standard output."""
    sys.stdout.write(json.dumps(document, indent=2, allow_nan=False) + "\n")


def stderr_console() -> Console:
    """The console for words to people: standard error."""
    return _console(stderr=True)


def stdout_console() -> Console:
    """The console for a result that a person reads: standard output."""
    return _console(stderr=False)


@contextmanager
def bytes_bar(doing: str) -> Iterator[Callable[[int, int], None]]:
    """A function that shows how many bytes of all are done: a bar on a terminal, else nothing.

    The bar comes with the first figure: where nothing has to be done, none is drawn.
    """
    if not sys.stderr.isatty():
        yield lambda done, total: None
        return
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    bar = Progress(
        TextColumn(doing),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
        console=stderr_console(),
        transient=True,
    )
    task = bar.add_task("", total=None)

    def show(done: int, total: int) -> None:
        bar.start()
        bar.update(task, completed=done, total=total)

    try:
        yield show
    finally:
        bar.stop()


def _console(*, stderr: bool) -> Console:
    """Colours only on a terminal without NO_COLOR; elsewhere lines of at most 100 columns."""
    from rich.console import Console

    terminal = (sys.stderr if stderr else sys.stdout).isatty()
    return Console(stderr=stderr, highlight=False, width=None if terminal else 100)
