"""Starts a stage from its run file: shows plan and cost, asks for confirmation, sends the job."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING

import click
from sm_train.cost.estimate import Estimate
from sm_train.estimators.config.load import dotted
from sm_train.estimators.config.naming import staging_bucket
from sm_train.estimators.config.placeholders import find_placeholders
from sm_train.estimators.config.schema import RunConfig
from sm_train.estimators.config.stage import StageSection
from sm_train.estimators.request.training import TrainingRequest
from sm_train.toolkit.alarms.alarms import sync_alarms
from sm_train.toolkit.aws.console import training_job_url
from sm_train.toolkit.aws.errors import translate_aws_errors
from sm_train.toolkit.aws.session import open_session
from sm_train.toolkit.costing.history import History, history_uri, read_history
from sm_train.toolkit.costing.run_price import estimate_remaining, estimate_run
from sm_train.toolkit.costing.worst_case import (
    PricedCluster,
    alternative_costs,
    most_expensive,
    remaining_alternative_costs,
    total,
    up_to_suffix,
)
from sm_train.toolkit.errors import AccessError, ExitCode, UserError
from sm_train.toolkit.jobs.launch_record import JobNameClaim
from sm_train.toolkit.jobs.stage_state import StageState
from sm_train.toolkit.runs.remediation import StartJob
from sm_train.toolkit.runs.resolve import ResolvedRun, stages_without_logs
from sm_train.toolkit.submit.plan_view import show_plan
from sm_train.toolkit.submit.relocation import (
    job_launch,
    require_run_buckets,
    require_run_data,
    stage_relocated_code,
)
from sm_train.toolkit.submit.replicate import replicate_inputs
from sm_train.toolkit.submit.start_job import resolve_job_name, with_attempt
from sm_train.toolkit.submit.submission import Submission, launch_record
from sm_train.toolkit.submit.training_data import require_components
from sm_train.toolkit.terminal.console import (
    bytes_bar,
    messages_are_hidden,
    note,
    stderr_console,
    write_json,
)
from sm_train.toolkit.terminal.formatting import format_total_usd, format_usd

if TYPE_CHECKING:
    import boto3


def submit(
    submission: Submission,
    profile: str | None,
    *,
    cause: str,
    auto_advance: bool,
    yes: bool,
    as_json: bool,
    with_plan: bool = True,
) -> None:
    """Start the submission's first stage, from its newest checkpoint if it has one.

    ``with_plan`` shows the plan first.

    Raises:
        UserError: the stage is running or done already, something is missing, the user did not
            confirm, or AWS returns an error.
    """
    from sm_train.estimators.sdk.model_trainer import create_training_job

    config, region, stage = submission.config, submission.region, submission.stages[0]
    try:
        session, bucket = session_for_jobs(config, profile, region)
    except AccessError:
        if with_plan:  # of the whole stage: checkpoints are unknown without an account
            show_plan(submission, stderr_console())
        raise
    require_run_data(session, config, region, stage.name)
    require_components(session, config)
    run = ResolvedRun(
        config.name, region, bucket, config, launch_record(submission, submission.requests[0])
    )
    stages = stages_without_logs(session, run)
    start = next_start(run.name, stages, stage, cause=cause, auto_advance=auto_advance)
    start = resolve_job_name(session, job_launch(run, start)).start
    history = _history(session, config, region)
    cost = estimate_remaining(config, region, stage, start.from_step, history)
    if with_plan:
        show_plan(replace(submission, cost=cost), stderr_console())
    check_budget(config, region, history)
    if not yes:
        alternatives = remaining_alternative_costs(
            config, region, stage.name, start.from_step, history
        )
        confirm(describe_start(stage, start), cost, alternatives)
    request = submission.requests[0]
    if start.attempt > 1 or start.from_step or auto_advance:
        request = with_attempt(request, config.name, start)
    with bytes_bar(f"copying to {region}") as progress:
        replicate_inputs(session, request, region, stages, progress)

    name, claims = request["TrainingJobName"], ExitStack()

    def record_and_claim(sent: TrainingRequest) -> None:
        """Called with the staged code's location, just before the job is created."""
        stage_relocated_code(session, config, submission.bundle, sent)
        record = launch_record(submission, sent)
        claims.enter_context(JobNameClaim(session, bucket, name, record))

    with claims, translate_aws_errors("CreateTrainingJob"):
        create_training_job(
            request,
            submission.bundle,
            boto_session=session,
            bucket=bucket,
            before_send=record_and_claim,
        )
    report_started(name, region, stage.name, as_json=as_json)
    report_alarms(session, config, region)
    following = config.stages.index(stage) + 1
    if following < len(config.stages) and not auto_advance:
        next_stage = config.stages[following].name
        note(f"To start {next_stage} after it: sm-train resume {config.name} --stage {next_stage}")
    note(f"To follow it: sm-train watch {config.name}")


def session_for_jobs(
    config: RunConfig, profile: str | None, region: str
) -> tuple[boto3.Session, str]:
    """Return a session that can start jobs of the run, and the run's home bucket.

    Raises:
        UserError: the run has no role, or credentials or a bucket are missing.
    """
    if config.role is None:
        raise UserError(
            "role: not set; write role: arn:aws:iam::ACCOUNT:role/NAME in the run file",
            ExitCode.PERMISSION,
        )
    require_own_values(config)
    session = open_session(profile, region)
    require_run_buckets(session, config, region)
    return session, staging_bucket(config, region)


def require_own_values(config: RunConfig) -> None:
    """Refuse a run file that still holds accounts or buckets of documentation.

    Raises:
        UserError: it does; one line for each.
    """
    found = find_placeholders(config)
    if found:
        lines = [f"{dotted(one.path)}: {one.value} is a placeholder; {one.fix}" for one in found]
        raise UserError("\n".join(lines))


def next_start(
    run: str, stages: Sequence[StageState], stage: StageSection, *, cause: str, auto_advance: bool
) -> StartJob:
    """Return the start of the stage's next job.

    Raises:
        UserError: a job of the stage is live, or the stage is done.
    """
    [state] = [one for one in stages if one.name == stage.name]
    job = state.job
    if job is not None and job.live:
        raise UserError(
            f"{stage.name}: {job.name} is {job.status}; a stage has one job at a time: `sm-train "
            f"status {run}` shows it, `sm-train stop {run}` ends it"
        )
    if state.state == "done":
        raise UserError(
            f"{stage.name}: is done; choose another with --stage, raise its max_steps, or give "
            "the run another name"
        )
    attempt = job.attempt + 1 if job else 1
    return StartJob(stage.name, attempt, state.resumes_from, cause, "", auto_advance)


def check_budget(config: RunConfig, region: str, history: History | None = None) -> None:
    """Compare the whole run's expected cost with its budget; warn, or stop as the run file says.

    Raises:
        UserError: the run costs more, and the run file says to stop then.
    """
    if config.budget is None:
        return
    expected = total(estimate_run(config, region, history=history))
    if expected["cost_at_least_usd"] <= config.budget.usd:
        if expected["cost_usd"] is None:
            click.echo(
                f"warning: budget.usd: {format_usd(config.budget.usd)} cannot be enforced: a price "
                f"or a speed is unknown; the run costs {format_total_usd(expected)}",
                err=True,
            )
        _warn_worst_case(config, config.budget.usd, region, history)
        return
    message = (
        f"budget.usd: the run costs {format_total_usd(expected)}, "
        f"more than {format_usd(config.budget.usd)}"
    )
    if config.budget.on_exceed == "stop":
        raise UserError(f"{message}; raise it or shorten the run", ExitCode.OVER_BUDGET)
    click.echo(f"warning: {message}", err=True)


def _warn_worst_case(
    config: RunConfig, budget_usd: float, region: str, history: History | None
) -> None:
    """Warn if the run is within its budget, but not on the most expensive cluster it may get."""
    worst = most_expensive(alternative_costs(config, region, history))
    if worst is None:
        return
    cluster, cost = worst
    if total(cost)["cost_at_least_usd"] > budget_usd:
        instance_type = cluster.config.cluster.instance_type
        click.echo(
            f"warning: budget.usd: on {instance_type} in {cluster.region} ({cluster.key}) the run "
            f"would cost {format_total_usd(total(cost))}, more than {format_usd(budget_usd)}",
            err=True,
        )


def confirm(action: str, cost: Estimate, alternatives: list[PricedCluster]) -> None:
    """Ask before money is spent; ``alternatives`` is the cost on other clusters the job may get.

    Raises:
        UserError: the user did not confirm.
    """
    expected = total(cost)
    amount = "an unknown price" if not expected["cost_at_least_usd"] else format_total_usd(expected)
    ask(f"{action} for {amount}{up_to_suffix(cost, alternatives)}?")


def ask(question: str) -> None:
    """Ask a yes/no question.

    Raises:
        UserError: the answer was not yes.
    """
    try:
        agreed = click.confirm(question, err=True)
    except click.Abort:
        if sys.stdin.isatty():  # Ctrl-C at the prompt
            raise
        raise UserError("not confirmed; --yes starts without asking") from None
    if not agreed:
        raise UserError("nothing was started", ExitCode.INTERRUPTED)


def report_started(name: str, region: str, stage: str, *, as_json: bool) -> None:
    """Print the name of the started job and its page in the console; with `--quiet` the name only,
    as the result.
    """
    if as_json:
        write_json({"training_job_name": name, "region": region, "stage": stage})
    elif messages_are_hidden():
        click.echo(name)
    note(f"Started {name}")
    note(training_job_url(region, name))


def report_alarms(session: boto3.Session, config: RunConfig, region: str) -> None:
    """Update the run's alarms, if it has any, to its live job."""
    message = sync_alarms(session, config, region)
    if message is not None:
        note(message)


def describe_start(stage: StageSection, start: StartJob) -> str:
    """Describe the start for the confirmation."""
    if not start.from_step:
        return f"Start {stage.name}"
    return f"Resume {stage.name} at step {start.from_step:,} of {stage.max_steps:,}"


def _history(session: boto3.Session, config: RunConfig, region: str) -> History | None:
    """Return the measurements of the run's finished jobs; None, with a warning, if unreadable."""
    try:
        return read_history(session, history_uri(config, region))
    except UserError as error:
        click.echo(f"warning: estimated without the run's history: {error}", err=True)
        return None
