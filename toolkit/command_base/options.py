"""Options that several commands share. They import only click, like every command."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
from sm_train.toolkit.base.errors import UserError


class InputFile(click.Path):
    """A file or a pipe that is read into memory.

    A device such as /dev/zero never ends, so it is refused, as is a file over ``MAX_BYTES``.
    """

    MAX_BYTES = 2**29

    def __init__(self) -> None:
        super().__init__(path_type=Path, dir_okay=False)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        path: Path = super().convert(value, param, ctx)  # type: ignore[assignment]
        if path.is_char_device() or path.is_block_device():
            self.fail(f"{value} is a device; name a file", param, ctx)
        if path.is_file() and path.stat().st_size > self.MAX_BYTES:
            self.fail(f"{value}: more than 512 MiB; name another file", param, ctx)
        return path


class RunFile(click.Path):
    """The path of a run file.

    An address in S3, the folder of a run and other folders are refused by what they are.
    """

    def __init__(self) -> None:
        super().__init__(path_type=Path)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        text = str(value)
        if text.startswith("s3://"):
            raise UserError(f"{text}: is an address in S3; name a run file")
        if Path(text).is_dir():
            raise UserError(f"{text}: is a folder; name a run file")
        return Path(text)


set_option = click.option(
    "--set", "changes", multiple=True, metavar="A.B=C", help="Override a value of the run file."
)

TARGETS = ("trainjob", "pytorchjob", "hyperpod-eks", "slurm")
"""What a manifest may be for."""

TARGETS_BY_NAME = {"kubernetes": "trainjob"} | {name: name for name in TARGETS}
"""The names of the option --to → what a manifest is for."""

ACCEPT_COMPONENTS = "model.accept_components=true"
"""The setting of the option."""

accept_components_option = click.option(
    "--accept-components",
    is_flag=True,
    help="Continue although model.components holds other tensors than the run was trained with.",
)

unproven_option = click.option(
    "--unproven",
    is_flag=True,
    help="Start on SageMaker for more than $1,000 where no job or canary of the last 90 days has "
    "run.",
)

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
        type=InputFile(),
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
    return add_options(_LOCAL_OPTIONS, command)


def sampling_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options of commands that sample images from a checkpoint."""
    return add_options(_SAMPLING_OPTIONS, command)


def add_options(
    options: tuple[Callable[..., Any], ...], command: Callable[..., Any]
) -> Callable[..., Any]:
    """Add options to a command, in this order."""
    for option in reversed(options):
        command = option(command)
    return command
