"""Options that several commands share. They import only click, like every command."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

_LOCAL_OPTIONS = (
    click.option(
        "--nodes", type=click.IntRange(1), metavar="N", help="--local: number of emulated nodes."
    ),
    click.option(
        "--processes",
        type=click.IntRange(1),
        metavar="N",
        default=1,
        show_default=True,
        help="--local: processes on each emulated node.",
    ),
)

_SAMPLING_OPTIONS = (
    click.option(
        "--prompts",
        type=click.Path(path_type=Path),
        metavar="FILE",
        required=True,
        help="Text file with one prompt a line, or a TSV with a column Prompt.",
    ),
    click.option(
        "--steps",
        type=click.IntRange(1, 999),
        metavar="N",
        default=50,
        show_default=True,
        help="Sampling steps.",
    ),
    click.option(
        "--guidance",
        type=click.FloatRange(0, 100),
        metavar="X",
        default=5.0,
        show_default=True,
        help="Scale of classifier-free guidance.",
    ),
    click.option(
        "--seed", type=int, metavar="N", default=0, show_default=True, help="Seed of the noise."
    ),
)


def local_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options of commands that emulate a cluster on this machine."""
    return _add(_LOCAL_OPTIONS, command)


def sampling_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options of commands that sample images from a checkpoint."""
    return _add(_SAMPLING_OPTIONS, command)


def _add(
    options: tuple[Callable[..., Any], ...], command: Callable[..., Any]
) -> Callable[..., Any]:
    for option in reversed(options):
        command = option(command)
    return command
