"""``sm-train template``: deployment of the parts that run without a laptop."""

from __future__ import annotations

import json
import textwrap
from importlib.resources import files
from pathlib import Path
from typing import Any

import click
from sm_train.toolkit.base.errors import UserError
from sm_train.toolkit.command_base.command import command as sm_train_command
from sm_train.toolkit.command_base.options import RunFile

TEMPLATES = {
    "github-action": "github-action.yaml",
    "pack-lambda": "pack-lambda.yaml",
    "pack-lambda-image": "pack-lambda-image.Dockerfile",
    "watch-lambda": "watch-lambda.yaml",
    "watch-lambda-image": "watch-lambda-image.Dockerfile",
}


@sm_train_command(
    "sm-train template pack-lambda > pack-lambda.yaml",
    "sm-train template watch-lambda run.yaml > watch-lambda.yaml",
    "sm-train template github-action > .github/workflows/training-cost.yaml",
    prints_json=False,
)
@click.argument("name", type=click.Choice(sorted(TEMPLATES)))
@click.argument("runs", metavar="[RUN]...", nargs=-1, type=RunFile())
@click.pass_obj
def command(options: dict[str, Any], name: str, runs: tuple[Path, ...]) -> None:
    """Print a CloudFormation template, a Dockerfile or a workflow.

    \b
    github-action       GitHub workflow: comments the cost of a changed run
                        file on its pull request.
    pack-lambda         CloudFormation (SAM): SQS and a Lambda function that
                        pack images as they arrive in S3.
    pack-lambda-image   Dockerfile of the function.
    watch-lambda RUN... CloudFormation (SAM): a Lambda function that watches
                        these runs as `sm-train watch` does, and may touch
                        nothing else.
    watch-lambda-image  Dockerfile of the function.
    """
    if (name == "watch-lambda") != bool(runs):
        expected = "the run files to watch" if name == "watch-lambda" else "no run file"
        raise click.UsageError(f"{name} takes {expected}")
    text = (files("sm_train.toolkit") / "templates" / TEMPLATES[name]).read_text(encoding="utf-8")
    if runs:
        names, policy = _watched(runs, options)
        text = text.replace("@RUNS@", names).replace("@POLICY@", policy)
    click.echo(text, nl=False)


def _watched(runs: tuple[Path, ...], options: dict[str, Any]) -> tuple[str, str]:
    """Return the names of the runs, and what a function needs to watch them; both are YAML."""
    import yaml
    from sm_train.estimators.request.iam import merge_policies, policies
    from sm_train.estimators.request.images import image_uri
    from sm_train.toolkit.aws.session import resolve_region
    from sm_train.toolkit.run_file.run_file import load

    configs = [load(path) for path in runs]
    for path, config in zip(runs, configs, strict=True):
        if config.role is None:
            raise UserError(f"{path}: role: not set; the function passes it to the jobs it starts")
        if config.is_outside_of_aws:
            raise UserError(
                f"{path}: is not a run for SageMaker, whose jobs the function watches; the CronJob "
                "of `sm-train manifest` watches it"
            )
    regions = {
        resolve_region(options["region"], config.region, options["profile"]) for config in configs
    }
    if len(regions) > 1:
        raise UserError(
            f"{', '.join(map(str, runs))}: the runs are in {' and '.join(sorted(regions))}; "
            "deploy a function in each region"
        )
    [region] = regions
    try:
        documents = [
            policies(config, region, image_uri(config, region))["watch"] for config in configs
        ]
    except ValueError as error:
        raise UserError(str(error)) from None
    names = dict.fromkeys(config.name for config in configs)
    policy = yaml.safe_dump(merge_policies(documents), sort_keys=False)
    return json.dumps(",".join(names)), textwrap.indent(policy, " " * 10)
