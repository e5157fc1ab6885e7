"""``sm-train iam``: least-privilege IAM policies for a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
from sm_train.toolkit.commands._command import command as sm_train_command
from sm_train.toolkit.commands._options import RunFile
from sm_train.toolkit.errors import UserError


@sm_train_command(
    "sm-train iam run.yaml",
    "sm-train iam run.yaml --only job",
)
@click.argument("run", type=RunFile())
@click.option(
    "--only",
    type=click.Choice(["laptop", "job", "trust", "watch"]),
    help="Print only this document.",
)
@click.pass_obj
def command(options: dict[str, Any], run: Path, only: str | None, as_json: bool) -> None:
    """Print least-privilege IAM policies for RUN: its submitter's, its jobs', its watcher's.

    The policies name the run, its buckets and its keys. Print them again when the run file changes.
    """
    from sm_train.estimators.request.iam import policies
    from sm_train.estimators.request.images import image_uri
    from sm_train.toolkit.aws.session import resolve_region
    from sm_train.toolkit.run_file import load
    from sm_train.toolkit.terminal.console import note, write_json

    config = load(run)
    region = resolve_region(options["region"], config.region, options["profile"])
    try:
        documents = policies(config, region, image_uri(config, region))
    except ValueError as error:
        raise UserError(str(error)) from None
    if config.role is None:
        click.echo(
            "warning: role is missing in the run file; account and role are placeholders", err=True
        )
    if only is None and not as_json:
        for name, purpose in _PURPOSES.items():
            note(f"{name}: {purpose}")
    write_json(documents if only is None else documents[only])


_PURPOSES = {
    "laptop": "policy for the user or role that submits the run",
    "job": "policy for the role that the run file names",
    "trust": "trust policy of that role",
    "watch": "policy of the function of `template watch-lambda`",
}
