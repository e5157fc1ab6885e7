"""Makes a run's alarms and its rule in AWS, keeps them to the jobs that live, and removes them.

The rule is what says that a run has alarms, and whom they tell: it carries the run's tag. Alarms
are known by their names (:func:`sm_train.estimators.request.alarms.alarm_prefix`).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sm_train.estimators.config.schema import RunConfig
from sm_train.estimators.request.alarms import (
    Alarm,
    MonitoredJob,
    alarm_prefix,
    alarms,
    failure_rule,
    rule_name,
)
from sm_train.estimators.request.training import RUN_TAG
from sm_train.toolkit.alarms.sns_topic import remove_topic
from sm_train.toolkit.aws.errors import translate_aws_errors
from sm_train.toolkit.errors import ExitCode, UserError
from sm_train.toolkit.jobs.training_job import TrainingJob, jobs_of_run

_DELETED_AT_ONCE = 100  # DeleteAlarms


@dataclass(frozen=True)
class Rule:
    """A run's rule as it is. ``ours`` is whether it was made here and not, say, by a stack."""

    topic: str | None
    targets: tuple[str, ...]
    ours: bool


@dataclass(frozen=True)
class Changes:
    """Names of the alarms that were put, and of those of ended jobs that were removed."""

    put: tuple[str, ...]
    removed: tuple[str, ...]


@dataclass(frozen=True)
class Removed:
    """What a run had: its alarms' names, its rule's, and the ARN of the topic made for it."""

    alarms: tuple[str, ...]
    rule: str | None
    topic: str | None


def live_jobs(session: Any, run: str) -> list[MonitoredJob]:
    """The run's jobs that are not over. Alarms, and whom they tell, are of one region: jobs that
    went to a fallback's have none.
    """
    jobs = jobs_of_run(session, run)
    return [watched(job) for job in jobs if job.live and job.region == session.region_name]


def watched(job: TrainingJob) -> MonitoredJob:
    """``job``, with its machines where they are known: of ordered preferences SageMaker chooses."""
    resources = job.description["ResourceConfig"]
    waits = "InstancePreferences" in resources and "SelectedInstanceType" not in resources
    return MonitoredJob(job.name, None if waits else job.instances)


def find_rule(session: Any, run: str) -> Rule | None:
    """The run's rule; None where it has none."""
    from botocore.exceptions import ClientError

    events, name = session.client("events"), rule_name(run)
    with translate_aws_errors(f"rule {name}"):
        try:
            arn = events.describe_rule(Name=name)["Arn"]
        except ClientError as error:
            if error.response["Error"]["Code"] != "ResourceNotFoundException":
                raise
            return None
        found = events.list_tags_for_resource(ResourceARN=arn)["Tags"]
        targets = events.list_targets_by_rule(Rule=name)["Targets"]
    topic = next((one["Arn"] for one in targets), None)
    tags = {one["Key"]: one["Value"] for one in found}
    return Rule(topic, tuple(one["Id"] for one in targets), tags.get(RUN_TAG) == run)


def require_ours(run: str, rule: Rule | None) -> None:
    """Refuse a rule of that name which somebody else made, as a stack of our template is."""
    if rule is not None and not rule.ours:
        raise UserError(
            f"rule {rule_name(run)}: is there and was not made by `sm-train alarms`; if it is of a "
            "CloudFormation stack, update or delete that stack instead",
            ExitCode.PREFLIGHT,
        )


def put(session: Any, run: str, region: str, wanted: Sequence[Alarm], topic: str) -> Changes:
    """Make the rule and ``wanted``, and remove what the run has beside them.

    The rule comes first: with it alone a lost job is told of.

    Raises:
        UserError: AWS refuses.
    """
    rule = failure_rule(run, region, topic)
    events, cloudwatch = session.client("events"), session.client("cloudwatch")
    with translate_aws_errors(f"rule {rule_name(run)}"):
        events.put_rule(**rule_request(rule), Tags=[{"Key": RUN_TAG, "Value": run}])
        events.put_targets(Rule=rule["Name"], Targets=rule["Targets"])
    before = _names(cloudwatch, run)
    for alarm in wanted:
        with translate_aws_errors(f"alarm {alarm.name}"):
            cloudwatch.put_metric_alarm(**alarm.request)
    names = tuple(alarm.name for alarm in wanted)
    stale = tuple(name for name in before if name not in names)
    _delete(cloudwatch, stale)
    return Changes(names, stale)


def rule_request(rule: dict[str, Any]) -> dict[str, Any]:
    """The keyword arguments of ``put_rule``: the pattern as text, the targets are put apart."""
    rest = {key: value for key, value in rule.items() if key != "Targets"}
    return rest | {"EventPattern": json.dumps(rule["EventPattern"])}


def remove(session: Any, run: str, region: str) -> Removed:
    """Remove the run's alarms, its rule, and the topic that was made for it.

    Raises:
        UserError: AWS refuses, or the rule is somebody else's.
    """
    rule = find_rule(session, run)
    require_ours(run, rule)
    cloudwatch, events = session.client("cloudwatch"), session.client("events")
    names = _names(cloudwatch, run)
    _delete(cloudwatch, names)
    if rule is not None:
        with translate_aws_errors(f"rule {rule_name(run)}"):
            if rule.targets:
                events.remove_targets(Rule=rule_name(run), Ids=list(rule.targets))
            events.delete_rule(Name=rule_name(run))
    return Removed(names, rule_name(run) if rule else None, remove_topic(session, run, region))


def keep(session: Any, config: RunConfig, region: str) -> str | None:
    """Give the run's live jobs their alarms and remove those of ended ones, if it has alarms.

    For whoever starts a job: it never keeps that from being started. What was done, in words; None
    where there was nothing to do.
    """
    try:
        rule = find_rule(session, config.name)
        if rule is None or not rule.ours or rule.topic is None:
            return None
        wanted = alarms(config, live_jobs(session, config.name), rule.topic)
        changes = put(session, config.name, region, wanted, rule.topic)
    except UserError as error:
        return f"alarms, if there are any, are as they were: {error}"
    return f"alarms: {len(changes.put)} made, {len(changes.removed)} of ended jobs removed"


def _names(cloudwatch: Any, run: str) -> tuple[str, ...]:
    with translate_aws_errors("DescribeAlarms"):
        pages = cloudwatch.get_paginator("describe_alarms").paginate(
            AlarmNamePrefix=alarm_prefix(run)
        )
        return tuple(alarm["AlarmName"] for page in pages for alarm in page["MetricAlarms"])


def _delete(cloudwatch: Any, names: Sequence[str]) -> None:
    for first in range(0, len(names), _DELETED_AT_ONCE):
        with translate_aws_errors("DeleteAlarms"):
            cloudwatch.delete_alarms(AlarmNames=list(names[first : first + _DELETED_AT_ONCE]))
