"""Creates and deletes the alarms of the run that a user names."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from sm_train.toolkit.base.errors import UserError
from sm_train.toolkit.platforms.find_run import run_target
from sm_train.toolkit.platforms.sagemaker.sagemaker_run import open_run, open_session_for
from sm_train.toolkit.platforms.target import Kind
from sm_train.toolkit.run_file.run_file import load
from sm_train.toolkit.runs.alarms.alarm_view import (
    AlarmPlan,
    changes_document,
    changes_lines,
    deleted_document,
    deleted_lines,
)
from sm_train.toolkit.runs.alarms.alarms import (
    delete_alarms,
    find_rule,
    live_jobs,
    put_alarms,
    require_managed,
)
from sm_train.toolkit.runs.alarms.sns_topic import (
    create_topic,
    new_topic_warnings,
    require_topic_region,
    require_usable_key,
    run_topic_arn,
    topic_warnings,
)
from sm_train.toolkit.terminal.confirmation import ask
from sm_train.toolkit.terminal.console import note, write_json, write_line


class Recipient(NamedTuple):
    """Where alarms go: an existing topic, or a new one for an address, encrypted with a key."""

    topic: str | None
    email: str | None
    kms_key: str | None
    unencrypted: bool


def delete_for_run(options: dict[str, Any], run: str, as_json: bool) -> None:
    """Delete the alarms and the rule of the run that ``run`` names, also if its jobs are gone.

    Raises:
        UserError: AWS returns an error.
    """
    session, region = open_session_for(run, options)
    target = run_target(run)
    if target.kind is Kind.RUN_FILE:
        name = load(target.path).name
    else:
        name = target.text.partition("--")[0]
    deleted = delete_alarms(session, name, region)
    if as_json:
        write_json(deleted_document(name, deleted))
    _print(deleted_lines(name, deleted))


def create_for_run(
    options: dict[str, Any],
    run: str,
    wanted: Recipient,
    *,
    dry_run: bool,
    yes: bool,
    as_json: bool,
) -> None:
    """Show what is created for a run, ask, and create its alarms, rule and topic.

    Raises:
        UserError: there is no such run or no topic, the user did not confirm, or AWS returns an
            error.
    """
    resolved = open_run(run, options)
    session, name = resolved.session, resolved.name
    region, config = resolved.region, resolved.config
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
    for line in lines:
        note(line)
