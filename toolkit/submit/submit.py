"""Starts a stage from its run file: shows plan and cost, asks for confirmation, sends the job."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from sm_train.cost.estimate import Estimate
from sm_train.cost.json_document import as_document
from sm_train.estimators.config.load import dotted
from sm_train.estimators.config.naming import staging_bucket
from sm_train.estimators.config.schema import RunConfig
from sm_train.estimators.config.stage import StageSection
from sm_train.estimators.request.training_request import TrainingRequest
from sm_train.toolkit.aws.session import open_session, open_session_if_possible, training_job_url
from sm_train.toolkit.base.errors import AccessError, ExitCode, UserError
from sm_train.toolkit.base.extras import require_extra
from sm_train.toolkit.planning.history import History
from sm_train.toolkit.planning.run_price import (
    PricedCluster,
    alternative_costs,
    estimate_run,
    most_expensive,
    remaining_alternative_costs,
    total,
    up_to_suffix,
)
from sm_train.toolkit.planning.scope import budget_restriction
from sm_train.toolkit.planning.spent import Projection
from sm_train.toolkit.platforms.sagemaker.sagemaker_run import options_elsewhere
from sm_train.toolkit.run_file.placeholders import find_placeholders
from sm_train.toolkit.runs.alarms.alarms import sync_alarms
from sm_train.toolkit.runs.remediation import StartJob
from sm_train.toolkit.submit.plan_view import show_plan
from sm_train.toolkit.submit.planned_job import (
    PlannedJob,
    Progress,
    RunPlan,
    changes_of,
    plan_job,
    plan_offline,
    start_planned,
)
from sm_train.toolkit.submit.relocation import require_run_buckets
from sm_train.toolkit.submit.submission import Submission, with_stored_facts
from sm_train.toolkit.terminal.confirmation import ask
from sm_train.toolkit.terminal.console import (
    bytes_bar,
    messages_are_hidden,
    note,
    stderr_console,
    write_json,
    write_line,
)
from sm_train.toolkit.terminal.formatting import format_total_usd, format_usd

if TYPE_CHECKING:
    import boto3


StartCheck = Callable[
    ["boto3.Session", RunConfig, StageSection, TrainingRequest, Estimate], str | None
]
"""Refuses a job with its request and cost by an error; returns what is worth noting."""


def submit(
    submission: Submission,
    profile: str | None,
    *,
    cause: str,
    auto_advance: bool,
    yes: bool,
    as_json: bool,
    take_over: bool = False,
    before_start: StartCheck = lambda *_: None,
) -> str:
    """Show the plan of the submission's first stage, ask, and start it; return the job.

    It starts from the stage's newest checkpoint, if there is one. ``before_start`` may refuse the
    job that was planned, before the question; it returns what is worth noting.

    Raises:
        UserError: the stage is running or done already, something is missing, the user did not
            confirm, or AWS returns an error.
    """
    config, region, stage = submission.config, submission.region, submission.stages[0]
    try:
        session, bucket = session_for_jobs(config, profile, region)
    except AccessError:
        # Checkpoints are unknown without an account: this is the plan of the whole run.
        show_plan(plan_offline(submission), stderr_console())
        raise
    planned = plan_job(
        submission, session, bucket, cause=cause, auto_advance=auto_advance, take_over=take_over
    )
    _warn(planned.warnings)
    show_plan(planned.plan, stderr_console())
    _warn(budget_warnings(planned))
    config = planned.plan.submission.config
    check_start(before_start, session, config, stage, planned.request, planned.plan.cost)
    if not yes:
        alternatives = remaining_alternative_costs(
            config, region, stage.name, planned.start.from_step, planned.history
        )
        action = describe_start(stage, planned.start)
        confirm(action, planned.plan.cost, planned.plan.projection, alternatives)
    with bytes_bar(f"copying to {region}") as progress:
        started = start(planned, progress)
    report_started(started.job, region, stage.name, as_json=as_json)
    if started.alarms is not None:
        note(started.alarms)
    command = "sm-train" + "".join(options_elsewhere(region, profile))
    following = config.stages.index(stage) + 1
    if following < len(config.stages) and not auto_advance:
        next_stage = config.stages[following].name
        note(f"To start {next_stage} after it: {command} resume {config.name} --stage {next_stage}")
    note(f"To follow it: {command} watch {config.name}")
    return started.job


@dataclass(frozen=True)
class StartResult:
    """A started job, and what became of the run's alarms, if it has any."""

    job: str
    alarms: str | None


def start(planned: PlannedJob, progress: Progress = lambda done, total: None) -> StartResult:
    """Start a planned job, and point the run's alarms to it.

    Raises:
        UserError: another process is starting the job, or AWS returns an error.
    """
    submission = planned.plan.submission
    name = start_planned(planned, progress)
    return StartResult(name, sync_alarms(planned.session, submission.config, submission.region))


def budget_warnings(planned: PlannedJob) -> list[str]:
    """Compare what the run has cost and will cost with its budget; return warnings.

    Raises:
        UserError: the run costs more, and the run file says to stop then (exit 7).
    """
    submission = planned.plan.submission
    return check_budget(
        submission.config, submission.region, planned.history, planned.plan.projection
    )


def check_start(
    before_start: StartCheck,
    session: boto3.Session,
    config: RunConfig,
    stage: StageSection,
    request: TrainingRequest,
    cost: Estimate,
) -> None:
    """Let a check refuse what is about to start, and say what is worth noting.

    Raises:
        UserError: it refuses.
    """
    noted = before_start(session, config, stage, request, cost)
    if noted is not None:
        note(noted)
    watcher = "`sm-train template watch-lambda RUN` prints a function that watches without it"
    _warn(watcher_warnings(cost, watcher))


def watcher_warnings(cost: Estimate, proposal: str) -> list[str]:
    """Return a warning about a large start that nothing watches while this laptop sleeps.

    ``proposal`` is what would.
    """
    usd = total(cost)["cost_usd"]
    if usd is None or usd <= SLEEPLESS_USD:
        return []
    return [
        f"this start costs {format_usd(usd)}, and a laptop that sleeps stops nothing and alerts "
        f"nobody: {proposal}"
    ]


SLEEPLESS_USD = 10_000.0
"""A start that costs more deserves a watcher that does not sleep."""


def dry_run(
    submission: Submission, profile: str | None, before_start: StartCheck = lambda *_: None
) -> RunPlan:
    """Return the plan, compared with the last submitted job if this machine has credentials.

    Then ``before_start`` says whether a start would be refused.

    Without credentials in the environment or in a profile, nothing is sent.
    """
    session = open_session_if_possible(profile, submission.region)
    if session is None:
        return plan_offline(submission)
    submission = with_stored_facts(submission, session)
    plan = plan_offline(submission)
    bucket = staging_bucket(submission.config, submission.region)
    try:
        plan = replace(plan, changes=changes_of(session, bucket, submission))
    except UserError as error:
        _warn([f"not compared with the last job: {error}"])
        return plan
    request = submission.requests[0]
    try:
        before_start(session, submission.config, plan.stage, request, plan.cost)
    except UserError as error:
        _warn([f"submit refuses this start: {error}"])
    return plan


def _warn(lines: Iterable[str]) -> None:
    for line in lines:
        write_line(f"warning: {line}", err=True)


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
    require_extra("aws", "sagemaker", purpose="a job's start")
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
        lines = [
            f"{dotted(placeholder.path)}: {placeholder.value} is a placeholder; {placeholder.fix}"
            for placeholder in found
        ]
        raise UserError("\n".join(lines))


def check_budget(
    config: RunConfig,
    region: str,
    history: History | None = None,
    projection: Projection | None = None,
) -> list[str]:
    """Compare the whole run's expected cost with its budget; return warnings.

    With ``projection``, what is spent counts as spent, and the rest as it is left.

    Raises:
        UserError: the run costs more, and the run file says to stop then (exit 7).
    """
    if config.budget is None:
        return []
    limit = config.budget.usd
    document = as_document(estimate_run(config, region, history=history))
    expected = document["total"]
    if projection is not None:
        known = (
            projection.known_spent_usd,
            *(usd or 0.0 for usd in projection.stages.values()),
        )
        expected = {"cost_usd": projection.total_usd, "cost_at_least_usd": sum(known)}
    if expected["cost_at_least_usd"] > limit:
        message = (
            f"budget.usd: the run costs {format_total_usd(expected)}, more than {format_usd(limit)}"
        )
        if config.budget.on_exceed == "stop":
            raise UserError(f"{message}; raise it or shorten the run", ExitCode.OVER_BUDGET)
        return [message]
    unknown = []
    if expected["cost_usd"] is None:
        cause = budget_restriction(document, config.budget) or "a price or a speed is unknown"
        unknown = [
            f"budget.usd: {format_usd(limit)}: {cause}; the run costs {format_total_usd(expected)}"
        ]
    return [*unknown, *_worst_case_warnings(config, limit, region, history)]


def _worst_case_warnings(
    config: RunConfig, budget_usd: float, region: str, history: History | None
) -> list[str]:
    """Warn if the run is within its budget, but not on the most expensive cluster it may get."""
    worst = most_expensive(alternative_costs(config, region, history))
    if worst is None:
        return []
    cluster, cost = worst
    if total(cost)["cost_at_least_usd"] <= budget_usd:
        return []
    instance_type = cluster.config.cluster.instance_type
    return [
        f"budget.usd: on {instance_type} in {cluster.region} ({cluster.key}) the run "
        f"would cost {format_total_usd(total(cost))}, more than {format_usd(budget_usd)}"
    ]


def confirm(
    action: str,
    cost: Estimate,
    projection: Projection | None,
    alternatives: list[PricedCluster],
) -> None:
    """Ask before money is spent on ``cost``, which is a part of the run's ``projection``.

    ``alternatives`` is the cost on other clusters that the job may get.

    Raises:
        UserError: the user did not confirm.
    """
    run, of_run = "", ""
    if projection is not None and projection.known_spent_usd:
        run = f" (the run: {projection})"
    elif projection is not None and projection.total_usd != total(cost)["cost_usd"]:
        of_run = f" of {format_usd(projection.total_usd)}"
    ask(f"{action}, {_amount(cost)}{of_run}{up_to_suffix(cost, alternatives)}{run}?")


def _amount(cost: Estimate) -> str:
    expected = total(cost)
    return format_total_usd(expected) if expected["cost_at_least_usd"] else "an unknown price"


def report_started(name: str, region: str, stage: str, *, as_json: bool) -> None:
    """Print the name of the started job and its page in the console; with `--quiet` the name only,
    as the result.
    """
    if as_json:
        write_json({"training_job_name": name, "region": region, "stage": stage})
    elif messages_are_hidden():
        write_line(name)
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
