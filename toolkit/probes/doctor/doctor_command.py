"""Examines a cluster on this computer, in a short job, or by a canary."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path

from sm_train.estimators.config.schema import RunConfig
from sm_train.estimators.config.stage import StageSection
from sm_train.toolkit.aws.session import resolve_region
from sm_train.toolkit.base.errors import ExitCode, UserError
from sm_train.toolkit.base.extras import require_local_run
from sm_train.toolkit.memory.sharding_choice import with_sharding
from sm_train.toolkit.probes.doctor.canary_command import start_canary
from sm_train.toolkit.probes.doctor.doctor import examine_local
from sm_train.toolkit.probes.doctor.doctor_job import (
    DoctorJob,
    open_jobs,
    prepare_job,
    start,
    wait_for_verdict,
)
from sm_train.toolkit.probes.doctor.doctor_options import DoctorOptions
from sm_train.toolkit.probes.doctor.doctor_view import show_result
from sm_train.toolkit.probes.short_jobs.short_job import confirm
from sm_train.toolkit.records.local_folder import DEFAULT_FOLDER
from sm_train.toolkit.run_file.run_file import load
from sm_train.toolkit.submit.submission import choose_stages
from sm_train.toolkit.terminal.console import stderr_console, write_json, write_line
from sm_train.toolkit.terminal.formatting import format_duration, format_usd


def run_doctor(options: DoctorOptions) -> None:
    """Examine the cluster of a stage and show what was found.

    Raises:
        UserError: it cannot start, the user did not confirm, the cluster is unfit, or a step of the
            canary did not work.
    """
    config = with_sharding(load(options.run))
    stage = choose_stages(config, options.stage)[0]
    if options.local and not options.canary:
        _examine_here(options, config, stage)
        return
    region = resolve_region(options.region, config.region, options.profile)
    if options.canary:
        start_canary(config, stage, region, options)
        return
    base = options.run.parent
    job = prepare_job(config, stage, base, region, datetime.now())
    if options.dry_run:
        write_json(job.as_dict() if options.as_json else job.request)
        write_line(_price_line(job), err=True)
        return
    _examine_in_job(options, job, base)


def _examine_here(options: DoctorOptions, config: RunConfig, stage: StageSection) -> None:
    require_local_run()
    from sm_train.toolkit.submit.local.launcher import default_nodes

    document = examine_local(
        config,
        stage,
        base=options.run.parent,
        nodes=options.nodes or default_nodes(stage),
        processes=options.processes,
        output=options.output or DEFAULT_FOLDER / config.name,
        console=stderr_console(),
    )
    show_result(document, stderr_console(shows_results=True))
    if options.as_json:
        write_json(document)
    _require_fit(document["verdict"]["level"])


def _examine_in_job(options: DoctorOptions, job: DoctorJob, base: Path) -> None:
    jobs = open_jobs(job, base, options.profile)
    confirm(_price_line(job), yes=options.yes)
    outcome = wait_for_verdict(job, start(job, jobs), jobs)
    level, sentence = outcome.event["level"], outcome.event["sentence"]
    if outcome.result is not None:
        show_result(outcome.result, stderr_console(shows_results=True))
    else:
        write_line(sentence, err=True)
    if options.as_json:
        names = {"training_job_name": outcome.job, "region": jobs.region}
        document = {"results": job.results_uri, "level": level, "sentence": sentence}
        write_json(names | document | {"result": outcome.result})
    _require_fit(level)


def _require_fit(level: str) -> None:
    if level == "fail":
        raise UserError("the cluster is unfit: see the findings", ExitCode.PREFLIGHT)


def _price_line(job: DoctorJob) -> str:
    stage, price = job.submission.stages[0], job.price
    return (
        f"{stage.instances} × {job.submission.config.cluster.instance_type} for about "
        f"{format_duration(price.seconds)}: {format_usd(price.usd)}, at most "
        f"{format_usd(price.max_usd)}; the result is stored in {job.results_uri}"
    )
