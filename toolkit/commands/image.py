"""``sm-train image``: the container image of a run's jobs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
from sm_train.toolkit.base.errors import UserError
from sm_train.toolkit.command_base.command import command as sm_train_command
from sm_train.toolkit.command_base.options import RunFile


@sm_train_command(
    "sm-train image run.yaml",
    "sm-train image run.yaml --dockerfile > Dockerfile",
)
@click.argument("run", type=RunFile())
@click.option("--dockerfile", is_flag=True, help="Print a Dockerfile that installs all packages.")
@click.pass_obj
def command(options: dict[str, Any], run: Path, dockerfile: bool, as_json: bool) -> None:
    """Print the URI of RUN's container image, without network access.

    With your own image (cluster.image), jobs install nothing and need no network at startup.
    """
    from sm_train.estimators.bundle.user_code import read_user_code
    from sm_train.estimators.request import images
    from sm_train.toolkit.aws.session import resolve_region
    from sm_train.toolkit.memory.sharding_choice import with_sharding
    from sm_train.toolkit.run_file.run_file import load
    from sm_train.toolkit.terminal.console import write_json

    config = with_sharding(load(run))
    region = resolve_region(options["region"], config.region, options["profile"])
    try:
        document = {"image": images.image_uri(config, region), "region": region}
        packages = (
            read_user_code(run.parent / config.code).packages if config.code is not None else ()
        )
        text = images.dockerfile(config, region, packages) if dockerfile else document["image"]
    except ValueError as error:
        raise UserError(str(error)) from None
    if as_json:
        write_json(document | ({"dockerfile": text} if dockerfile else {}))
    else:
        click.echo(text, nl=not dockerfile)
