"""``sm-train template``: CloudFormation templates of what runs without a laptop."""

from __future__ import annotations

from importlib.resources import files

import click

TEMPLATES = ("pack-lambda",)


@click.command()
@click.argument("name", type=click.Choice(TEMPLATES))
def command(name: str) -> None:
    """Print a CloudFormation (SAM) template.

    pack-lambda: SQS and a Lambda function that pack images as they arrive in S3.
    """
    text = (files("sm_train.toolkit") / "templates" / f"{name}.yaml").read_text(encoding="utf-8")
    click.echo(text, nl=False)
