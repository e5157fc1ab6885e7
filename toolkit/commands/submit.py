"""``sm-train submit``: shows the plan and the dollars, asks, and starts the run."""

from __future__ import annotations

import sys
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from sm_train.toolkit.errors import ExitCode, UserError

if TYPE_CHECKING:
    from sm_train.estimators.run_config import RunConfig
    from sm_train.toolkit.run_history import History
    from sm_train.toolkit.submission import Submission


@click.command()
@click.argument("run", type=click.Path(path_type=Path))
@click.option("--stage", metavar="S", help="One stage; the run file's first otherwise.")
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
@click.option("--nodes", type=click.IntRange(1), help="--local: emulated instances.")
@click.option(
    "--processes", type=click.IntRange(1), default=1, show_default=True,
    help="--local: processes on each emulated instance.",
)  # fmt: skip
@click.option(
    "--image", default="sm-train-local", show_default=True,
    help="--local container: what the containers are made of.",
)  # fmt: skip
@click.option(
    "--output", type=click.Path(path_type=Path, file_okay=False),
    help="--local: folder for checkpoints, logs and the model (local-runs/NAME).",
)  # fmt: skip
@click.pass_obj
def command(
    options: dict[str, Any],
    run: Path,
    stage: str | None,
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
    first or the one that --stage names. With --local it trains here, stage after stage.
    """
    from sm_train.estimators.run_file import RunFileError, load_run
    from sm_train.toolkit import aws
    from sm_train.toolkit.submission import prepare

    try:
        config = load_run(run)
    except RunFileError as error:
        raise UserError(str(error)) from None
    if local and not dry_run:
        inside = image if local == "container" else None
        _run_here(config, run.parent, stage, nodes, processes, output, inside, as_json)
        return
    region = aws.resolve_region(options["region"], config.region, options["profile"])
    if stage is None and not dry_run:
        stage = config.stages[0].name
    submission = prepare(config, stage, region, datetime.now())
    if dry_run:
        _show(submission, as_json)
        _mind_budget(config, region)
        return
    _send(config, submission, options["profile"], run=run, yes=yes, as_json=as_json)


def _show(submission: Submission, as_json: bool) -> None:
    from sm_train.toolkit.output import people, write_json
    from sm_train.toolkit.plan_view import show_plan

    if as_json:
        write_json(submission.as_dict())
        return
    for request in submission.requests:
        write_json(request)
    show_plan(submission, people())


def _mind_budget(config: RunConfig, region: str, history: History | None = None) -> None:
    """Hold the whole run's expected dollars against its budget."""
    if config.budget is None:
        return
    from sm_train.cost.document import as_document
    from sm_train.toolkit.amounts import dollars, total_dollars
    from sm_train.toolkit.submission import price

    total = as_document(price(config, region, history=history))["total"]
    if total["cost_at_least_usd"] <= config.budget.usd:
        return
    message = (
        f"budget.usd: the run costs {total_dollars(total)}, more than {dollars(config.budget.usd)}"
    )
    if config.budget.on_exceed == "stop":
        raise UserError(f"{message}; raise it or shorten the run", ExitCode.OVER_BUDGET)
    click.echo(f"warning: {message}", err=True)


def _send(
    config: RunConfig,
    submission: Submission,
    profile: str | None,
    *,
    run: Path,
    yes: bool,
    as_json: bool,
) -> None:
    from sm_train.estimators.model_trainer import send
    from sm_train.estimators.request import staging_bucket
    from sm_train.toolkit import aws
    from sm_train.toolkit.output import people, write_json
    from sm_train.toolkit.plan_view import show_plan
    from sm_train.toolkit.submission import price

    request, stage = submission.requests[0], submission.stages[0]
    region = submission.region
    if config.role is None:
        raise UserError(
            "role: not set; write role: arn:aws:iam::ACCOUNT:role/NAME in the run file",
            ExitCode.PERMISSION,
        )
    session = aws.open_session(profile, region)
    bucket = staging_bucket(config, region)
    aws.require_bucket(session, bucket, region, "bucket")
    aws.require_bucket(session, config.data.uri.split("/")[2], region, "data.uri")
    aws.require_shards(session, config.data.uri, stage.instances)
    aws.require_index(session, config.data.uri, config.data.index_uri)
    history = _history(session, config, region)
    submission = replace(submission, cost=price(config, region, submission.stages, history))
    show_plan(submission, people())
    _mind_budget(config, region, history)
    if not yes:
        _confirm(submission)
    with aws.refusals_in_words("CreateTrainingJob"):
        name = send(request, submission.bundle, boto_session=session, bucket=bucket)
    if as_json:
        write_json({"training_job_name": name, "region": region, "stage": stage.name})
    click.echo(f"Started {name}", err=True)
    click.echo(
        f"https://{region}.console.aws.amazon.com/sagemaker/home?region={region}#/jobs/{name}",
        err=True,
    )
    following = config.stages.index(stage) + 1
    if following < len(config.stages):
        later = config.stages[following].name
        click.echo(f"When it has ended: sm-train submit {run} --stage {later}", err=True)


def _history(session: Any, config: RunConfig, region: str) -> History | None:
    """What the run's finished jobs showed; an estimate does without where it may not be read."""
    from sm_train.toolkit.run_history import history_uri, read_history

    try:
        return read_history(session, history_uri(config, region))
    except UserError as error:
        click.echo(f"warning: estimated without the run's history: {error}", err=True)
        return None


def _confirm(submission: Submission) -> None:
    from sm_train.cost.document import as_document
    from sm_train.toolkit.amounts import total_dollars

    stage, total = submission.stages[0], as_document(submission.cost)["total"]
    cost = "an unknown price" if not total["cost_at_least_usd"] else total_dollars(total)
    try:
        agreed = click.confirm(f"Start {stage.name} for {cost}?", err=True)
    except click.Abort:
        if sys.stdin.isatty():  # Ctrl-C at the question
            raise
        raise UserError("not confirmed; --yes starts without asking") from None
    if not agreed:
        raise UserError("nothing was started", ExitCode.INTERRUPTED)


def _run_here(
    config: RunConfig,
    base: Path,
    stage: str | None,
    nodes: int | None,
    processes: int,
    output: Path | None,
    image: str | None,
    as_json: bool,
) -> None:
    from sm_train.estimators.bundle import build_bundle
    from sm_train.estimators.launch import framework_version
    from sm_train.toolkit.local_run import default_nodes, run_stage
    from sm_train.toolkit.output import people, write_json
    from sm_train.toolkit.submission import choose_stages

    if image is not None:
        from sm_train.toolkit.docker import require_docker
        from sm_train.toolkit.local_containers import build_command

        require_docker(image, build_command())
    console = people()
    output = output or Path("local-runs") / config.name
    bundle = build_bundle(config, framework_version(config))
    results = []
    for chosen in choose_stages(config, stage):
        count = nodes or default_nodes(chosen)
        console.print(
            f"{chosen.name}: {count} of {chosen.instances} instances emulated, {processes} "
            f"processes each; effective batch "
            f"{chosen.per_gpu_batch * chosen.accumulation * count * processes} here"
        )
        folders = run_stage(
            config, chosen, bundle, base=base, nodes=count, processes=processes,
            output=output, image=image, console=console,
        )  # fmt: skip
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
