"""``sm-train alarms``: CloudWatch alarms for when the watchdog and `watch` are not running."""

from __future__ import annotations

from typing import Any

import click
from sm_train.toolkit.base.errors import UserError
from sm_train.toolkit.command_base.command import command as sm_train_command


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
    from sm_train.toolkit.runs.alarms.alarms_of_run import Recipient, create_for_run, delete_for_run

    if remove:
        delete_for_run(options, run, as_json)
    else:
        recipient = Recipient(topic, email, kms_key, unencrypted)
        create_for_run(options, run, recipient, dry_run=dry_run, yes=yes, as_json=as_json)


def _require_valid_addresses(topic: str | None, email: str | None) -> None:
    import re

    from sm_train.estimators.config.fields import TOPIC_PATTERN, pattern_message

    if topic is not None and not re.fullmatch(TOPIC_PATTERN, topic):
        raise UserError(f"--topic: {topic!r} {pattern_message(TOPIC_PATTERN)}")
    if email is not None and not re.fullmatch(r"[^@\s]+@[^@\s]+", email):
        raise UserError(f"--email: {email!r} must be an address such as team@example.com")
