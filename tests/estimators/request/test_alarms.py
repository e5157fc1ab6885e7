"""Alarm and rule requests: CloudWatch and EventBridge accept them, and they mean what we want."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from moto.events.models import EventPattern
from sm_train.cost.instances import instance_type
from sm_train.estimators.config.schema import RunConfig
from sm_train.estimators.request.alarm_requests import (
    Alarm,
    MonitoredJob,
    alarm_prefix,
    failure_rule,
    job_alarms,
    rule_name,
    topic_name,
)
from sm_train.estimators.request.metric_definitions import metric_definitions

from tests.support.run_documents import config, monitored_jobs, runs, stage
from tests.support.service_model import field_errors

TOPIC = "arn:aws:sns:us-east-1:210987654321:team"

thorough = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def requests_by_name(run: RunConfig, *jobs: MonitoredJob) -> dict[str, Any]:
    """The requests of ``jobs``, or of each stage's first job, by the last part of their names."""
    return {
        alarm.name.rpartition("/")[2]: alarm.request
        for alarm in job_alarms(run, jobs or monitored_jobs(run), TOPIC)
    }


def alarm_names(run: RunConfig) -> list[str]:
    return [alarm.name for alarm in job_alarms(run, monitored_jobs(run), TOPIC)]


@thorough
@given(runs(), st.integers(1, 3600), st.integers(1, 10**6), st.integers(30, 900))
def test_cloudwatch_accepts_the_alarms_of_any_run(
    document: dict[str, Any], interval: int, max_timeout: int, doctor_timeout: int
) -> None:
    document["heartbeat"] = {"interval": interval, "min_timeout": 1, "max_timeout": max_timeout}
    document["doctor"] = {"timeout": doctor_timeout}
    run = RunConfig.model_validate(document)
    alarms = job_alarms(run, monitored_jobs(run), TOPIC)
    assert len({alarm.name for alarm in alarms}) == len(alarms)
    for alarm in alarms:
        assert field_errors("cloudwatch", "PutMetricAlarm", alarm.request) == []
        assert alarm.name.startswith(alarm_prefix(run.name))
        assert_documented_rules_hold(alarm)
    rule = failure_rule(run.name, "us-east-1", TOPIC)
    assert field_errors("events", "PutRule", rule.request) == []
    targets = {"Rule": rule_name(run.name), "Targets": rule.targets}
    assert field_errors("events", "PutTargets", targets) == []
    assert field_errors("sns", "CreateTopic", {"Name": topic_name(run.name)}) == []


def assert_documented_rules_hold(alarm: Alarm) -> None:
    """Rules that the documentation of PutMetricAlarm states and botocore's model lacks."""
    request: Any = alarm.request
    queries = request.get("Metrics", [])
    stats = [query["MetricStat"] for query in queries if "MetricStat" in query]
    assert ("MetricName" in request) != bool(queries)
    assert len(stats) <= 10
    if queries:
        assert [query["ReturnData"] for query in queries].count(True) == 1
        assert len({query["Id"] for query in queries}) == len(queries)
    [period] = {stat["Period"] for stat in stats} or {request["Period"]}
    assert period % 60 == 0
    assert period <= 86_400
    span = period * request["EvaluationPeriods"]
    assert span <= (86_400 if period < 3600 else 604_800)
    assert 1 <= request["DatapointsToAlarm"] <= request["EvaluationPeriods"]


def test_longest_names_fit() -> None:
    """EventBridge takes 64 characters, CloudWatch 255."""
    run = "r" * 55
    assert len(rule_name(run)) == 64
    longest = config(name=run, stages=[stage("s", instances=9_999)])
    assert max(len(name) for name in alarm_names(longest)) <= 255


def test_job_has_four_alarms_that_notify_the_topic() -> None:
    requests = requests_by_name(config())
    assert list(requests) == ["heartbeat", "stall", "gpu", "disk"]
    assert all(request["AlarmActions"] == [TOPIC] for request in requests.values())
    heartbeat, stall, gpu, disk = requests.values()
    assert heartbeat["TreatMissingData"] == "breaching"
    assert {request["TreatMissingData"] for request in (stall, gpu, disk)} == {"notBreaching"}
    assert stall["MetricName"] in [metric["Name"] for metric in metric_definitions()]
    assert (stall["Statistic"], stall["ComparisonOperator"], stall["Threshold"]) == (
        "Maximum",
        "GreaterThanThreshold",
        1200.0,
    )
    assert stall["Dimensions"] == [{"Name": "TrainingJobName", "Value": "demo--256px-0001"}]


def test_nodes_are_grouped_and_each_is_in_one_alarm() -> None:
    """CloudWatch allows ten metrics; an alarm on GPUs also reads the heartbeats."""
    run = config(stages=[stage(instances=12)])
    requests = requests_by_name(run)
    assert [name for name in requests if name.startswith("gpu")] == [
        "gpu-nodes-1-9",
        "gpu-nodes-10-12",
    ]
    for kind in ("gpu", "disk"):
        hosts = [
            query["MetricStat"]["Metric"]["Dimensions"][0]["Value"]
            for name, request in requests.items()
            if name.startswith(kind)
            for query in request["Metrics"]
            if "MetricStat" in query and query["Id"] != "heartbeats"
        ]
        assert hosts == [f"demo--256px-0001/algo-{node}" for node in range(1, 13)]
    assert requests["disk-nodes-11-12"]["Metrics"][-1]["Expression"] == "MAX([node11, node12])"
    alarms = job_alarms(run, monitored_jobs(run), TOPIC)
    assert sum(alarm.num_metrics for alarm in alarms) == 2 + 1 + (12 + 2) + 12


@pytest.mark.parametrize(
    ("instance", "nodes", "threshold"),
    [
        ("ml.p4de.24xlarge", 1, 400.0),
        ("ml.p4de.24xlarge", 4, 1600.0),
        ("ml.g5.xlarge", 1, 50.0),
        ("ml.trn1.32xlarge", 1, None),
    ],
)
def test_gpu_threshold_is_half_of_all_gpus(
    instance: str, nodes: int, threshold: float | None
) -> None:
    """CloudWatch sums over an instance's GPUs."""
    job = MonitoredJob("demo--256px-0001", (instance, nodes))
    gpu = requests_by_name(config(), job).get("gpu")
    assert (gpu and gpu["Threshold"]) == threshold
    if threshold is not None:
        assert threshold == nodes * 100 * instance_type(instance).accelerators / 2


def test_undecided_instances_have_no_gpu_and_disk_alarms() -> None:
    job = MonitoredJob("demo--256px-0001", None)
    assert list(requests_by_name(config(), job)) == ["heartbeat", "stall"]


def test_own_script_has_the_alarms_of_the_built_in_training() -> None:
    own = requests_by_name(config(code="own", entry="train.py"))
    assert list(own) == list(requests_by_name(config()))


@pytest.mark.parametrize(
    ("job", "status", "secondary", "matches"),
    [
        ("digits--256px-0001", "Failed", "Failed", True),
        ("digits--256px-0012", "Stopped", "MaxRuntimeExceeded", True),
        ("digits--256px-0001", "Stopped", "MaxWaitTimeExceeded", True),
        ("digits--256px-0001", "Stopped", "Interrupted", True),
        ("digits--256px-0001", "InProgress", "Interrupted", False),
        ("digits--256px-0001", "Stopped", "Stopped", False),
        ("digits--256px-0001", "Completed", "Completed", False),
        ("digits-2--256px-0001", "Failed", "Failed", False),
        ("digit--256px-0001", "Failed", "Failed", False),
        ("my-digits--256px-0001", "Failed", "Failed", False),
    ],
)
def test_rule_matches_lost_jobs_of_this_run_only(
    job: str, status: str, secondary: str, matches: bool
) -> None:
    detail = {"TrainingJobName": job, "TrainingJobStatus": status, "SecondaryStatus": secondary}
    event: Any = {
        "source": "aws.sagemaker",
        "detail-type": "SageMaker Training Job State Change",
        "detail": detail,
    }
    rule = failure_rule("digits", "us-east-1", TOPIC)
    pattern = EventPattern.load(rule.request["EventPattern"])
    assert pattern.matches_event(event) is matches


def test_rule_message_inserts_only_safe_fields() -> None:
    [target] = failure_rule("demo", "us-east-1", TOPIC).targets
    transformer = target["InputTransformer"]
    assert "$.detail.FailureReason" not in transformer["InputPathsMap"].values()
    text = json.loads(transformer["InputTemplate"])
    for key in transformer["InputPathsMap"]:
        assert f"<{key}>" in text
        text = text.replace(f"<{key}>", key)
    assert "<" not in text
    assert "sm-train diagnose job" in text
