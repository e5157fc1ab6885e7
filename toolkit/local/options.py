"""The options of every command that emulates instances on this machine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

_OPTIONS = (
    click.option("--nodes", type=click.IntRange(1), help="--local: emulated instances."),
    click.option(
        "--processes",
        type=click.IntRange(1),
        default=1,
        show_default=True,
        help="--local: processes on each emulated instance.",
    ),
)


def local_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """How many instances, with how many processes each."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command
