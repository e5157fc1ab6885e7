"""``sm-train manifest``: the same run on Kubernetes or Slurm."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from sm_train.toolkit.base.errors import UserError
from sm_train.toolkit.command_base.command import command as sm_train_command
from sm_train.toolkit.command_base.options import TARGETS, RunFile, set_option

if TYPE_CHECKING:
    from sm_train.estimators.manifests.manifest import Manifest


@sm_train_command(
    "sm-train manifest run.yaml --to trainjob",
    "sm-train manifest run.yaml --to pytorchjob --stage 512px --out job.yaml --stage-code",
    "sm-train manifest run.yaml --to slurm --set slurm.container=false --out job.sbatch",
)
@click.argument("run", type=RunFile())
@click.option(
    "--to",
    "target",
    type=click.Choice(TARGETS),
    required=True,
    help="Kubeflow Trainer, its older PyTorchJob, HyperPod on EKS, or Slurm.",
)
@click.option("--stage", metavar="S", help="The stage; default: the run file's first.")
@set_option
@click.option(
    "--out",
    type=click.Path(path_type=Path, dir_okay=False),
    help="File to write; default: standard output.",
)
@click.option(
    "--take-over",
    is_flag=True,
    help="Continue from the checkpoints of a job on another platform that has ended.",
)
@click.option("--stage-code", is_flag=True, help="Upload the bundle that the manifest names to S3.")
@click.pass_obj
def command(
    options: dict[str, Any],
    run: Path,
    target: Any,
    stage: str | None,
    changes: tuple[str, ...],
    out: Path | None,
    take_over: bool,
    stage_code: bool,
    as_json: bool,
) -> None:
    """Write one stage of RUN as a manifest for Kubernetes, or as a batch script for Slurm.

    The sections kubernetes and slurm of the run file hold what these clusters need. Nothing is
    started: the commands of kubectl or Slurm are printed on standard error. status, logs, watch,
    stop, review, diagnose and cost --actual work from what the job's nodes store.
    """
    from sm_train.toolkit.aws.session import open_session, resolve_region
    from sm_train.toolkit.clusters.staged_manifest import checked_manifest
    from sm_train.toolkit.clusters.staged_manifest import stage_code as upload
    from sm_train.toolkit.memory.sharding_choice import with_sharding
    from sm_train.toolkit.planning.history import recorded_history
    from sm_train.toolkit.run_file.run_file import load
    from sm_train.toolkit.terminal.console import write_json

    config = with_sharding(load(run, changes))
    region = resolve_region(options["region"], config.region, options["profile"])
    name, history = None if out is None else str(out), recorded_history(config, run.parent)
    checked = checked_manifest(
        config, run.parent, stage, target, region, name, history, take_over=take_over
    )
    manifest, bundle = checked.manifest, checked.bundle
    for warning in checked.warnings:
        click.echo(f"warning: {warning}", err=True)
    if stage_code:
        upload(open_session(options["profile"], region), manifest, bundle)
    if out is not None:
        _write(out, manifest.text)
    if as_json:
        write_json(manifest.as_dict() | {"bundle": bundle.as_dict(), "code_staged": stage_code})
    elif out is None:
        click.echo(manifest.text, nl=False)
    _print_commands(manifest, staged=stage_code)


def _write(out: Path, text: str) -> None:
    from sm_train.entrypoints.base.atomic_write import write_atomic

    try:
        write_atomic(out, text.encode())
    except OSError as error:
        raise UserError(f"--out: {out}: {error.strerror}") from None


def _print_commands(manifest: Manifest, *, staged: bool) -> None:
    from sm_train.toolkit.terminal.console import note

    if staged:
        note(f"Code: {manifest.code_uri}")
    else:
        note(f"The code is not at {manifest.code_uri} yet: repeat the command with --stage-code")
    width = max(map(len, manifest.commands))
    for purpose, line in manifest.commands.items():
        note(f"{purpose:{width}}  {line}")
