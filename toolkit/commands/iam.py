"""``sm-train iam``: least-privilege IAM policies for a run."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from sm_train.toolkit.base.errors import UserError
from sm_train.toolkit.command_base.command import command as sm_train_command
from sm_train.toolkit.command_base.options import RunFile

if TYPE_CHECKING:
    from sm_train.estimators.config.schema import RunConfig
    from sm_train.estimators.request.iam import PolicyDocument
    from sm_train.toolkit.checks.account.simulated_permissions import Identity


@sm_train_command(
    "sm-train iam run.yaml",
    "sm-train iam run.yaml --only job",
    "sm-train iam run.yaml --missing --only job",
    "sm-train iam run.yaml --only pack --source s3://raw/photos/",
    "sm-train iam run.yaml --only processing --source s3://raw/photos/ --on sagemaker",
)
@click.argument("run", type=RunFile())
@click.option(
    "--only",
    type=click.Choice(
        "laptop job trust watch pack index enrich remove lineage stream processing".split()
    ),
    help="Print only this document.",
)
@click.option(
    "--source",
    "sources",
    metavar="S3",
    multiple=True,
    help="S3 prefix that `pack`, `enrich` and `stream --add` read; may be repeated.",
)
@click.option("--destination", metavar="S3", help="S3 prefix that `enrich` writes.")
@click.option(
    "--on",
    type=click.Choice(["sagemaker"]),
    help="Let `pack`, `index` and `enrich` start jobs; add the policy of the jobs' role.",
)
@click.option(
    "--missing",
    is_flag=True,
    help="Print only what the jobs' role and your user lack, by a simulation of IAM.",
)
@click.pass_obj
def command(
    options: dict[str, Any],
    run: Path,
    only: str | None,
    sources: tuple[str, ...],
    destination: str | None,
    on: str | None,
    missing: bool,
    as_json: bool,
) -> None:
    """Print least-privilege IAM policies for RUN: its submitter's, its jobs', its watcher's.

    The commands that make and change the run's data set have one each: `pack`, `index`, `enrich`,
    `remove`, `lineage` and `stream`. With `--on sagemaker`, `processing` is the policy of the role
    of their jobs.

    The policies name the run, its buckets and its keys. Print them again when the run file changes.
    """
    from sm_train.estimators.request.data_policies import DATA_COMMANDS, data_policies
    from sm_train.estimators.request.iam import policies
    from sm_train.estimators.request.images import image_uri
    from sm_train.toolkit.aws.session import resolve_region
    from sm_train.toolkit.run_file.run_file import load
    from sm_train.toolkit.terminal.console import note, write_json

    config = load(run)
    _check_options(only, sources, destination, on)
    region = resolve_region(options["region"], config.region, options["profile"])
    try:
        documents = policies(config, region, image_uri(config, region))
    except ValueError as error:
        raise UserError(str(error)) from None
    processing = None if on is None else _processing_image(region)
    documents |= data_policies(config, region, sources, destination, processing)
    if missing:
        names = ["laptop", "job"] if only is None else [only]
        documents = _missing(options, config, region, documents, names)
    if config.role is None:
        click.echo(
            "warning: role is missing in the run file; account and role are placeholders", err=True
        )
    if only in ("pack", "stream", "processing") and not sources:
        click.echo(f"warning: --source: not given; the policy lets {only} read no images", err=True)
    bucket, _, prefix = config.data.uri.removeprefix("s3://").partition("/")
    if only in _WRITERS and "/" not in prefix.rstrip("/"):
        click.echo(
            f"warning: data.uri: the data set is all of {bucket}, so the policy lets {only} write "
            f"and delete everything in it; s3://{bucket}/NAME/{prefix} would be a part",
            err=True,
        )
    if only is None and not as_json:
        for name in documents:
            note(f"{name}: {(_PURPOSES | DATA_COMMANDS)[name]}")
    write_json(documents if only is None else documents[only])


_WRITERS = ("pack", "index", "remove", "processing")

_USERS = {
    "--on": ("pack", "index", "enrich", "processing"),
    "--source": ("pack", "enrich", "stream", "processing"),
    "--destination": ("enrich", "processing"),
}
"""The documents that an option changes."""


def _check_options(
    only: str | None, sources: Sequence[str], destination: str | None, on: str | None
) -> None:
    """Check the options of the data set's commands.

    Raises:
        UserError: one is no S3 prefix, or has no effect.
    """
    given = [*(("--source", uri) for uri in sources), ("--destination", destination), ("--on", on)]
    for option, value in given:
        if value is None:
            continue
        if option != "--on" and not re.match("s3://[^/]", value):
            raise UserError(f"{option}: {value!r} is no S3 prefix: write s3://BUCKET/PREFIX/")
        if only is not None and only not in _USERS[option]:
            raise UserError(
                f"{option}: {value} does not change the policy of {only}, but of "
                f"{', '.join(_USERS[option])}"
            )
    if only == "processing" and on is None:
        raise UserError("--only: processing is the policy of jobs; give --on sagemaker, too")


def _processing_image(region: str) -> str:
    """Return the image of jobs of SageMaker Processing; those of all types are in one repository.

    Raises:
        UserError: AWS has no such image in the region.
    """
    from sm_train.estimators.request.processing import INDEX_INSTANCE, processing_image

    try:
        return processing_image(INDEX_INSTANCE, region)
    except ValueError as error:
        raise UserError(f"--on: {error}") from None


def _missing(
    options: dict[str, Any],
    config: RunConfig,
    region: str,
    documents: dict[str, PolicyDocument],
    names: list[str],
) -> dict[str, PolicyDocument]:
    """Return the part of each policy that its role or user lacks.

    Raises:
        UserError: there is nothing to simulate, or AWS rejects a request.
    """
    from sm_train.toolkit.aws.aws_errors import translate_aws_errors
    from sm_train.toolkit.aws.session import open_session
    from sm_train.toolkit.checks.account.simulated_permissions import (
        missing_permissions,
        principal,
        simulate,
    )

    if unknown := set(names) - {"laptop", "job"}:
        raise UserError(f"--only: {unknown.pop()} is not simulated with --missing: job or laptop")
    if config.role is None:
        raise UserError("role: not set; --missing simulates it")
    session = open_session(options["profile"], region)
    found: dict[str, PolicyDocument] = {}
    with translate_aws_errors("iam:SimulatePrincipalPolicy"):
        arns = {"job": config.role, "laptop": principal(session) if "laptop" in names else None}
        for name in names:
            arn = arns[name]
            if arn is None:
                raise UserError(
                    "--profile: the credentials are of no user or role of IAM; give --only job"
                )
            identity: Identity = "job" if name == "job" else "laptop"
            simulation = simulate(identity, arn, documents[name], config, session, region)
            statements = missing_permissions(documents[name], simulation.denials)
            found[name] = {"Version": documents[name]["Version"], "Statement": statements}
    return found


_PURPOSES = {
    "laptop": "policy for the user or role that submits the run",
    "job": "policy for the role that the run file names",
    "trust": "trust policy of that role",
    "watch": "policy of the function of `template watch-lambda`",
    "processing": "policy for the role of jobs of `pack`, `index` and `enrich --on sagemaker`",
}
