"""``sm-train submit``: shows plan and cost, asks for confirmation, and starts the run."""

from __future__ import annotations

import shlex
from dataclasses import replace
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from sm_train.toolkit.base.errors import UserError
from sm_train.toolkit.base.wings import wing_module
from sm_train.toolkit.command_base.command import command as sm_train_command
from sm_train.toolkit.command_base.options import (
    ACCEPT_COMPONENTS,
    TARGETS_BY_NAME,
    RunFile,
    accept_components_option,
    local_options,
    set_option,
    unproven_option,
)

if TYPE_CHECKING:
    from sm_train.estimators.bundle.bundle import Bundle
    from sm_train.estimators.config.schema import RunConfig
    from sm_train.toolkit.api.run import Run
    from sm_train.toolkit.submit.submission import Submission


@sm_train_command(
    "sm-train submit run.yaml --dry-run",
    "sm-train submit run.yaml",
    "sm-train submit run.yaml --local --nodes 2",
    "sm-train submit run.yaml --stage 512px --auto-advance --yes",
    "sm-train submit run.yaml --set cluster.capacity=spot --set cluster.max_wait=6d",
    option_groups={
        "On this machine": ["--local", "--nodes", "--processes", "--image", "--output", "--steps"],
    },
)
@click.argument("run", type=RunFile(), required=False)
@click.option("--clone", metavar="JOB", help="Re-run an earlier job with the exact code it used.")
@set_option
@click.option("--stage", metavar="S", help="The stage to start; default: the run file's first.")
@click.option(
    "--auto-advance",
    is_flag=True,
    help="Let `sm-train watch` start each stage when the previous one is done.",
)
@click.option(
    "--take-over",
    is_flag=True,
    help="Continue from the checkpoints of a job on Kubernetes or Slurm that has ended.",
)
@accept_components_option
@unproven_option
@click.option("--dry-run", is_flag=True, help="Show the plan and its price; start nothing.")
@click.option(
    "--request", is_flag=True, help="Print the requests of a dry run as JSON; start nothing."
)
@click.option("--yes", "-y", is_flag=True, help="Start without asking.")
@click.option(
    "--local",
    type=click.Choice(["process", "container"]),
    is_flag=False,
    flag_value="process",
    help="Train on this machine with the bundle a job would get.",
)
@local_options
@click.option(
    "--image",
    metavar="IMAGE",
    default="sm-train-local",
    show_default=True,
    help="--local container: image of the containers.",
)
@click.option(
    "--output",
    type=click.Path(path_type=Path, file_okay=False),
    metavar="FOLDER",
    help="--local: folder for checkpoints, logs and the model (local-runs/NAME).",
)
@click.option(
    "--steps",
    type=click.IntRange(1),
    metavar="N",
    help="--local: train N steps of each stage only, as a quick test.",
)
@click.option(
    "--to",
    "target",
    type=click.Choice(list(TARGETS_BY_NAME)),
    metavar="TARGET",
    help="Start on kubernetes (a TrainJob), slurm, pytorchjob or hyperpod-eks, with this machine's "
    "kubectl or sbatch.",
)
@click.option("--follow", "-f", is_flag=True, help="Follow the run as `sm-train watch` does.")
@click.pass_obj
def command(
    options: dict[str, Any],
    run: Path | None,
    clone: str | None,
    changes: tuple[str, ...],
    stage: str | None,
    auto_advance: bool,
    take_over: bool,
    accept_components: bool,
    unproven: bool,
    dry_run: bool,
    request: bool,
    yes: bool,
    as_json: bool,
    local: str | None,
    nodes: int | None,
    processes: int,
    image: str,
    output: Path | None,
    steps: int | None,
    target: str | None,
    follow: bool,
) -> int | None:
    """Show the plan and cost of RUN, ask for confirmation, and start it on SageMaker.

    A run of several stages is several jobs, each starting from the previous one's weights. submit
    starts the first stage, or the one given by --stage; with --auto-advance the others follow
    while `watch` runs. --clone starts an earlier run again, under a new name unless --set gives it
    one.

    --local trains on this machine, stage after stage. Ctrl-C saves a checkpoint; the same command
    resumes from it. --to starts a stage on Slurm or Kubernetes with the manifest that `manifest`
    writes, after the scheduler's own dry run.
    """
    from sm_train.toolkit.api.run import Run, submission_of
    from sm_train.toolkit.submit.proven_path import require_proven
    from sm_train.toolkit.submit.submission import prepare, shortened
    from sm_train.toolkit.submit.submit import submit

    dry_run = dry_run or request
    if accept_components:
        changes = (*changes, ACCEPT_COMPONENTS)
    if request and as_json:
        raise UserError("--request: cannot be combined with --json; both print JSON")
    if (run is None) == (clone is None):
        raise UserError("RUN: give a run file, or --clone JOB")
    _check_modes(local, dry_run, steps, follow=follow, as_json=as_json)
    if target is not None:
        refused = {"--clone": clone, "--local": local, "--auto-advance": auto_advance}
        refused |= {"--request": request, "--follow": follow, "--unproven": unproven}
        _start_on_cluster(
            options,
            run,
            changes,
            stage,
            target,
            [name for name, value in refused.items() if value],
            dry_run=dry_run,
            yes=yes,
            as_json=as_json,
            take_over=take_over,
        )
        return None
    if run is None:
        _reject_local_clone(local)
        config, bundle, commit, region = _clone(options, clone or "", changes)
        chosen = stage if dry_run else stage or config.stages[0].name
        submission = prepare(config, chosen, bundle, region, datetime.now(), commit)
    else:
        loaded = Run.load(run, set=changes, region=options["region"], profile=options["profile"])
        if steps is not None:
            loaded = replace(loaded, config=shortened(loaded.config, steps))
        if local and not dry_run:
            container = image if local == "container" else None
            command_line = shlex.join(["sm-train", *options.get("arguments", ())])
            _run_locally(loaded, stage, nodes, processes, output, container, as_json, command_line)
            return None
        submission = submission_of(loaded, stage if dry_run else stage or loaded.stages[0])
        region, config = submission.region, submission.config
    if dry_run:
        target_name = str(run or "RUN")
        _show(submission, options["profile"], target_name, request=request, as_json=as_json)
        return None
    submit(
        submission,
        options["profile"],
        cause="submit",
        auto_advance=auto_advance,
        yes=yes,
        as_json=as_json,
        take_over=take_over,
        before_start=partial(require_proven, unproven=unproven, target=str(run or "RUN")),
    )
    if not follow:
        return None
    from sm_train.toolkit.commands.watch import follow_run

    options["region"] = region
    return follow_run(config.name, options, dry_run=False, interval=60.0, as_json=False)


def _check_modes(
    local: str | None,
    dry_run: bool,
    steps: int | None,
    *,
    follow: bool,
    as_json: bool,
) -> None:
    """Refuse options that do not apply to what the command is about to do."""
    if steps is not None and not local:
        raise UserError("--steps: requires --local; for a job give --set stages.NAME.max_steps=N")
    if follow and (local or dry_run):
        other = "--local" if local else "--dry-run"
        raise UserError(f"--follow: applies to a job that is started; remove {other}")
    if follow and as_json:
        raise UserError("--follow: cannot be combined with --json; use `sm-train watch --json`")


def _start_on_cluster(
    options: dict[str, Any],
    run: Path | None,
    changes: tuple[str, ...],
    stage: str | None,
    target: str,
    refused: list[str],
    **choices: bool,
) -> None:
    from sm_train.toolkit.memory.sharding_choice import with_sharding
    from sm_train.toolkit.run_file.run_file import load

    if refused:
        raise UserError(f"{refused[0]}: applies to jobs on SageMaker; remove it, or --to {target}")
    assert run is not None  # --clone alone needs none
    chosen: Any = TARGETS_BY_NAME[target]
    config = with_sharding(load(run, changes))
    clusters = wing_module("sm_train.toolkit.clusters.submit_to_cluster")
    clusters.submit_to_cluster(run, config, stage, chosen, options, **choices)


def _reject_local_clone(local: str | None) -> None:
    if local:
        raise UserError("--local: cannot be combined with --clone; give the run file")


def _clone(
    options: dict[str, Any], job: str, changes: tuple[str, ...]
) -> tuple[RunConfig, Bundle, str | None, str]:
    from sm_train.toolkit.aws.session import open_session, resolve_region
    from sm_train.toolkit.submit.clone import clone
    from sm_train.toolkit.terminal.console import note

    region = resolve_region(options["region"], None, options["profile"])
    config, bundle, commit = clone(open_session(options["profile"], region), job, changes, region)
    note(f"Cloning {job} as {config.name}")
    return config, bundle, commit, region


def _show(
    submission: Submission, profile: str | None, target: str, *, request: bool, as_json: bool
) -> None:
    from sm_train.toolkit.submit.plan_view import show_plan
    from sm_train.toolkit.submit.proven_path import require_proven
    from sm_train.toolkit.submit.submit import check_budget, dry_run
    from sm_train.toolkit.terminal.console import stdout_console, write_json, write_line

    if request:
        for planned_request in submission.requests:
            write_json(planned_request)
        return
    plan = dry_run(submission, profile, partial(require_proven, unproven=False, target=target))
    if as_json:
        changes = None if plan.changes is None else plan.changes.as_dict()
        write_json(plan.submission.as_dict() | {"changes": changes})
    else:
        show_plan(plan, stdout_console())
    for line in check_budget(submission.config, submission.region, submission.history):
        write_line(f"warning: {line}", err=True)


def _run_locally(
    run: Run,
    stage: str | None,
    nodes: int | None,
    processes: int,
    output: Path | None,
    container: str | None,
    as_json: bool,
    command_line: str,
) -> None:
    from sm_train.toolkit.base.extras import require_local_run

    require_local_run(in_containers=container is not None)  # before anything is written
    from sm_train.entrypoints.base.atomic_write import write_atomic
    from sm_train.toolkit.records.local_folder import COMMAND_NAME
    from sm_train.toolkit.submit.train_locally import default_output
    from sm_train.toolkit.terminal.console import write_json

    folder = output or default_output(run.config)
    folder.mkdir(parents=True, exist_ok=True)
    write_atomic(folder / COMMAND_NAME, f"{command_line}\n".encode())
    result = run.local(stage, nodes=nodes, processes=processes, image=container, output=folder)
    if as_json:
        stages = [
            {
                "stage": local_stage.name,
                "model": None if local_stage.model is None else str(local_stage.model),
                "checkpoints": str(local_stage.checkpoints),
                "log": str(local_stage.log),
            }
            for local_stage in result.stages
        ]
        write_json({"stages": stages})
