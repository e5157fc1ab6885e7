"""Options that several commands share. They import only click, like every command."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from sm_train.entrypoints.common.job_config import ColorPolicy
from sm_train.toolkit.errors import UserError
from sm_train.toolkit.run_file import load

if TYPE_CHECKING:
    from sm_train.cost.prices import PriceTable
    from sm_train.estimators.config.schema import RunConfig
    from sm_train.toolkit.processing.start_processing import ProcessingOptions


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
    return _add(_LOCAL_OPTIONS, command)


def sampling_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options of commands that sample images from a checkpoint."""
    return _add(_SAMPLING_OPTIONS, command)


_PROCESSING_NAMES = ("dry_run", "yes", "instance")
"""Options that mean something on SageMaker Processing only."""


_COLOR_OPTIONS = (
    click.option(
        "--icc-profile",
        type=click.Choice(["srgb", "ignore"]),
        help="srgb: convert the colors of images with a profile to sRGB. ignore: take their pixels "
        "as stored. By default data.icc_profile of RUN, or srgb without --for.",
    ),
    click.option(
        "--hdr",
        type=click.Choice(["reject", "keep"]),
        help="reject: leave out HDR images (PQ and HLG). keep: take their pixels as stored. By "
        "default data.hdr of RUN, or reject without --for.",
    ),
)


def color_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options of commands that decode images (:class:`ColorPolicy`)."""
    return _add(_COLOR_OPTIONS, command)


def color_arguments(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the color policy that the options state, or else the run file of --for.

    Raises:
        UserError: the run file is invalid.
    """
    data = None if arguments["run"] is None else load(arguments["run"]).data
    default = ColorPolicy() if data is None else data.job_config().color
    return {name: arguments[name] or value for name, value in vars(default).items()}


_DRY_RUN = "Requires --on sagemaker. Show the request without sending it."


def processing_options(
    verb: str, default_instance: str, dry_run: str = _DRY_RUN
) -> Callable[..., Any]:
    """Return a decorator that adds the options of a command that also runs on Processing.

    ``verb`` says what it does there, ``default_instance`` on what, and ``dry_run`` is the help of
    that option.
    """
    options = (
        click.option(
            "--on",
            type=click.Choice(["sagemaker"]),
            help=f"{verb} on SageMaker Processing; requires --for.",
        ),
        click.option(
            "--instances",
            metavar="N",
            type=click.IntRange(min=1),
            default=1,
            help="Requires --on sagemaker. Number of Processing instances.",
        ),
        click.option(
            "--instance",
            metavar="TYPE",
            help=f"Requires --on sagemaker. Instance type; by default {default_instance}.",
        ),
        click.option("--dry-run", is_flag=True, help=dry_run),
        click.option(
            "--yes", is_flag=True, help="Requires --on sagemaker. Do not ask for confirmation."
        ),
    )
    return lambda command: _add(options, command)


def require_local(
    arguments: Mapping[str, Any], *more: str, except_for: Collection[str] = ()
) -> None:
    """Require that no option of Processing, nor one of ``more``, is given without --on sagemaker.

    Those of ``except_for`` mean something without it.

    Raises:
        UserError: one is.
    """
    for name in (*_PROCESSING_NAMES, *more):
        if arguments[name] and name not in except_for:
            raise UserError(f"--{name.replace('_', '-')}: requires --on sagemaker")


def read_processing(
    options: Mapping[str, Any], arguments: Mapping[str, Any]
) -> tuple[RunConfig, ProcessingOptions, PriceTable, str]:
    """Return the run file of a Processing job, its options, the prices and the region.

    Raises:
        UserError: there is no run file, or it is invalid.
    """
    from sm_train.toolkit.aws.session import resolve_region
    from sm_train.toolkit.costing.price_table import price_table
    from sm_train.toolkit.processing.start_processing import ProcessingOptions

    if arguments["run"] is None:
        raise UserError(
            "--on: requires --for RUN, a run file with the role, the bucket and the network"
        )
    config = load(arguments["run"])
    region = resolve_region(options["region"], config.region, options["profile"])
    names = ("instance", "instances", "dry_run", "yes", "as_json")
    processing = ProcessingOptions(**{name: arguments[name] for name in names})
    return config, processing, price_table(), region


def _add(
    options: tuple[Callable[..., Any], ...], command: Callable[..., Any]
) -> Callable[..., Any]:
    for option in reversed(options):
        command = option(command)
    return command
