"""Options that several commands share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click

Command = Callable[..., Any]

_SAMPLING = (
    click.option(
        "--prompts",
        type=click.Path(path_type=Path),
        required=True,
        help="Text file with one prompt per line, or a TSV with a column Prompt.",
    ),
    click.option(
        "--steps",
        type=click.IntRange(1, 1000),
        default=50,
        show_default=True,
        help="Inference steps of the scheduler.",
    ),
    click.option(
        "--guidance",
        type=click.FloatRange(0, 100),
        default=5.0,
        show_default=True,
        help="Scale of classifier-free guidance; 1 disables it.",
    ),
    click.option(
        "--seed", type=int, default=0, show_default=True, help="Seed of the images' noise."
    ),
)

_LOCAL = (
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


def sampling_options(command: Command) -> Command:
    """Add --prompts, --steps, --guidance and --seed to a command that samples images."""
    return _add(_SAMPLING, command)


def local_options(command: Command) -> Command:
    """Add --nodes and --processes to a command that emulates instances on this machine."""
    return _add(_LOCAL, command)


def _add(options: Sequence[Callable[[Command], Command]], command: Command) -> Command:
    # Decorators apply from the last one on; --help lists the options in their order here.
    for option in reversed(options):
        command = option(command)
    return command
