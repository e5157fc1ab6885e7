"""Console output: results go to standard output, everything else to standard error.

All functions remove terminal control from what they print, because log lines, file names and AWS
responses are from outside.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, Any

import click
from sm_train.toolkit.terminal.formatting import printable
from sm_train.toolkit.terminal.text_table import terminal_width

if TYPE_CHECKING:
    from rich.console import Console


def write_json(document: Any) -> None:
    """Print one JSON document on standard output."""
    sys.stdout.write(json.dumps(document, indent=2, allow_nan=False) + "\n")


def hide_messages() -> None:
    """Print results, warnings and errors only from now on (`--quiet`)."""
    global _messages_hidden
    _messages_hidden = True


def messages_are_hidden() -> bool:
    """Return whether `--quiet` was given."""
    return _messages_hidden


_messages_hidden = False


def note(text: str) -> None:
    """Print a message for the user on standard error, unless `--quiet` was given."""
    if not _messages_hidden:
        sys.stderr.write(f"{printable(text)}\n")


def write_line(text: str, *, err: bool = False) -> None:
    """Print a result on standard output, or a warning on standard error, also with `--quiet`."""
    stream = sys.stderr if err else sys.stdout
    stream.write(f"{printable(text)}\n")
    stream.flush()  # in the order of the lines, also where both streams are one


def write_wrapped(text: str, indent: str = "") -> None:
    """Print a result within the terminal's width; lines of a list's item hang below its text."""
    from textwrap import wrap

    lines = wrap(
        text,
        terminal_width(),
        initial_indent=indent,
        subsequent_indent=indent + ("  " if text.startswith("- ") else ""),
        break_long_words=False,
        break_on_hyphens=False,
    )
    for line in lines:
        write_line(line)


def write_list(title: str, sentences: Sequence[str]) -> None:
    """Print a heading and sentences below it; nothing without any."""
    if sentences:
        click.echo(click.style(title, bold=True))
    for sentence in sentences:
        write_wrapped(f"- {sentence}", "  ")


def stderr_console(*, shows_results: bool = False) -> Console:
    """Return the console for messages and progress: standard error, silent with `--quiet`.

    A command whose results or warnings are on standard error prints them with ``shows_results``.
    """
    console = _console(stderr=True)
    console.quiet = _messages_hidden and not shows_results
    return console


def escaped(text: str) -> str:
    """Return text from outside for use in rich's markup, which it cannot change.

    Rich's own function would leave a bracket that a control character separates from its tag, and
    the text without the character would then be markup.
    """
    from rich.markup import escape

    return escape(printable(text))


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
    """Return a console: colors only on a terminal without NO_COLOR; elsewhere COLUMNS, or 100."""
    terminal = (sys.stderr if stderr else sys.stdout).isatty()
    width = None if terminal else terminal_width()
    return _console_class()(stderr=stderr, highlight=False, width=width)


@cache
def _console_class() -> type[Console]:
    """Return a console that removes control from the text it prints, but not its own control."""
    from rich.console import Console, ConsoleOptions, RenderableType
    from rich.segment import Segment
    from rich.text import Text

    class PrintableConsole(Console):
        def on_broken_pipe(self) -> None:
            raise BrokenPipeError  # the command line exits with 0, rich with 1

        def render_str(self, text: str, **options: Any) -> Text:
            # Before rich: it removes the end of an escape sequence and leaves the rest.
            return super().render_str(printable(text), **options)

        def render(
            self, renderable: RenderableType, options: ConsoleOptions | None = None
        ) -> Iterator[Segment]:
            for segment in super().render(renderable, options):
                if segment.control:
                    yield segment
                else:
                    yield Segment(printable(segment.text), segment.style)

    return PrintableConsole
