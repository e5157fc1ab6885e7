"""A run's CloudWatch alarms and the EventBridge rule for lost jobs, as boto3 requests.

They are a safety net below the job's own watchdog and `watch`, so they rely on what AWS measures:
four alarms for each live job, and one EventBridge rule for the run. How metric math treats missing
data follows "Using math expressions with CloudWatch metrics", how alarms treat it "Configuring how
CloudWatch alarms treat missing data" (both Amazon CloudWatch user guide, 2026-11).
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from sm_train.cost.instances import instance_type
from sm_train.estimators.config.operations import HeartbeatSection
from sm_train.estimators.config.schema import RunConfig
from sm_train.estimators.request.metric_definitions import HEARTBEAT_METRIC, NAMESPACE

if TYPE_CHECKING:
    from types_boto3_cloudwatch.type_defs import (
        DimensionTypeDef,
        MetricDataQueryTypeDef,
        PutMetricAlarmInputTypeDef,
    )
    from types_boto3_events.type_defs import PutRuleRequestTypeDef, TargetTypeDef

AlarmKind = Literal["heartbeat", "stall", "gpu", "disk"]
Statistic = Literal["Average", "Maximum", "SampleCount"]

MIN_GPU_UTILIZATION = 0.5
"""Alarm threshold, as a fraction of all GPUs at 100 %: below it, half of the money is wasted."""

MAX_DISK_PERCENT = 90

STARTUP_SECONDS = 1800
"""Time that instances may run before the first heartbeat: image, packages, input download."""

METRIC_DELAY_SECONDS = 300
"""How late metrics may arrive. Until then, running instances look like absent ones."""

_MAX_METRICS = 10
"""Maximum number of metrics per alarm (CloudWatch user guide, "Alarm data queries")."""

_GPU_PERIOD, _GPU_PERIODS = 300, 6
"""Half an hour: longer than a checkpoint or an evaluation takes."""


@dataclass(frozen=True)
class MonitoredJob:
    """A job to create alarms for.

    ``instances``, their type and number, is None until SageMaker has chosen among alternatives.
    """

    name: str
    instances: tuple[str, int] | None


@dataclass(frozen=True)
class Alarm:
    """``request`` is the keyword arguments of boto3's ``put_metric_alarm``."""

    kind: AlarmKind
    request: PutMetricAlarmInputTypeDef

    def __hash__(self) -> int:
        return hash(self.name)

    @property
    def name(self) -> str:
        return self.request["AlarmName"]

    @property
    def num_metrics(self) -> int:
        """Return the number of metrics that the alarm reads, which is what AWS bills."""
        queries = self.request.get("Metrics", [])
        return sum("MetricStat" in query for query in queries) or 1


@dataclass(frozen=True)
class FailureRule:
    """The keyword arguments of boto3's ``put_rule``, and the rule's targets."""

    request: PutRuleRequestTypeDef
    targets: list[TargetTypeDef]


def alarm_prefix(run: str) -> str:
    """Return the prefix of the run's alarm names.

    It is no other run's prefix, because run names contain no double hyphen.
    """
    return f"sm-train/{run}--"


def rule_name(run: str) -> str:
    """Return the name of the run's rule: at most 64 characters for the longest run name."""
    return f"sm-train-{run}"


def topic_name(run: str) -> str:
    """Return the name of the topic that is created for the run."""
    return f"sm-train-alarms-{run}"


def job_alarms(config: RunConfig, jobs: Sequence[MonitoredJob], topic: str) -> list[Alarm]:
    """Return the alarms of ``jobs``, which notify the topic with ARN ``topic``."""
    return [alarm for job in jobs for alarm in _alarms_of_job(config, job, topic)]


def _alarms_of_job(config: RunConfig, job: MonitoredJob, topic: str) -> Iterator[Alarm]:
    def base(kind: AlarmKind, suffix: str = "") -> PutMetricAlarmInputTypeDef:
        return {"AlarmName": f"sm-train/{job.name}/{kind}{suffix}", "AlarmActions": [topic]}

    yield Alarm("heartbeat", _heartbeat_alarm(base("heartbeat"), config, job))
    yield Alarm("stall", _stall_alarm(base("stall"), config, job))
    if job.instances is None:
        return
    instance, count = instance_type(job.instances[0]), job.instances[1]
    # CloudWatch has no such metric for Trainium.
    if not instance.accelerator.startswith("Trainium"):
        gpus = instance.accelerators
        for suffix, nodes in _node_groups(count, _MAX_METRICS - 1):
            yield Alarm("gpu", _gpu_alarm(base("gpu", suffix), config, job, nodes, gpus))
    for suffix, nodes in _node_groups(count, _MAX_METRICS):
        yield Alarm("disk", _disk_alarm(base("disk", suffix), config, job, nodes))


def _node_groups(count: int, most: int) -> Iterator[tuple[str, range]]:
    """Yield groups of at most ``most`` of ``count`` nodes, with the end of their alarm's name."""
    for first in range(1, count + 1, most):
        nodes = range(first, min(first + most, count + 1))
        yield "" if count <= most else f"-nodes-{nodes[0]}-{nodes[-1]}", nodes


def heartbeat_period(heartbeat: HeartbeatSection) -> int:
    """Return a period, in seconds, that contains at least one heartbeat: whole minutes."""
    return 60 * math.ceil(2 * heartbeat.interval / 60)


def missing_heartbeat_seconds(config: RunConfig) -> int:
    """Return how long heartbeats may be missing before the alarm.

    At the start of a job, that is how long the instances may take to send the first one.
    """
    seconds = STARTUP_SECONDS + config.doctor.timeout
    period = heartbeat_period(config.heartbeat)
    return period * math.ceil(seconds / period)


def _heartbeat_alarm(
    base: PutMetricAlarmInputTypeDef, config: RunConfig, job: MonitoredJob
) -> PutMetricAlarmInputTypeDef:
    """Return the alarm for missing heartbeats, which fires only while the first instance runs.

    A job that has not started, waits for capacity or has ended has neither instances nor
    heartbeats. The expression is 1 then, which is OK: ``TIME_SERIES(1)`` has a value at any time,
    and the comparison treats a missing ``instance`` as 0. While the instance runs, the expression
    is the number of heartbeats, or missing, which is breaching.

    The metrics of the last minutes have not arrived yet, which looks as if there were no instance.
    So the alarm evaluates more periods than the number that must breach.
    """
    period = heartbeat_period(config.heartbeat)
    missing_periods = missing_heartbeat_seconds(config) // period
    return {
        **base,
        "AlarmDescription": _description(
            config,
            job,
            f"instances are running, but no heartbeat has arrived for "
            f"{_minutes(missing_periods * period)} minutes: training and its watchdog have died "
            "or never started",
        ),
        "Metrics": [
            _query("instance", "CPUUtilization", _node_dimension(job, 1), period, "SampleCount"),
            _query("heartbeats", HEARTBEAT_METRIC, _job_dimension(job), period, "SampleCount"),
            _expression("IF(TIME_SERIES(1) > instance, 1, heartbeats)", "heartbeats"),
        ],
        "ComparisonOperator": "LessThanThreshold",
        "Threshold": 1.0,
        "EvaluationPeriods": missing_periods + math.ceil(METRIC_DELAY_SECONDS / period),
        "DatapointsToAlarm": missing_periods,
        "TreatMissingData": "breaching",
    }


def _stall_alarm(
    base: PutMetricAlarmInputTypeDef, config: RunConfig, job: MonitoredJob
) -> PutMetricAlarmInputTypeDef:
    """Return the alarm for heartbeats without steps: the watchdog should have ended the job."""
    timeout = config.heartbeat.max_timeout
    return {
        **base,
        "AlarmDescription": _description(
            config,
            job,
            f"training has made no progress for more than {_minutes(timeout)} minutes "
            "(heartbeat.max_timeout)",
        ),
        "Namespace": NAMESPACE,
        "MetricName": HEARTBEAT_METRIC,
        "Dimensions": _job_dimension(job),
        "Statistic": "Maximum",
        "Period": heartbeat_period(config.heartbeat),
        "ComparisonOperator": "GreaterThanThreshold",
        "Threshold": float(timeout),
        "EvaluationPeriods": 3,
        "DatapointsToAlarm": 3,
        "TreatMissingData": "notBreaching",
    }


def _gpu_alarm(
    base: PutMetricAlarmInputTypeDef, config: RunConfig, job: MonitoredJob, nodes: range, gpus: int
) -> PutMetricAlarmInputTypeDef:
    """Return the alarm for low GPU utilization, which fires only while heartbeats arrive.

    CloudWatch sums over an instance's GPUs: 800 is 100 % of 8 (SageMaker developer guide). While
    instances download images, data or a checkpoint, also when SageMaker has restarted the job, they
    run with idle GPUs and without heartbeats. The expression has no value then, which is OK.
    """
    queries = _node_queries(job, nodes, "GPUUtilization", "Average", _GPU_PERIOD)
    heartbeats = _query(
        "heartbeats", HEARTBEAT_METRIC, _job_dimension(job), _GPU_PERIOD, "SampleCount"
    )
    full = 100 * gpus * len(nodes)
    used = f"SUM([{', '.join(query['Id'] for query in queries)}])"
    expression = f"IF(heartbeats > 0, {used}, {full})"
    return {
        **base,
        "Metrics": [*queries, heartbeats, _expression(expression, "GPUUtilization")],
        "AlarmDescription": _description(
            config,
            job,
            f"the average utilization of the {len(nodes) * gpus} GPUs of {_node_range(nodes)} has "
            f"been below {MIN_GPU_UTILIZATION:.0%} for {_minutes(_GPU_PERIOD * _GPU_PERIODS)} "
            "minutes",
        ),
        "ComparisonOperator": "LessThanThreshold",
        "Threshold": MIN_GPU_UTILIZATION * full,
        "EvaluationPeriods": _GPU_PERIODS,
        "DatapointsToAlarm": _GPU_PERIODS,
        "TreatMissingData": "notBreaching",
    }


def _disk_alarm(
    base: PutMetricAlarmInputTypeDef, config: RunConfig, job: MonitoredJob, nodes: range
) -> PutMetricAlarmInputTypeDef:
    queries = _node_queries(job, nodes, "DiskUtilization", "Maximum", 60)
    names = ", ".join(query["Id"] for query in queries)
    return {
        **base,
        "Metrics": [*queries, _expression(f"MAX([{names}])", "DiskUtilization")],
        "AlarmDescription": _description(
            config,
            job,
            f"a disk of {_node_range(nodes)} is more than {MAX_DISK_PERCENT} % full",
        ),
        "ComparisonOperator": "GreaterThanThreshold",
        "Threshold": float(MAX_DISK_PERCENT),
        "EvaluationPeriods": 3,
        "DatapointsToAlarm": 3,
        "TreatMissingData": "notBreaching",
    }


def _node_queries(
    job: MonitoredJob, nodes: range, metric: str, statistic: Statistic, period: int
) -> list[MetricDataQueryTypeDef]:
    """Return the metric of each node; ``SUM`` and ``MAX`` ignore a node without a value."""
    return [
        _query(f"node{node}", metric, _node_dimension(job, node), period, statistic)
        for node in nodes
    ]


def _query(
    key: str, metric: str, dimensions: list[DimensionTypeDef], period: int, statistic: Statistic
) -> MetricDataQueryTypeDef:
    return {
        "Id": key,
        "MetricStat": {
            "Metric": {"Namespace": NAMESPACE, "MetricName": metric, "Dimensions": dimensions},
            "Period": period,
            "Stat": statistic,
        },
        "ReturnData": False,
    }


def _expression(expression: str, label: str) -> MetricDataQueryTypeDef:
    return {"Id": "watched", "Expression": expression, "Label": label, "ReturnData": True}


def _node_dimension(job: MonitoredJob, node: int) -> list[DimensionTypeDef]:
    """Return SageMaker's metrics of one instance; ``node`` counts from 1."""
    return [{"Name": "Host", "Value": f"{job.name}/algo-{node}"}]


def _job_dimension(job: MonitoredJob) -> list[DimensionTypeDef]:
    """Return metrics that SageMaker extracts from the job's log."""
    return [{"Name": "TrainingJobName", "Value": job.name}]


def _node_range(nodes: range) -> str:
    return f"node {nodes[0]}" if len(nodes) == 1 else f"nodes {nodes[0]} to {nodes[-1]}"


def _minutes(seconds: int) -> str:
    return f"{seconds / 60:.3g}"


def _description(config: RunConfig, job: MonitoredJob, problem: str) -> str:
    return f"{job.name}: {problem}. Check: sm-train status {config.name}"


_INVOLUNTARY_STOPS = ("MaxRuntimeExceeded", "MaxWaitTimeExceeded", "Interrupted")
"""Secondary statuses of Stopped jobs that nobody stopped (DescribeTrainingJob)."""


def failure_rule(run: str, region: str, topic: str) -> FailureRule:
    """Return the EventBridge rule for jobs that failed or were interrupted.

    Jobs that a user stopped do not match. The message contains only fields that cannot break it:
    EventBridge does not escape what it inserts, and a failure reason may contain anything ("Amazon
    EventBridge input transformation", EventBridge user guide, 2026-11). EventBridge may deliver an
    event more than once.
    """
    console = f"https://{region}.console.aws.amazon.com/sagemaker/home?region={region}#/jobs/<job>"
    message = (
        f"sm-train: job <job> of run {run} has ended: <status> (<secondary>). "
        f"Diagnose: sm-train diagnose <job>. Resume: sm-train resume {run}. {console}"
    )
    pattern = {
        "source": ["aws.sagemaker"],
        "detail-type": ["SageMaker Training Job State Change"],
        "detail": {
            "TrainingJobName": [{"prefix": f"{run}--"}],
            "$or": [
                {"TrainingJobStatus": ["Failed"]},
                {"TrainingJobStatus": ["Stopped"], "SecondaryStatus": list(_INVOLUNTARY_STOPS)},
            ],
        },
    }
    return FailureRule(
        {
            "Name": rule_name(run),
            "Description": f"Training jobs of {run} that failed or were interrupted",
            "EventPattern": json.dumps(pattern),
            "State": "ENABLED",
        },
        [
            {
                "Id": "topic",
                "Arn": topic,
                "InputTransformer": {
                    "InputPathsMap": {
                        "job": "$.detail.TrainingJobName",
                        "status": "$.detail.TrainingJobStatus",
                        "secondary": "$.detail.SecondaryStatus",
                    },
                    "InputTemplate": json.dumps(message),
                },
            }
        ],
    )


PUBLISHERS = ("cloudwatch.amazonaws.com", "events.amazonaws.com")
"""Services that publish to a run's topic."""


def topic_policy(topic: str) -> dict[str, Any]:
    """Return the policy of a topic that lets alarms and rules publish to it."""
    return {
        "Version": "2012-10-17",
        "Statement": [
            {
                "Sid": service.split(".")[0],
                "Effect": "Allow",
                "Principal": {"Service": service},
                "Action": "sns:Publish",
                "Resource": topic,
            }
            for service in PUBLISHERS
        ],
    }
