"""Asks before money is spent."""

from __future__ import annotations

import os
import select
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import click
import click.termui
from sm_train.toolkit.base.errors import ExitCode, UserError
from sm_train.toolkit.terminal.console import write_line
from sm_train.toolkit.terminal.formatting import printable

_ANSWERS = {"y": True, "yes": True, "n": False, "no": False, "": False}


def ask(question: str) -> None:
    """Ask a yes/no question; the default is no.

    Raises:
        UserError: the answer was not yes.
        Abort: the input of a terminal ended (Ctrl-D).
    """
    agreed = None
    while agreed is None:
        sys.stderr.write(f"{printable(question)} [y/N]: ")
        sys.stderr.flush()
        line = _read_line()
        if not line:
            sys.stderr.write("\n")
            if _is_terminal():
                raise click.Abort
            raise UserError("not confirmed; --yes starts without asking")
        agreed = _ANSWERS.get(line.strip().lower())
        if agreed is None:
            write_line("Error: answer y or n", err=True)
    if not agreed:
        raise UserError("nothing was started", ExitCode.INTERRUPTED)


def _is_terminal() -> bool:
    return sys.stdin is not None and sys.stdin.isatty()


def _read_line() -> str:
    """Return a line of standard input, empty at its end."""
    if _is_terminal():
        _wait_for_line()
    return sys.stdin.readline() if sys.stdin is not None else ""


@contextmanager
def interruptible_prompts() -> Iterator[None]:
    """Let click's prompts on a terminal wait as :func:`ask` does; Ctrl-C always ends them."""
    read = click.termui.visible_prompt_func

    def read_line(prompt: str = "") -> str:
        if not _is_terminal():
            return read(prompt)
        sys.stderr.write(prompt)
        sys.stderr.flush()
        line = _read_line()
        if not line:
            raise EOFError
        return line.rstrip("\n")

    click.termui.visible_prompt_func = read_line
    try:
        yield
    finally:
        click.termui.visible_prompt_func = read


def _wait_for_line() -> None:
    """Wait until the terminal has a line; Ctrl-C raises KeyboardInterrupt at any moment.

    Python runs a signal's handler between two instructions. Reading alone would lose a signal that
    arrives after the last of them and before the system call: CPython 3.11's ``input`` lost 10 of
    3,000 that came right after the question. The descriptor makes ``select`` return in that case.
    """
    receiver, sender = os.pipe()
    os.set_blocking(sender, False)
    previous = signal.set_wakeup_fd(sender, warn_on_full_buffer=False)
    try:
        while sys.stdin not in select.select([sys.stdin, receiver], [], [])[0]:
            os.read(receiver, 1)
    finally:
        signal.set_wakeup_fd(previous)
        os.close(receiver)
        os.close(sender)
