"""``sm-train submit``: shows the plan and the dollars, asks, and starts the run."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from sm_train.toolkit.commands._options import local_options
from sm_train.toolkit.errors import UserError

if TYPE_CHECKING:
    from sm_train.estimators.bundle.bundle import Bundle
    from sm_train.estimators.config.schema import RunConfig
    from sm_train.toolkit.submit.submission import Submission


@click.command()
@click.argument("run", type=click.Path(path_type=Path), required=False)
@click.option("--clone", metavar="JOB", help="Repeat an earlier job's run, with its own code.")
@click.option(
    "--set", "changes", multiple=True, metavar="A.B=C", help="Change a value of the run file."
)
@click.option("--stage", metavar="S", help="One stage; the run file's first otherwise.")
@click.option(
    "--all",
    "chain",
    is_flag=True,
    help="Let `sm-train watch` start each stage when the one before is done.",
)
@click.option("--dry-run", is_flag=True, help="Print plan and requests; touch no network.")
@click.option("--yes", "-y", is_flag=True, help="Start without asking.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON on standard output.")
@click.option(
    "--local",
    type=click.Choice(["process", "container"]),
    is_flag=False,
    flag_value="process",
    help="Train on this machine with the bundle that a job would get.",
)
@local_options
@click.option(
    "--image",
    default="sm-train-local",
    show_default=True,
    help="--local container: what the containers are made of.",
)
@click.option(
    "--output",
    type=click.Path(path_type=Path, file_okay=False),
    help="--local: folder for checkpoints, logs and the model (local-runs/NAME).",
)
@click.pass_obj
def command(
    options: dict[str, Any],
    run: Path | None,
    clone: str | None,
    changes: tuple[str, ...],
    stage: str | None,
    chain: bool,
    dry_run: bool,
    yes: bool,
    as_json: bool,
    local: str | None,
    nodes: int | None,
    processes: int,
    image: str,
    output: Path | None,
) -> None:
    """Show the plan of RUN and its dollars, ask, and start it on SageMaker.

    A run of several stages is several jobs, each from the last one's weights: submit starts the
    first or the one that --stage names; with --all the others follow while `watch` runs. With
    --local it trains here, stage after stage. --clone starts an earlier run anew, under a name of
    its own unless --set gives it one.
    """
    from sm_train.toolkit.aws import session as aws
    from sm_train.toolkit.run_file import load
    from sm_train.toolkit.submit.bundle import bundle_of, commit_of
    from sm_train.toolkit.submit.submission import prepare
    from sm_train.toolkit.submit.submit import check_budget, submit

    if (run is None) == (clone is None):
        raise UserError("RUN: give a run file, or --clone JOB")
    if run is None:
        _not_here(local)
        config, bundle, commit, region = _cloned(options, clone or "", changes)
    else:
        config = load(run, changes)
        bundle = bundle_of(config, run.parent)
        if local and not dry_run:
            inside = image if local == "container" else None
            _run_here(config, bundle, run.parent, stage, nodes, processes, output, inside, as_json)
            return
        region = aws.resolve_region(options["region"], config.region, options["profile"])
        commit = commit_of(run.parent)
    if stage is None and not dry_run:
        stage = config.stages[0].name
    submission = prepare(config, stage, bundle, region, datetime.now(), commit)
    if dry_run:
        _show(submission, as_json)
        check_budget(config, region)
        return
    submit(submission, options["profile"], cause="submit", chain=chain, yes=yes, as_json=as_json)


def _not_here(local: str | None) -> None:
    if local:
        raise UserError("--local: repeats no job; give the run file")


def _cloned(
    options: dict[str, Any], job: str, changes: tuple[str, ...]
) -> tuple[RunConfig, Bundle, str | None, str]:
    from sm_train.toolkit.aws import session as aws
    from sm_train.toolkit.submit.clone import clone

    region = aws.resolve_region(options["region"], None, options["profile"])
    config, bundle, commit = clone(
        aws.open_session(options["profile"], region), job, changes, region
    )
    click.echo(f"{job} again, as {config.name}", err=True)
    return config, bundle, commit, region


def _show(submission: Submission, as_json: bool) -> None:
    from sm_train.toolkit.submit.plan_view import show_plan
    from sm_train.toolkit.terminal.console import stderr_console, write_json

    if as_json:
        write_json(submission.as_dict())
        return
    for request in submission.requests:
        write_json(request)
    show_plan(submission, stderr_console())


def _run_here(
    config: RunConfig,
    bundle: Bundle,
    base: Path,
    stage: str | None,
    nodes: int | None,
    processes: int,
    output: Path | None,
    image: str | None,
    as_json: bool,
) -> None:
    from sm_train.toolkit.local.launcher import default_nodes, run_stage
    from sm_train.toolkit.submit.submission import choose_stages
    from sm_train.toolkit.terminal.console import stderr_console, write_json

    if image is not None:
        from sm_train.toolkit.local.containers import build_command
        from sm_train.toolkit.local.docker import require_docker

        require_docker(image, build_command())
    console = stderr_console()
    output = output or Path("local-runs") / config.name
    results = []
    for chosen in choose_stages(config, stage):
        count = nodes or default_nodes(chosen)
        per_process = chosen.per_device_batch_size * chosen.gradient_accumulation_steps
        console.print(
            f"{chosen.name}: {count} of {chosen.instances} instances emulated, {processes} "
            f"processes each; effective batch {per_process * count * processes} here"
        )
        folders = run_stage(
            config,
            chosen,
            bundle,
            base=base,
            nodes=count,
            processes=processes,
            output=output,
            image=image,
            console=console,
        )
        results.append(
            {
                "stage": chosen.name,
                "model": str(folders.model),
                "checkpoints": str(folders.checkpoints),
                "log": str(folders.log),
            }
        )
        console.print(f"{chosen.name}: model in {folders.model}", soft_wrap=True)
    if as_json:
        write_json({"stages": results})
