"""``sm-train doctor``: examine a cluster's GPUs, network and files, and their effect on the run."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from sm_train.toolkit.commands._command import command as sm_train_command
from sm_train.toolkit.commands._options import RunFile, local_options
from sm_train.toolkit.errors import ExitCode, UserError

if TYPE_CHECKING:
    from sm_train.estimators.config.schema import RunConfig
    from sm_train.estimators.config.stage import StageSection
    from sm_train.toolkit.doctor.doctor_job import DoctorJob


@sm_train_command(
    "sm-train doctor run.yaml --canary",
    "sm-train doctor run.yaml --stage 512px",
    "sm-train doctor run.yaml --local --nodes 2",
)
@click.argument("run", type=RunFile())
@click.option("--stage", metavar="S", help="Stage whose cluster is examined (default: the first).")
@click.option(
    "--canary",
    is_flag=True,
    help="Run two short jobs that train, stop and resume a tiny model on the run's route.",
)
@click.option(
    "--instance-type", metavar="T", help="--canary: instance type (default: the cheapest)."
)
@click.option(
    "--interval", metavar="T", default="15s", show_default=True, help="--canary: polling interval."
)
@click.option("--local", is_flag=True, help="Examine this computer, with emulated instances.")
@local_options
@click.option(
    "--output",
    metavar="FOLDER",
    type=click.Path(path_type=Path, file_okay=False),
    help="Folder of the local run, where --local stores the result (local-runs/NAME), or of the "
    "canary's report (canary-reports).",
)
@click.option("--dry-run", is_flag=True, help="Print the job's request and exit; use no network.")
@click.option("--yes", "-y", is_flag=True, help="Start without confirmation.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON on standard output.")
@click.pass_obj
def command(
    options: dict[str, Any],
    run: Path,
    stage: str | None,
    canary: bool,
    instance_type: str | None,
    interval: str,
    local: bool,
    nodes: int | None,
    processes: int,
    output: Path | None,
    dry_run: bool,
    yes: bool,
    as_json: bool,
) -> None:
    """Examine the cluster of RUN, locally with --local, otherwise in a short job of its own.

    Training jobs on several instances examine their cluster automatically (doctor.mode in the run
    file). Exit code 3: the cluster is unfit.

    With --canary, two small instances train a tiny model on the run's image, route, network, role
    and shards; the job is stopped after a checkpoint, and another one resumes from it. The report
    states what worked, with figures, and names neither account nor bucket. Exit code 3: a step did
    not work.
    """
    from sm_train.toolkit.aws.session import resolve_region
    from sm_train.toolkit.doctor.doctor_job import prepare_job
    from sm_train.toolkit.run_file import load
    from sm_train.toolkit.submit.submission import choose_stages

    config = load(run)
    selected = choose_stages(config, stage)[0]
    if canary:
        from sm_train.toolkit.doctor.canary_command import CanaryOptions, start_canary
        from sm_train.toolkit.terminal.formatting import parse_duration

        chosen = CanaryOptions(
            instance_type=instance_type,
            nodes=(nodes or 2) if local else None,
            processes=processes,
            output=output or Path("canary-reports"),
            poll_seconds=parse_duration("--interval", interval),
            profile=options["profile"],
            dry_run=dry_run,
            yes=yes,
            as_json=as_json,
        )
        region = resolve_region(options["region"], config.region, options["profile"])
        start_canary(config, selected, run.parent, region, chosen)
        return
    if local:
        _examine_local(config, selected, run.parent, nodes, processes, output, as_json)
        return
    region = resolve_region(options["region"], config.region, options["profile"])
    job = prepare_job(config, selected, run.parent, region, datetime.now())
    if dry_run:
        _print_request(job, as_json)
        return
    _examine_in_job(job, run.parent, options["profile"], yes=yes, as_json=as_json)


def _examine_local(
    config: RunConfig,
    stage: StageSection,
    base: Path,
    nodes: int | None,
    processes: int,
    output: Path | None,
    as_json: bool,
) -> None:
    from sm_train.toolkit.extras import require_local_run

    require_local_run()
    from sm_train.toolkit.doctor.doctor import examine_local
    from sm_train.toolkit.doctor.doctor_view import show_result
    from sm_train.toolkit.local.launcher import default_nodes
    from sm_train.toolkit.terminal.console import stderr_console, write_json

    count = nodes or default_nodes(stage)
    document = examine_local(
        config,
        stage,
        base=base,
        nodes=count,
        processes=processes,
        output=output or Path("local-runs") / config.name,
        console=stderr_console(),
    )
    show_result(document, stderr_console(shows_results=True))
    if as_json:
        write_json(document)
    if document["verdict"]["level"] == "fail":
        raise UserError("the cluster is unfit: see the findings", ExitCode.PREFLIGHT)


def _print_request(job: DoctorJob, as_json: bool) -> None:
    from sm_train.toolkit.terminal.console import write_json, write_line

    write_json(job.as_dict() if as_json else job.request)
    write_line(_price_line(job), err=True)


def _price_line(job: DoctorJob) -> str:
    from sm_train.toolkit.terminal.formatting import format_duration, format_usd

    stage, price = job.submission.stages[0], job.price
    return (
        f"{stage.instances} × {job.submission.config.cluster.instance_type} for about "
        f"{format_duration(price.seconds)}: {format_usd(price.usd)}, at most "
        f"{format_usd(price.max_usd)}; the result is stored in {job.results_uri}"
    )


def _examine_in_job(
    job: DoctorJob, base: Path, profile: str | None, *, yes: bool, as_json: bool
) -> None:
    from sm_train.toolkit.doctor.doctor_job import open_jobs, start, wait_for_verdict
    from sm_train.toolkit.doctor.doctor_view import show_result
    from sm_train.toolkit.short_jobs.short_job import confirm
    from sm_train.toolkit.terminal.console import stderr_console, write_json, write_line

    jobs = open_jobs(job, base, profile)
    confirm(_price_line(job), yes=yes)
    verdict = wait_for_verdict(job, start(job, jobs), jobs)
    level, sentence = verdict.event["level"], verdict.event["sentence"]
    if verdict.result is not None:
        show_result(verdict.result, stderr_console(shows_results=True))
    else:
        write_line(sentence, err=True)
    if as_json:
        names = {"training_job_name": verdict.job, "region": jobs.region}
        document = {"results": job.results_uri, "level": level, "sentence": sentence}
        write_json(names | document | {"result": verdict.result})
    if level == "fail":
        raise UserError("the cluster is unfit: see the findings", ExitCode.PREFLIGHT)
