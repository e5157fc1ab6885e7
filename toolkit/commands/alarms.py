"""``sm-train alarms``: CloudWatch alarms for when the watchdog and `watch` are not running."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click
from sm_train.toolkit.commands._command import command as sm_train_command
from sm_train.toolkit.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Iterable


class Recipient(NamedTuple):
    """Where alarms go: an existing topic, or a new one for an address, encrypted with a key."""

    topic: str | None
    email: str | None
    kms_key: str | None
    unencrypted: bool


@sm_train_command(
    "sm-train alarms run.yaml --email team@example.com --kms-key alias/alarms",
    "sm-train alarms my-model --remove",
)
@click.argument("run", metavar="RUN|JOB")
@click.option(
    "--topic", metavar="ARN", help="SNS topic to notify. [default: alerts.sns_topic of the run]"
)
@click.option(
    "--email",
    metavar="ADDRESS",
    help="Create a topic for the run and subscribe this address to it.",
)
@click.option(
    "--kms-key",
    metavar="KEY",
    help="KMS key that encrypts the topic of --email. [default: output_kms_key of the run]",
)
@click.option("--unencrypted", is_flag=True, help="Create the topic of --email without a key.")
@click.option("--remove", is_flag=True, help="Delete everything this command created for the run.")
@click.option("--dry-run", is_flag=True, help="Print the requests without sending them.")
@click.option("--yes", "-y", is_flag=True, help="Do not ask for confirmation.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON on standard output.")
@click.pass_obj
def command(
    options: dict[str, Any],
    run: str,
    topic: str | None,
    email: str | None,
    kms_key: str | None,
    unencrypted: bool,
    remove: bool,
    dry_run: bool,
    yes: bool,
    as_json: bool,
) -> None:
    """Create CloudWatch alarms, which also work when the job's watchdog and `watch` do not.

    Each live job gets four: no heartbeat while its instances run, no progress for longer than
    heartbeat.max_timeout, GPU utilization below 50 %, and a disk more than 90 % full. A rule of the
    run reports every job that fails or is interrupted. submit, resume and watch create the alarms
    of each new job and delete those of ended ones. Running the command again repairs what is
    missing.
    """
    if remove and dry_run:
        raise click.UsageError("--remove and --dry-run are mutually exclusive")
    if topic is not None and email is not None:
        raise click.UsageError("--topic and --email are mutually exclusive")
    if kms_key is not None and email is None:
        raise click.UsageError("--kms-key encrypts the topic of --email; pass both")
    if unencrypted and (email is None or kms_key is not None):
        raise click.UsageError("--unencrypted creates the topic of --email, without --kms-key")
    _require_valid_addresses(topic, email)
    if remove:
        _delete(options, run, as_json)
    else:
        target = Recipient(topic, email, kms_key, unencrypted)
        _create(options, run, target, dry_run=dry_run, yes=yes, as_json=as_json)


def _require_valid_addresses(topic: str | None, email: str | None) -> None:
    import re

    from sm_train.estimators.config.fields import TOPIC_PATTERN, pattern_message

    if topic is not None and not re.fullmatch(TOPIC_PATTERN, topic):
        raise UserError(f"--topic: {topic!r} {pattern_message(TOPIC_PATTERN)}")
    if email is not None and not re.fullmatch(r"[^@\s]+@[^@\s]+", email):
        raise UserError(f"--email: {email!r} must be an address such as team@example.com")


def _delete(options: dict[str, Any], run: str, as_json: bool) -> None:
    from sm_train.toolkit.alarms.alarm_view import deleted_document, deleted_lines
    from sm_train.toolkit.alarms.alarms import delete_alarms
    from sm_train.toolkit.jobs.training_job import find_job
    from sm_train.toolkit.run_file import load
    from sm_train.toolkit.targets.resolved_run import open_session_for
    from sm_train.toolkit.targets.target import Kind, run_target
    from sm_train.toolkit.terminal.console import write_json

    session, region = open_session_for(run, options)
    if run_target(run).kind is Kind.RUN_FILE:
        name = load(Path(run)).name
    else:
        job = find_job(session, run)
        name = job.run if job is not None else run
    deleted = delete_alarms(session, name, region)
    if as_json:
        write_json(deleted_document(name, deleted))
    _print(deleted_lines(name, deleted))


def _create(
    options: dict[str, Any],
    run: str,
    wanted: Recipient,
    *,
    dry_run: bool,
    yes: bool,
    as_json: bool,
) -> None:
    from sm_train.toolkit.alarms.alarm_view import AlarmPlan, changes_document, changes_lines
    from sm_train.toolkit.alarms.alarms import find_rule, live_jobs, put_alarms, require_managed
    from sm_train.toolkit.alarms.sns_topic import (
        create_topic,
        new_topic_warnings,
        require_topic_region,
        require_usable_key,
        run_topic_arn,
        topic_warnings,
    )
    from sm_train.toolkit.targets.resolved_run import open_run
    from sm_train.toolkit.terminal.confirmation import ask
    from sm_train.toolkit.terminal.console import note, write_json, write_line

    session, resolved = open_run(run, options)
    name, region, config = resolved.name, resolved.region, resolved.config
    rule = find_rule(session, name)
    require_managed(name, rule)
    if wanted.email is not None:
        target: str | None = run_topic_arn(session, name, region)
    else:
        target = wanted.topic or config.alerts.sns_topic or (rule.topic if rule else None)
    if target is None:
        raise UserError(
            f"{name}: no topic to notify; write alerts.sns_topic in the run file, or pass "
            "--topic ARN or --email ADDRESS"
        )
    require_topic_region(target, region)
    plan = AlarmPlan(config, region, tuple(live_jobs(session, name)), target)
    key = None if wanted.unencrypted else wanted.kms_key or config.output_kms_key
    is_new = wanted.email is not None
    if is_new and not wanted.unencrypted:
        require_usable_key(key)
    warnings = new_topic_warnings(key) if is_new else topic_warnings(session, target)
    for warning in warnings:
        write_line(f"warning: {warning}", err=True)
    if dry_run:
        write_json(plan.requests() | {"warnings": warnings})
        return
    if not yes:
        ask(plan.question())
    if wanted.email is not None:
        create_topic(session, name, region, wanted.email, key)
        note(f"AWS sends a confirmation request to {wanted.email}; confirm it")
    changes = put_alarms(session, name, region, plan.alarms, target)
    if as_json:
        write_json(changes_document(plan, changes) | {"warnings": warnings})
    _print(changes_lines(plan, changes))


def _print(lines: Iterable[str]) -> None:
    from sm_train.toolkit.terminal.console import note

    for line in lines:
        note(line)
