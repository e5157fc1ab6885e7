"""Console output: results go to standard output, everything else to standard error."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console


def write_json(document: Any) -> None:
    """Print one JSON document on standard output."""
    sys.stdout.write(json.dumps(document, indent=2, allow_nan=False) + "\n")


def stderr_console() -> Console:
    """Return the console for messages: standard error."""
    return _console(stderr=True)


def stdout_console() -> Console:
    """Return the console for human-readable results: standard output."""
    return _console(stderr=False)


@contextmanager
def bytes_bar(label: str) -> Iterator[Callable[[int, int], None]]:
    """Yield a progress callback ``(bytes_done, bytes_total)`` that draws a bar on a terminal.

    The bar appears with the first call, so without work none is drawn.
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
        TextColumn(label),
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
    """Return a console: colors only on a terminal without NO_COLOR, otherwise 100 columns."""
    from rich.console import Console

    terminal = (sys.stderr if stderr else sys.stdout).isatty()
    return Console(stderr=stderr, highlight=False, width=None if terminal else 100)
