"""``sm-train template``: deployment of the parts that run without a laptop."""

from __future__ import annotations

from importlib.resources import files

import click

TEMPLATES = {
    "pack-lambda": "pack-lambda.yaml",
    "pack-lambda-image": "pack-lambda-image.Dockerfile",
    "watch-lambda": "watch-lambda.yaml",
    "watch-lambda-image": "watch-lambda-image.Dockerfile",
}


@click.command()
@click.argument("name", type=click.Choice(sorted(TEMPLATES)))
def command(name: str) -> None:
    """Print a CloudFormation template or a Dockerfile.

    \b
    pack-lambda         CloudFormation (SAM): SQS and a Lambda function that
                        pack images as they arrive in S3.
    pack-lambda-image   Dockerfile of the function.
    watch-lambda        CloudFormation (SAM): a Lambda function that watches
                        runs as `sm-train watch` does.
    watch-lambda-image  Dockerfile of the function.
    """
    text = (files("sm_train.toolkit") / "templates" / TEMPLATES[name]).read_text(encoding="utf-8")
    click.echo(text, nl=False)
