"""``sm-train alarms``: what AWS itself tells of a run, when nothing else does."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from sm_train.toolkit.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from sm_train.estimators.config.schema import RunConfig


@click.command()
@click.argument("run", metavar="RUN|JOB")
@click.option("--topic", metavar="ARN", help="SNS topic to tell; the run file's otherwise.")
@click.option(
    "--email", metavar="ADDRESS", help="Make a topic for the run that tells this address."
)
@click.option("--cloudformation", is_flag=True, help="Print a template; make nothing.")
@click.option("--remove", is_flag=True, help="Remove what this command made for the run.")
@click.option("--dry-run", is_flag=True, help="Print the requests; make nothing.")
@click.option("--yes", "-y", is_flag=True, help="Make them without asking.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON on standard output.")
@click.pass_obj
def command(
    options: dict[str, Any],
    run: str,
    topic: str | None,
    email: str | None,
    cloudformation: bool,
    remove: bool,
    dry_run: bool,
    yes: bool,
    as_json: bool,
) -> None:
    """Make CloudWatch alarms that tell of a run when its own monitor and `watch` are dead.

    A live job gets four: no heartbeat while its machines run, a standstill above
    heartbeat.max_timeout,
    GPUs used less than half, a disk more than 90 % full. A rule of the run tells of every job that
    fails or is cut short. submit, resume and watch then give each new job its alarms and remove
    those of ended ones. Given again, the command puts right what is not as it should be.

    --cloudformation takes a run file without asking AWS, for the first job of each stage; by a
    run's name it is for the job that lives.
    """
    if sum((cloudformation, remove, dry_run)) > 1:
        raise click.UsageError("give one of --cloudformation, --remove and --dry-run")
    if topic is not None and email is not None:
        raise click.UsageError("--topic and --email exclude each other")
    _require_addresses(topic, email)
    if remove:
        _remove(options, run, as_json)
    elif cloudformation:
        _print_template(options, run, topic, email, as_json)
    else:
        _make(options, run, topic, email, dry_run=dry_run, yes=yes, as_json=as_json)


def _require_addresses(topic: str | None, email: str | None) -> None:
    import re

    from sm_train.estimators.config.fields import TOPIC_PATTERN, pattern_message

    if topic is not None and not re.fullmatch(TOPIC_PATTERN, topic):
        raise UserError(f"--topic: {topic!r} {pattern_message(TOPIC_PATTERN)}")
    if email is not None and not re.fullmatch(r"[^@\s]+@[^@\s]+", email):
        raise UserError(f"--email: {email!r} must be an address such as team@example.com")


def _remove(options: dict[str, Any], run: str, as_json: bool) -> None:
    from sm_train.toolkit.alarms.alarms import remove
    from sm_train.toolkit.alarms.view import removed_document, removed_words
    from sm_train.toolkit.jobs.training_job import find_job
    from sm_train.toolkit.run_file import load
    from sm_train.toolkit.runs.resolve import is_run_file, open_session_for
    from sm_train.toolkit.terminal.console import write_json

    session, region = open_session_for(run, options)
    if is_run_file(run):
        name = load(Path(run)).name
    else:
        job = find_job(session, run)
        name = job.run if job is not None else run
    removed = remove(session, name, region)
    if as_json:
        write_json(removed_document(name, removed))
    _tell(removed_words(name, removed))


def _print_template(
    options: dict[str, Any], run: str, topic: str | None, email: str | None, as_json: bool
) -> None:
    from sm_train.estimators.request.alarms import first_jobs
    from sm_train.toolkit.alarms.alarms import live_jobs
    from sm_train.toolkit.alarms.sns_topic import require_region
    from sm_train.toolkit.alarms.view import as_yaml, cloudformation, deploy_words
    from sm_train.toolkit.aws.session import resolve_region
    from sm_train.toolkit.run_file import load
    from sm_train.toolkit.runs.resolve import is_run_file, open_run
    from sm_train.toolkit.terminal.console import write_json

    if is_run_file(run):
        config = load(Path(run))
        region = resolve_region(options["region"], config.region, options["profile"])
        jobs = first_jobs(config)
    else:
        session, found = open_run(run, options)
        config, region, jobs = found.config, found.region, live_jobs(session, found.name)
    told = None if email else topic or config.alerts.sns_topic
    if told is None and email is None:
        raise _nobody(config)
    if told is not None:
        require_region(told, region)
    document = cloudformation(config, region, jobs, told, email)
    text = as_yaml(document)
    if as_json:
        write_json(document)
    else:
        click.echo(text, nl=False)
    _tell(deploy_words(config, text, jobs, made=told is None))


def _make(
    options: dict[str, Any],
    run: str,
    topic: str | None,
    email: str | None,
    *,
    dry_run: bool,
    yes: bool,
    as_json: bool,
) -> None:
    from sm_train.toolkit.alarms.alarms import find_rule, live_jobs, put, require_ours
    from sm_train.toolkit.alarms.sns_topic import doubts, make_topic, own_topic, require_region
    from sm_train.toolkit.alarms.view import Plan, changed, changed_words
    from sm_train.toolkit.runs.resolve import open_run
    from sm_train.toolkit.submit.submit import ask
    from sm_train.toolkit.terminal.console import write_json

    session, found = open_run(run, options)
    rule = find_rule(session, found.name)
    require_ours(found.name, rule)
    if email is not None:
        told = own_topic(session, found.name, found.region)
    else:
        named = topic or found.config.alerts.sns_topic or (rule.topic if rule else None)
        if named is None:
            raise _nobody(found.config)
        told = named
    require_region(told, found.region)
    plan = Plan(found.config, found.region, tuple(live_jobs(session, found.name)), told)
    warnings = [] if email is not None else doubts(session, told)
    for warning in warnings:
        click.echo(f"warning: {warning}", err=True)
    if dry_run:
        write_json(plan.requests() | {"warnings": warnings})
        return
    if not yes:
        ask(plan.question())
    if email is not None:
        make_topic(session, found.name, found.region, email)
        click.echo(f"{email} gets a mail from AWS and must confirm it", err=True)
    changes = put(session, found.name, found.region, plan.alarms, told)
    if as_json:
        write_json(changed(plan, changes) | {"warnings": warnings})
    _tell(changed_words(plan, changes))


def _nobody(config: RunConfig) -> UserError:
    return UserError(
        f"{config.name}: nobody to tell; write alerts.sns_topic in the run file, or give "
        "--topic ARN or --email ADDRESS"
    )


def _tell(lines: Iterable[str]) -> None:
    for line in lines:
        click.echo(line, err=True)
