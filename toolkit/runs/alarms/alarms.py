"""Create a run's alarms and rule in AWS, keep them in sync with the live jobs, and delete them.

The rule, which carries the run's tag, records that a run has alarms and which topic they notify.
Alarms are found by name (:func:`sm_train.estimators.request.alarm_requests.alarm_prefix`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sm_train.estimators.config.schema import RunConfig
from sm_train.estimators.request.alarm_requests import (
    Alarm,
    MonitoredJob,
    alarm_prefix,
    failure_rule,
    job_alarms,
    rule_name,
)
from sm_train.estimators.request.training_request import RUN_TAG
from sm_train.toolkit.aws.aws_errors import translate_aws_errors
from sm_train.toolkit.base.errors import ExitCode, UserError
from sm_train.toolkit.records.training_job import TrainingJob, jobs_of_run
from sm_train.toolkit.runs.alarms.sns_topic import delete_topic

if TYPE_CHECKING:
    import boto3
    from types_boto3_cloudwatch.client import CloudWatchClient

_DELETE_BATCH = 100
"""Maximum number of names per DeleteAlarms call."""


@dataclass(frozen=True)
class StoredRule:
    """A run's rule in AWS; ``managed`` if `sm-train alarms` created it."""

    topic: str | None
    targets: tuple[str, ...]
    managed: bool


@dataclass(frozen=True)
class AlarmChanges:
    """Names of the alarms that were created or updated, and of the deleted ones of ended jobs."""

    put: tuple[str, ...]
    deleted: tuple[str, ...]


@dataclass(frozen=True)
class DeletedAlarms:
    """What was deleted: alarm names, the rule's name, and the ARN of the run's own topic."""

    alarms: tuple[str, ...]
    rule: str | None
    topic: str | None


def live_jobs(session: boto3.Session, run: str) -> list[MonitoredJob]:
    """Return the run's live jobs in the session's region.

    Alarms and topics belong to one region, so the run's jobs in other regions have none.
    """
    jobs = jobs_of_run(session, run)
    return [monitored_job(job) for job in jobs if job.live and job.region == session.region_name]


def monitored_job(job: TrainingJob) -> MonitoredJob:
    """Return ``job`` with its instances, if SageMaker has already chosen among alternatives."""
    return MonitoredJob(job.name, job.instances if job.are_instances_chosen else None)


def find_rule(session: boto3.Session, run: str) -> StoredRule | None:
    """Return the run's rule; None if it has none."""
    from botocore.exceptions import ClientError

    events, name = session.client("events"), rule_name(run)
    with translate_aws_errors(f"rule {name}"):
        try:
            arn = events.describe_rule(Name=name)["Arn"]
        except ClientError as error:
            if error.response["Error"]["Code"] != "ResourceNotFoundException":
                raise
            return None
        tags = events.list_tags_for_resource(ResourceARN=arn)["Tags"]
        targets = events.list_targets_by_rule(Rule=name)["Targets"]
    topic = next((target["Arn"] for target in targets), None)
    managed = {"Key": RUN_TAG, "Value": run} in tags
    return StoredRule(topic, tuple(target["Id"] for target in targets), managed)


def require_managed(run: str, rule: StoredRule | None) -> None:
    """Refuse to change a rule of that name that somebody else created.

    Raises:
        UserError: the rule lacks the run's tag.
    """
    if rule is not None and not rule.managed:
        raise UserError(
            f"rule {rule_name(run)}: already exists and was not created by `sm-train alarms`; "
            "delete or rename it first",
            ExitCode.PREFLIGHT,
        )


def put_alarms(
    session: boto3.Session, run: str, region: str, alarms: Sequence[Alarm], topic: str
) -> AlarmChanges:
    """Create or update the rule and ``alarms``, and delete the run's other alarms.

    The rule comes first: it alone already reports lost jobs.

    Raises:
        UserError: AWS refuses.
    """
    rule = failure_rule(run, region, topic)
    events, cloudwatch = session.client("events"), session.client("cloudwatch")
    with translate_aws_errors(f"rule {rule_name(run)}"):
        events.put_rule(**(rule.request | {"Tags": [{"Key": RUN_TAG, "Value": run}]}))
        events.put_targets(Rule=rule_name(run), Targets=rule.targets)
    existing = _alarm_names(cloudwatch, run)
    for alarm in alarms:
        with translate_aws_errors(f"alarm {alarm.name}"):
            cloudwatch.put_metric_alarm(**alarm.request)
    names = tuple(alarm.name for alarm in alarms)
    stale = tuple(name for name in existing if name not in names)
    _delete(cloudwatch, stale)
    return AlarmChanges(names, stale)


def delete_alarms(session: boto3.Session, run: str, region: str) -> DeletedAlarms:
    """Delete the run's alarms, its rule, and the topic that was created for it.

    Raises:
        UserError: AWS refuses, or somebody else created the rule.
    """
    rule = find_rule(session, run)
    require_managed(run, rule)
    cloudwatch, events = session.client("cloudwatch"), session.client("events")
    names = _alarm_names(cloudwatch, run)
    _delete(cloudwatch, names)
    if rule is not None:
        with translate_aws_errors(f"rule {rule_name(run)}"):
            if rule.targets:
                events.remove_targets(Rule=rule_name(run), Ids=list(rule.targets))
            events.delete_rule(Name=rule_name(run))
    topic = delete_topic(session, run, region)
    return DeletedAlarms(names, rule_name(run) if rule else None, topic)


def sync_alarms(session: boto3.Session, config: RunConfig, region: str) -> str | None:
    """Create alarms for the run's live jobs and delete those of ended ones, if the run has alarms.

    Called after a job starts, so errors are returned, not raised. Returns a message, or None if the
    run has no alarms.
    """
    try:
        rule = find_rule(session, config.name)
        if rule is None or not rule.managed or rule.topic is None:
            return None
        alarms = job_alarms(config, live_jobs(session, config.name), rule.topic)
        changes = put_alarms(session, config.name, region, alarms, rule.topic)
    except UserError as error:
        return f"alarms were not updated: {error}"
    return f"alarms: {len(changes.put)} created, {len(changes.deleted)} of ended jobs deleted"


def _alarm_names(cloudwatch: CloudWatchClient, run: str) -> tuple[str, ...]:
    with translate_aws_errors("DescribeAlarms"):
        pages = cloudwatch.get_paginator("describe_alarms").paginate(
            AlarmNamePrefix=alarm_prefix(run)
        )
        return tuple(alarm["AlarmName"] for page in pages for alarm in page["MetricAlarms"])


def _delete(cloudwatch: CloudWatchClient, names: Sequence[str]) -> None:
    for first in range(0, len(names), _DELETE_BATCH):
        with translate_aws_errors("DeleteAlarms"):
            cloudwatch.delete_alarms(AlarmNames=list(names[first : first + _DELETE_BATCH]))
