"""Starts a stage from its run file: the plan and the dollars are shown, a yes is asked for."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import click
from sm_train.cost.estimate import Estimate
from sm_train.estimators.config.naming import staging_bucket
from sm_train.estimators.config.placement import Placement, placements
from sm_train.estimators.config.schema import RunConfig
from sm_train.estimators.config.stage import StageSection
from sm_train.estimators.request.training import TrainingRequest
from sm_train.toolkit.alarms.alarms import sync_alarms
from sm_train.toolkit.aws import session as aws
from sm_train.toolkit.costing.history import History, history_uri, read_history
from sm_train.toolkit.costing.run_price import estimate_remaining, estimate_run
from sm_train.toolkit.costing.worst_case import (
    Priced,
    fallback_costs,
    most_expensive,
    remaining_fallback_costs,
    total,
    up_to_suffix,
)
from sm_train.toolkit.errors import ExitCode, UserError
from sm_train.toolkit.jobs.launch_record import claim
from sm_train.toolkit.jobs.stage_state import StageState
from sm_train.toolkit.runs.remediation import StartJob
from sm_train.toolkit.runs.resolve import Run, stages_without_logs
from sm_train.toolkit.submit.plan_view import show_plan
from sm_train.toolkit.submit.replicate import replicate_inputs, stage_fallback_code
from sm_train.toolkit.submit.start_job import (
    release_claim_on_rejection,
    resolve_job_name,
    with_attempt,
)
from sm_train.toolkit.submit.submission import Submission, launch_record
from sm_train.toolkit.terminal.console import bytes_bar, stderr_console, write_json
from sm_train.toolkit.terminal.formatting import format_total_usd, format_usd


def submit(
    submission: Submission,
    profile: str | None,
    *,
    cause: str,
    chain: bool,
    yes: bool,
    as_json: bool,
) -> None:
    """Start the submission's first stage, from its newest checkpoint if it has one.

    Raises:
        UserError: it is running or done already, something is missing, nobody said yes, or AWS
            refuses.
    """
    from sm_train.estimators.sdk.model_trainer import create_training_job

    config, region, stage = submission.config, submission.region, submission.stages[0]
    session, bucket = session_for_jobs(config, profile, region)
    for place in placements(config, region):
        _require_data(session, place, stage.name)
    run = Run(config.name, region, bucket, config, None)
    stages = stages_without_logs(session, run)
    start = submit_next(session, run, stages, stage, cause=cause, chain=chain)
    history = _history(session, config, region)
    cost = estimate_remaining(config, region, stage, start.from_step, history)
    show_plan(replace(submission, cost=cost), stderr_console())
    check_budget(config, region, history)
    if not yes:
        others = remaining_fallback_costs(config, region, stage.name, start.from_step, history)
        confirm(what(stage, start), cost, others)
    request = submission.requests[0]
    if start.attempt > 1 or start.from_step or chain:
        request = with_attempt(request, config.name, start)
    with bytes_bar(f"copying to {region}") as progress:
        replicate_inputs(session, request, region, stages, progress)

    name, freed = request["TrainingJobName"], ExitStack()

    def keep(sent: TrainingRequest) -> None:
        stage_fallback_code(session, submission.elsewhere, sent)
        record = launch_record(submission, sent)
        mine = claim(session, bucket, name, record)
        freed.enter_context(release_claim_on_rejection(session, bucket, name, record, mine))

    with freed, aws.translate_aws_errors("CreateTrainingJob"):
        create_training_job(
            request, submission.bundle, boto_session=session, bucket=bucket, before_send=keep
        )
    report_started(name, region, stage.name, as_json=as_json)
    report_alarms(session, config, region)
    following = config.stages.index(stage) + 1
    if following < len(config.stages) and not chain:
        later = config.stages[following].name
        click.echo(f"When it has ended: sm-train resume {config.name} --stage {later}", err=True)
    click.echo(f"To follow it: sm-train watch {config.name}", err=True)


def _require_data(session: Any, place: Placement, stage: str) -> None:
    """Refuse a place whose data are not there, or too few for the stage's machines."""
    there, data = aws.for_region(session, place.region), place.config.data
    [one] = [one for one in place.config.stages if one.name == stage]
    aws.require_bucket(there, data.uri.split("/")[2], place.region, "data.uri")
    instances = place.config.cluster.max_instances(one.instances)
    aws.require_shards(there, data.uri, instances)
    aws.require_index(there, data.uri, data.index_uri)


def session_for_jobs(config: RunConfig, profile: str | None, region: str) -> tuple[Any, str]:
    """A session that can start jobs of the run, and the bucket of the run's own.

    Raises:
        UserError: no role, no credentials, or no such bucket there.
    """
    if config.role is None:
        raise UserError(
            "role: not set; write role: arn:aws:iam::ACCOUNT:role/NAME in the run file",
            ExitCode.PERMISSION,
        )
    session = aws.open_session(profile, region)
    bucket = staging_bucket(config, region)
    aws.require_bucket(session, bucket, region, "bucket")
    for place in placements(config, region)[1:]:
        there = aws.for_region(session, place.region)
        aws.require_bucket(there, place.bucket, place.region, f"{place.where}: its bucket")
    return session, bucket


def submit_next(
    session: Any,
    run: Run,
    stages: Sequence[StageState],
    stage: StageSection,
    *,
    cause: str,
    chain: bool,
    place: int = 0,
) -> StartJob:
    """Which job of the stage would be started now, at ``place``.

    Raises:
        UserError: one is running, or the stage is done.
    """
    config = run.config
    [state] = [one for one in stages if one.name == stage.name]
    job = state.job
    if job is not None and job.live:
        raise UserError(
            f"{stage.name}: {job.name} is {job.status}; a stage has one job at a time: `sm-train "
            f"status {config.name}` shows it, `sm-train stop {config.name}` ends it"
        )
    if state.state == "done":
        raise UserError(
            f"{stage.name}: is done; choose another with --stage, raise its iterations, or give "
            "the run another name"
        )
    attempt = job.attempt + 1 if job else 1
    start = StartJob(stage.name, attempt, state.resumes_from, cause, "", chain, place)
    region = run.places[place].region
    return resolve_job_name(session, run.bucket, config.name, region, start)


def check_budget(config: RunConfig, region: str, history: History | None = None) -> None:
    """Hold the whole run's expected dollars against its budget.

    Raises:
        UserError: it costs more, and the run file says to stop then.
    """
    if config.budget is None:
        return
    own = total(estimate_run(config, region, history=history))
    if own["cost_at_least_usd"] <= config.budget.usd:
        _mind_the_dearest(config, region, history)
        return
    message = (
        f"budget.usd: the run costs {format_total_usd(own)}, "
        f"more than {format_usd(config.budget.usd)}"
    )
    if config.budget.on_exceed == "stop":
        raise UserError(f"{message}; raise it or shorten the run", ExitCode.OVER_BUDGET)
    click.echo(f"warning: {message}", err=True)


def _mind_the_dearest(config: RunConfig, region: str, history: History | None) -> None:
    """Say so where only a part of the machines that the run may be given is within its budget."""
    most = most_expensive(fallback_costs(config, region, history))
    if most is None or config.budget is None:
        return
    place, cost = most
    if total(cost)["cost_at_least_usd"] > config.budget.usd:
        machine = place.config.cluster.instance_type
        click.echo(
            f"warning: budget.usd: on {machine} in {place.region} ({place.where}) the run would "
            f"cost {format_total_usd(total(cost))}, more than {format_usd(config.budget.usd)}",
            err=True,
        )


def confirm(what: str, cost: Estimate, others: list[Priced]) -> None:
    """Ask before money is spent; ``others`` is what it costs on other machines that may come.

    Raises:
        UserError: nobody said yes.
    """
    own = total(cost)
    amount = "an unknown price" if not own["cost_at_least_usd"] else format_total_usd(own)
    ask(f"{what} for {amount}{up_to_suffix(cost, others)}?")


def ask(question: str) -> None:
    """Ask a question that only a yes answers well.

    Raises:
        UserError: nobody said yes.
    """
    try:
        agreed = click.confirm(question, err=True)
    except click.Abort:
        if sys.stdin.isatty():  # Ctrl-C at the question
            raise
        raise UserError("not confirmed; --yes starts without asking") from None
    if not agreed:
        raise UserError("nothing was started", ExitCode.INTERRUPTED)


def report_started(name: str, region: str, stage: str, *, as_json: bool) -> None:
    """Say what runs now, and where to look at it."""
    if as_json:
        write_json({"training_job_name": name, "region": region, "stage": stage})
    click.echo(f"Started {name}", err=True)
    click.echo(
        f"https://{region}.console.aws.amazon.com/sagemaker/home?region={region}#/jobs/{name}",
        err=True,
    )


def report_alarms(session: Any, config: RunConfig, region: str) -> None:
    """Keep the run's alarms, if it has any, to the job that runs now."""
    kept = sync_alarms(session, config, region)
    if kept is not None:
        click.echo(kept, err=True)


def what(stage: StageSection, start: StartJob) -> str:
    """The start as the question puts it."""
    if not start.from_step:
        return f"Start {stage.name}"
    return f"Go on with {stage.name} at step {start.from_step:,} of {stage.max_steps:,}"


def _history(session: Any, config: RunConfig, region: str) -> History | None:
    """What the run's finished jobs showed; an estimate does without where it may not be read."""
    try:
        return read_history(session, history_uri(config, region))
    except UserError as error:
        click.echo(f"warning: estimated without the run's history: {error}", err=True)
        return None
