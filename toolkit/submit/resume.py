"""Resumes a run by its launch record in S3, without the run file."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sm_train.toolkit.costing.run_price import estimate_remaining, estimate_run
from sm_train.toolkit.costing.worst_case import remaining_alternative_costs
from sm_train.toolkit.errors import UserError
from sm_train.toolkit.jobs.stage_state import current
from sm_train.toolkit.runs.resolve import ResolvedRun, stages_without_logs
from sm_train.toolkit.submit.planned_job import next_start
from sm_train.toolkit.submit.relocation import launch_where_last
from sm_train.toolkit.submit.replicate import replicate_inputs
from sm_train.toolkit.submit.start_job import resolve_job_name, start_next_job
from sm_train.toolkit.submit.submission import choose_stages
from sm_train.toolkit.submit.submit import (
    check_budget,
    confirm,
    describe_start,
    report_alarms,
    report_started,
)
from sm_train.toolkit.terminal.console import bytes_bar, write_line

if TYPE_CHECKING:
    import boto3


def unfinished_stage(session: boto3.Session, run: ResolvedRun) -> str:
    """Return the first stage that is not done.

    Raises:
        UserError: all are done.
    """
    stage = current(stages_without_logs(session, run))
    if stage is None:
        raise UserError(
            f"{run.name}: every stage is done; `sm-train sample` samples images from its model"
        )
    return stage.name


def resume_recorded(
    session: boto3.Session,
    run: ResolvedRun,
    stage: str,
    *,
    auto_advance: bool,
    yes: bool,
    as_json: bool,
) -> None:
    """Start the stage's next job after confirmation, in the cluster and region of the newest job.

    Raises:
        UserError: the job cannot be started, or the user did not confirm.
    """
    [chosen] = choose_stages(run.config, stage)
    stages = stages_without_logs(session, run)
    start = next_start(run.name, stages, chosen, cause="resume", auto_advance=auto_advance)
    launch = resolve_job_name(session, launch_where_last(run, stages, start))
    for line in check_budget(run.config, run.region):
        write_line(f"warning: {line}", err=True)
    if not yes:
        [relocated] = choose_stages(launch.config, stage)
        cost = estimate_remaining(
            launch.config, launch.region, relocated, start.from_step, stated=run.config
        )
        alternatives = remaining_alternative_costs(run.config, run.region, stage, start.from_step)
        whole = estimate_run(run.config, run.region)
        confirm(describe_start(chosen, start), cost, whole, alternatives)
    with bytes_bar(f"copying to {launch.region}") as progress:
        replicate_inputs(session, launch.request, launch.region, stages, progress)
    name = start_next_job(session, launch)
    report_started(name, launch.region, stage, as_json=as_json)
    report_alarms(session, run.config, run.region)
