"""Options of the commands that emulate instances on this machine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

_OPTIONS = (
    click.option(
        "--nodes", type=click.IntRange(1), help="With --local: number of emulated instances."
    ),
    click.option(
        "--processes",
        type=click.IntRange(1),
        default=1,
        show_default=True,
        help="With --local: processes per emulated instance.",
    ),
)


def local_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add --nodes and --processes to a command."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command
