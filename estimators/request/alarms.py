"""A run's CloudWatch alarms and the rule that tells of lost jobs, as boto3 takes them: pure.

They are the net below the job's own monitor and `watch`, so they rest on what AWS measures: four
alarms of a live job, and one EventBridge rule of the run. What metric math does with what is
missing follows "Using math expressions with CloudWatch metrics", what an alarm does "Configuring
how CloudWatch alarms treat missing data" (both Amazon CloudWatch user guide, 2026-11).
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from sm_train.cost.instances import instance_type
from sm_train.estimators.config.naming import job_name
from sm_train.estimators.config.operations import HeartbeatSection
from sm_train.estimators.config.schema import RunConfig
from sm_train.estimators.request.metrics import NAMESPACE

Topic = str | dict[str, str]
"""An SNS topic: its ARN, or in a template a reference to one that is made there."""

LOW_GPU_SHARE = 0.5
"""Of all GPUs at 100 %. A run that waits for its data half of the time loses half of its money."""

FULL_DISK_PERCENT = 90

STARTING_SECONDS = 1800
"""Machines may run so long before the first heartbeat: image, packages, inputs that are copied."""

LATE_SECONDS = 300
"""Metrics may come so late, and until then look like those of machines that are gone."""

_METRICS = 10
"""Most metrics of an alarm (same guide, "Alarm data queries")."""

_GPU_PERIOD, _GPU_PERIODS = 300, 6
"""Half an hour: longer than a checkpoint or an evaluation takes."""


@dataclass(frozen=True)
class MonitoredJob:
    """A job that is watched. ``machines``, type and number, are None until SageMaker has chosen."""

    name: str
    machines: tuple[str, int] | None


@dataclass(frozen=True)
class Alarm:
    """``request`` is the keyword arguments of boto3's ``put_metric_alarm``."""

    kind: str
    request: dict[str, Any]

    def __hash__(self) -> int:
        return hash(self.name)

    @property
    def name(self) -> str:
        name: str = self.request["AlarmName"]
        return name

    @property
    def metrics(self) -> int:
        """What is billed: the metrics that it looks at."""
        queries = self.request.get("Metrics", [])
        return sum("MetricStat" in query for query in queries) or 1


def alarm_prefix(run: str) -> str:
    """What the names of the run's alarms begin with, and those of no other run: names of runs have
    no two hyphens in a row.
    """
    return f"sm-train/{run}--"


def rule_name(run: str) -> str:
    """The name of the run's rule; 64 characters with the longest name that a run can have."""
    return f"sm-train-{run}"


def topic_name(run: str) -> str:
    """The name of a topic that is made for the run."""
    return f"sm-train-alarms-{run}"


def first_jobs(config: RunConfig) -> list[MonitoredJob]:
    """The first job of each stage, as the run file tells of them."""
    cluster = config.cluster
    return [
        MonitoredJob(
            job_name(config.name, stage.name, 1),
            None if cluster.alternatives else (cluster.instance_type, stage.instances),
        )
        for stage in config.stages
    ]


def alarms(config: RunConfig, jobs: Sequence[MonitoredJob], topic: Topic) -> list[Alarm]:
    """The alarms of ``jobs``, which tell ``topic``."""
    return [
        Alarm(
            kind,
            {
                "AlarmName": f"sm-train/{job.name}/{kind}{part}",
                "AlarmActions": [topic],
                **request,
            },
        )
        for job in jobs
        for kind, part, request in _of_job(config, job)
    ]


def _of_job(config: RunConfig, job: MonitoredJob) -> Iterator[tuple[str, str, dict[str, Any]]]:
    if config.entry is None:  # another's code says no heartbeats
        yield "heartbeat", "", _heartbeat(config, job)
        yield "stall", "", _stall(config, job)
    if job.machines is None:
        return
    machine, count = instance_type(job.machines[0]), job.machines[1]
    for first in range(1, count + 1, _METRICS):
        nodes = range(first, min(first + _METRICS, count + 1))
        part = "" if count <= _METRICS else f"-nodes-{nodes[0]}-{nodes[-1]}"
        # CloudWatch has no such metric of Trainium.
        if not machine.accelerator.startswith("Trainium"):
            yield "gpu", part, _gpu(config, job, nodes, machine.accelerators)
        yield "disk", part, _disk(config, job, nodes)


def beat_period(beat: HeartbeatSection) -> int:
    """Seconds in which at least one heartbeat comes: whole minutes, as CloudWatch takes them."""
    return 60 * math.ceil(2 * beat.interval / 60)


def silence_seconds(config: RunConfig) -> int:
    """No heartbeat for so long is an alarm; at a start that is how long the machines may take."""
    seconds = STARTING_SECONDS + config.doctor.timeout
    period = beat_period(config.heartbeat)
    return period * math.ceil(seconds / period)


def _heartbeat(config: RunConfig, job: MonitoredJob) -> dict[str, Any]:
    """Missing data are breaching, but only while the first machine is there.

    A job that has not begun, waits for capacity or has ended has no machines, and no heartbeats
    either: the expression is 1 then, which is well. ``TIME_SERIES`` has a value at any time, and a
    comparison takes a missing one for 0. With a machine it is the number of heartbeats, or missing.
    The newest minutes, whose metrics are still to come, look as if there were no machine: hence so
    many of some more periods.
    """
    period = beat_period(config.heartbeat)
    silent = silence_seconds(config) // period
    return {
        "AlarmDescription": _words(
            config,
            job,
            f"its machines run, but no heartbeat has come for {_minutes(silent * period)} minutes: "
            "training and what watches it have died, or never began",
        ),
        "Metrics": [
            _query("machine", "CPUUtilization", _host(job, 1), period, "SampleCount"),
            _query("beats", _HEARTBEAT, _whole(job), period, "SampleCount"),
            _expression("IF(TIME_SERIES(1) > machine, 1, beats)", "heartbeats"),
        ],
        "ComparisonOperator": "LessThanThreshold",
        "Threshold": 1.0,
        "EvaluationPeriods": silent + math.ceil(LATE_SECONDS / period),
        "DatapointsToAlarm": silent,
        "TreatMissingData": "breaching",
    }


def _stall(config: RunConfig, job: MonitoredJob) -> dict[str, Any]:
    """Heartbeats come and tell of no step: whoever should have ended the job has not."""
    limit = config.heartbeat.max_timeout
    return {
        "AlarmDescription": _words(
            config,
            job,
            f"training has stood still for more than {_minutes(limit)} minutes "
            f"(heartbeat.max_timeout)",
        ),
        "Namespace": NAMESPACE,
        "MetricName": _HEARTBEAT,
        "Dimensions": _whole(job),
        "Statistic": "Maximum",
        "Period": beat_period(config.heartbeat),
        "ComparisonOperator": "GreaterThanThreshold",
        "Threshold": float(limit),
        "EvaluationPeriods": 3,
        "DatapointsToAlarm": 3,
        "TreatMissingData": "notBreaching",
    }


def _gpu(config: RunConfig, job: MonitoredJob, nodes: range, gpus: int) -> dict[str, Any]:
    """CloudWatch adds up a machine's GPUs: 800 is all of 8 (SageMaker developer guide)."""
    return {
        "AlarmDescription": _words(
            config,
            job,
            f"the {len(nodes) * gpus} GPUs of {_nodes(nodes)} have together been used less than "
            f"{LOW_GPU_SHARE:.0%} for {_minutes(_GPU_PERIOD * _GPU_PERIODS)} minutes",
        ),
        **_over_nodes(job, nodes, "GPUUtilization", "Average", "SUM", _GPU_PERIOD),
        "ComparisonOperator": "LessThanThreshold",
        "Threshold": LOW_GPU_SHARE * 100 * gpus * len(nodes),
        "EvaluationPeriods": _GPU_PERIODS,
        "DatapointsToAlarm": _GPU_PERIODS,
        "TreatMissingData": "notBreaching",
    }


def _disk(config: RunConfig, job: MonitoredJob, nodes: range) -> dict[str, Any]:
    return {
        "AlarmDescription": _words(
            config, job, f"a disk of {_nodes(nodes)} is more than {FULL_DISK_PERCENT} % full"
        ),
        **_over_nodes(job, nodes, "DiskUtilization", "Maximum", "MAX", 60),
        "ComparisonOperator": "GreaterThanThreshold",
        "Threshold": float(FULL_DISK_PERCENT),
        "EvaluationPeriods": 3,
        "DatapointsToAlarm": 3,
        "TreatMissingData": "notBreaching",
    }


def _over_nodes(
    job: MonitoredJob, nodes: range, metric: str, statistic: str, function: str, period: int
) -> dict[str, Any]:
    """One node's metric, or ``function`` over those of several. A node without a value must not
    matter: some functions leave it out, others take it for 0.
    """
    if len(nodes) == 1:
        return {
            "Namespace": NAMESPACE,
            "MetricName": metric,
            "Dimensions": _host(job, nodes[0]),
            "Statistic": statistic,
            "Period": period,
        }
    queries = [_query(f"node{n}", metric, _host(job, n), period, statistic) for n in nodes]
    names = ", ".join(f"node{n}" for n in nodes)
    return {"Metrics": [*queries, _expression(f"{function}([{names}])", metric)]}


_HEARTBEAT = "sm_train:heartbeat_seconds_since_step"  # estimators.metrics


def _query(
    key: str, metric: str, dimensions: list[dict[str, str]], period: int, statistic: str
) -> dict[str, Any]:
    return {
        "Id": key,
        "MetricStat": {
            "Metric": {"Namespace": NAMESPACE, "MetricName": metric, "Dimensions": dimensions},
            "Period": period,
            "Stat": statistic,
        },
        "ReturnData": False,
    }


def _expression(expression: str, label: str) -> dict[str, Any]:
    return {"Id": "watched", "Expression": expression, "Label": label, "ReturnData": True}


def _host(job: MonitoredJob, node: int) -> list[dict[str, str]]:
    return [{"Name": "Host", "Value": f"{job.name}/algo-{node}"}]


def _whole(job: MonitoredJob) -> list[dict[str, str]]:
    return [{"Name": "TrainingJobName", "Value": job.name}]


def _nodes(nodes: range) -> str:
    return f"node {nodes[0]}" if len(nodes) == 1 else f"nodes {nodes[0]} to {nodes[-1]}"


def _minutes(seconds: int) -> str:
    return f"{seconds / 60:.3g}"


def _words(config: RunConfig, job: MonitoredJob, trouble: str) -> str:
    return f"{job.name}: {trouble}. Look: sm-train status {config.name}"


_TAKEN_AWAY = ("MaxRuntimeExceeded", "MaxWaitTimeExceeded", "Interrupted")
"""Why a job is Stopped that nobody stopped (SecondaryStatus of DescribeTrainingJob)."""


def failure_rule(run: str, region: str, topic: Topic) -> dict[str, Any]:
    """The EventBridge rule of jobs that failed or were cut short, with its target.

    Other stops are somebody's wish. The message holds only what cannot break it: EventBridge does
    not escape what it puts in, and a reason of failure may hold anything ("Amazon EventBridge input
    transformation", EventBridge user guide, 2026-11). An event may come more than once.
    """
    console = f"https://{region}.console.aws.amazon.com/sagemaker/home?region={region}#/jobs/<job>"
    message = (
        f"sm-train: job <job> of run {run} has ended: <status> (<secondary>). "
        f"Why: sm-train diagnose <job>. To go on: sm-train resume {run}. {console}"
    )
    return {
        "Name": rule_name(run),
        "Description": f"Training jobs of {run} that failed or were cut short (sm-train alarms)",
        "EventPattern": {
            "source": ["aws.sagemaker"],
            "detail-type": ["SageMaker Training Job State Change"],
            "detail": {
                "TrainingJobName": [{"prefix": f"{run}--"}],
                "$or": [
                    {"TrainingJobStatus": ["Failed"]},
                    {"TrainingJobStatus": ["Stopped"], "SecondaryStatus": list(_TAKEN_AWAY)},
                ],
            },
        },
        "State": "ENABLED",
        "Targets": [
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
    }


PUBLISHERS = ("cloudwatch.amazonaws.com", "events.amazonaws.com")


def topic_policy(topic: Topic) -> dict[str, Any]:
    """The policy of a topic that alarms and rules may publish to."""
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


def template(
    config: RunConfig,
    region: str,
    jobs: Sequence[MonitoredJob],
    topic: str | None,
    email: str | None,
) -> dict[str, Any]:
    """The same as CloudFormation; without ``topic`` one is made that tells ``email``."""
    resources: dict[str, Any] = {}
    told: Topic = topic if topic is not None else {"Ref": "Topic"}
    if topic is None:
        resources |= {
            "Topic": _resource("SNS::Topic", {"TopicName": topic_name(config.name)}),
            "TopicPolicy": _resource(
                "SNS::TopicPolicy", {"Topics": [told], "PolicyDocument": topic_policy(told)}
            ),
            "Email": _resource(
                "SNS::Subscription", {"TopicArn": told, "Protocol": "email", "Endpoint": email}
            ),
        }
    resources["LostJob"] = _resource("Events::Rule", failure_rule(config.name, region, told))
    for number, alarm in enumerate(alarms(config, jobs, told), start=1):
        key = f"{alarm.kind.capitalize()}{number}"
        resources[key] = _resource("CloudWatch::Alarm", alarm.request)
    return {
        "AWSTemplateFormatVersion": "2010-09-09",
        "Description": f"sm-train - alarms of the run {config.name}",
        "Resources": resources,
    }


def _resource(kind: str, properties: dict[str, Any]) -> dict[str, Any]:
    return {"Type": f"AWS::{kind}", "Properties": properties}
