"""``sm-train iam``: the least IAM policies for a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
from sm_train.toolkit.errors import UserError


@click.command()
@click.argument("run", type=click.Path(path_type=Path))
@click.option(
    "--only", type=click.Choice(["laptop", "job", "trust"]), help="Print this document alone."
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON on standard output.")
@click.pass_obj
def command(options: dict[str, Any], run: Path, only: str | None, as_json: bool) -> None:
    """Print the least policies for RUN: for who submits it and for its jobs' role.

    A policy is for one run's name, buckets and keys: with another run file, ask again.
    """
    from sm_train.estimators.request.iam import policies
    from sm_train.estimators.request.images import image_uri
    from sm_train.toolkit.aws.session import resolve_region
    from sm_train.toolkit.run_file import load
    from sm_train.toolkit.terminal.console import write_json

    config = load(run)
    region = resolve_region(options["region"], config.region, options["profile"])
    try:
        documents = policies(config, region, image_uri(config, region))
    except ValueError as error:
        raise UserError(str(error)) from None
    if config.role is None:
        click.echo("warning: role is not in the run file; account and role are made up", err=True)
    if only is None and not as_json:
        for name, words in _WORDS.items():
            click.echo(f"{name}: {words}", err=True)
    write_json(documents if only is None else documents[only])


_WORDS = {
    "laptop": "for the user or role that submits the run",
    "job": "for the role that the run file names",
    "trust": "who may take that role",
}
