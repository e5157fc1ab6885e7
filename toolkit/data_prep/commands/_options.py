"""Options that commands on data share: colors, and SageMaker Processing."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any

import click
from sm_train.entrypoints.job_interface.job_config import ColorPolicy
from sm_train.toolkit.base.errors import UserError
from sm_train.toolkit.command_base.options import add_options
from sm_train.toolkit.run_file.run_file import load

if TYPE_CHECKING:
    from sm_train.cost.prices import PriceTable
    from sm_train.estimators.config.schema import RunConfig
    from sm_train.toolkit.data_prep.processing.start_processing import ProcessingOptions

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
    return add_options(_COLOR_OPTIONS, command)


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
    return lambda command: add_options(options, command)


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
    from sm_train.toolkit.data_prep.processing.start_processing import ProcessingOptions
    from sm_train.toolkit.memory.sharding_choice import with_sharding
    from sm_train.toolkit.planning.price_table import price_table

    if arguments["run"] is None:
        raise UserError(
            "--on: requires --for RUN, a run file with the role, the bucket and the network"
        )
    config = with_sharding(load(arguments["run"]))
    region = resolve_region(options["region"], config.region, options["profile"])
    names = ("instance", "instances", "dry_run", "yes", "as_json")
    processing = ProcessingOptions(**{name: arguments[name] for name in names})
    return config, processing, price_table(), region
