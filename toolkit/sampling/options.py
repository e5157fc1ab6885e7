"""The options of every command that draws from a checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

_OPTIONS = (
    click.option(
        "--prompts",
        type=click.Path(path_type=Path),
        required=True,
        help="Text file, one a line, or a TSV with a column Prompt.",
    ),
    click.option("--steps", type=click.IntRange(1, 1000), default=50, show_default=True),
    click.option("--guidance", type=click.FloatRange(0, 100), default=5.0, show_default=True),
    click.option("--seed", type=int, default=0, show_default=True),
)


def drawing_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """What is drawn, in how many steps, with which guidance and noise."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command
