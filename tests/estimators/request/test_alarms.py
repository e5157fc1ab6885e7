"""Alarms by themselves: what CloudWatch and EventBridge accept, and the template of the same."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from moto.events.models import EventPattern
from sm_train.cost.instances import instance_type
from sm_train.estimators.config.schema import RunConfig
from sm_train.estimators.request.alarms import (
    Alarm,
    MonitoredJob,
    alarm_prefix,
    alarms,
    failure_rule,
    first_jobs,
    rule_name,
    template,
    topic_name,
    topic_policy,
)
from sm_train.estimators.request.metrics import metric_definitions

from tests.support.run_documents import config, runs, stage
from tests.support.service_model import bad_fields

TOPIC = "arn:aws:sns:us-east-1:111122223333:team"

thorough = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def of(run: RunConfig, *jobs: MonitoredJob) -> dict[str, dict[str, Any]]:
    return {
        one.name.rpartition("/")[2]: one.request
        for one in alarms(run, jobs or first_jobs(run), TOPIC)
    }


@thorough
@given(runs(), st.integers(1, 3600), st.integers(1, 10**6), st.integers(30, 900))
def test_any_run_file_gives_alarms_that_cloudwatch_accepts(
    good: dict[str, Any], interval: int, longest: int, limit: int
) -> None:
    good["heartbeat"] = {"interval": interval, "min_timeout": 1, "max_timeout": longest}
    good["doctor"] = {"timeout": limit}
    run = RunConfig.model_validate(good)
    made = alarms(run, first_jobs(run), TOPIC)
    assert len({one.name for one in made}) == len(made)
    for alarm in made:
        assert bad_fields("cloudwatch", "PutMetricAlarm", alarm.request) == []
        assert alarm.name.startswith(alarm_prefix(run.name))
        _holds_the_rules_in_words(alarm)
    rule = failure_rule(run.name, "us-east-1", TOPIC)
    described = {key: value for key, value in rule.items() if key != "Targets"}
    described["EventPattern"] = json.dumps(rule["EventPattern"])
    assert bad_fields("events", "PutRule", described) == []
    targets = {"Rule": rule["Name"], "Targets": rule["Targets"]}
    assert bad_fields("events", "PutTargets", targets) == []
    assert bad_fields("sns", "CreateTopic", {"Name": topic_name(run.name)}) == []


def _holds_the_rules_in_words(alarm: Alarm) -> None:
    """Those that botocore's model states in PutMetricAlarm's documentation."""
    request = alarm.request
    queries = request.get("Metrics", [])
    stats = [one["MetricStat"] for one in queries if "MetricStat" in one]
    assert ("MetricName" in request) != bool(queries)
    assert len(stats) <= 10
    if queries:
        assert [one["ReturnData"] for one in queries].count(True) == 1
        assert len({one["Id"] for one in queries}) == len(queries)
    [period] = {one["Period"] for one in stats} or {request["Period"]}
    assert period % 60 == 0
    assert period <= 86_400
    span = period * request["EvaluationPeriods"]
    assert span <= (86_400 if period < 3600 else 604_800)
    assert 1 <= request["DatapointsToAlarm"] <= request["EvaluationPeriods"]


def test_the_longest_names_fit() -> None:
    """64 characters are a rule's, 255 an alarm's."""
    run = "r" * 55
    assert len(rule_name(run)) == 64
    longest = config(name=run, stages=[stage("s", instances=9_999)])
    assert max(len(one.name) for one in alarms(longest, first_jobs(longest), TOPIC)) <= 255


def test_a_job_has_four_alarms_that_tell_the_topic() -> None:
    made = of(config())
    assert list(made) == ["heartbeat", "stall", "gpu", "disk"]
    assert all(request["AlarmActions"] == [TOPIC] for request in made.values())
    heartbeat, stall, gpu, disk = made.values()
    assert heartbeat["TreatMissingData"] == "breaching"
    assert {one["TreatMissingData"] for one in (stall, gpu, disk)} == {"notBreaching"}
    assert stall["MetricName"] in [one["Name"] for one in metric_definitions()]
    assert (stall["Statistic"], stall["ComparisonOperator"], stall["Threshold"]) == (
        "Maximum",
        "GreaterThanThreshold",
        1200.0,
    )
    assert stall["Dimensions"] == [{"Name": "TrainingJobName", "Value": "demo--256px-0001"}]


def test_many_nodes_share_alarms_of_at_most_ten_and_each_node_is_in_one() -> None:
    run = config(stages=[stage(instances=12)])
    made = of(run)
    assert [name for name in made if name.startswith("gpu")] == [
        "gpu-nodes-1-10",
        "gpu-nodes-11-12",
    ]
    for kind in ("gpu", "disk"):
        hosts = [
            query["MetricStat"]["Metric"]["Dimensions"][0]["Value"]
            for name, request in made.items()
            if name.startswith(kind)
            for query in request["Metrics"]
            if "MetricStat" in query
        ]
        assert hosts == [f"demo--256px-0001/algo-{node}" for node in range(1, 13)]
    assert made["disk-nodes-11-12"]["Metrics"][-1]["Expression"] == "MAX([node11, node12])"
    billed = sum(one.metrics for one in alarms(run, first_jobs(run), TOPIC))
    assert billed == 2 + 1 + 12 + 12


@pytest.mark.parametrize(
    ("name", "nodes", "threshold"),
    [
        ("ml.p4de.24xlarge", 1, 400.0),
        ("ml.p4de.24xlarge", 4, 1600.0),
        ("ml.g5.xlarge", 1, 50.0),
        ("ml.trn1.32xlarge", 1, None),
    ],
)
def test_low_gpu_utilization_is_half_of_all_gpus(
    name: str, nodes: int, threshold: float | None
) -> None:
    """CloudWatch's figure is the sum over a machine's GPUs."""
    gpu = of(config(), MonitoredJob("demo--256px-0001", (name, nodes))).get("gpu")
    assert (gpu and gpu["Threshold"]) == threshold
    if threshold is not None:
        assert threshold == nodes * 100 * instance_type(name).accelerators / 2


def test_machines_that_are_not_chosen_yet_have_no_alarms() -> None:
    assert list(of(config(), MonitoredJob("demo--256px-0001", None))) == ["heartbeat", "stall"]


def test_code_that_says_no_heartbeats_is_not_missed_for_it() -> None:
    assert list(of(config(code="own", entry="train.py"))) == ["gpu", "disk"]


@pytest.mark.parametrize(
    ("job", "status", "secondary", "told"),
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
def test_the_rule_matches_this_runs_lost_jobs(
    job: str, status: str, secondary: str, told: bool
) -> None:
    detail = {"TrainingJobName": job, "TrainingJobStatus": status, "SecondaryStatus": secondary}
    event: Any = {
        "source": "aws.sagemaker",
        "detail-type": "SageMaker Training Job State Change",
        "detail": detail,
    }
    pattern = EventPattern.load(
        json.dumps(failure_rule("digits", "us-east-1", TOPIC)["EventPattern"])
    )
    assert pattern.matches_event(event) is told


def test_the_message_is_a_string_of_values_that_cannot_break_it() -> None:
    [target] = failure_rule("demo", "us-east-1", TOPIC)["Targets"]
    transformer = target["InputTransformer"]
    assert "$.detail.FailureReason" not in transformer["InputPathsMap"].values()
    text = json.loads(transformer["InputTemplate"])
    for key in transformer["InputPathsMap"]:
        assert f"<{key}>" in text
        text = text.replace(f"<{key}>", key)
    assert "<" not in text
    assert "sm-train diagnose job" in text


def _resolved(value: Any, topic: str) -> Any:
    if value == {"Ref": "Topic"}:
        return topic
    if isinstance(value, dict):
        return {key: _resolved(one, topic) for key, one in value.items()}
    return [_resolved(one, topic) for one in value] if isinstance(value, list) else value


@pytest.mark.parametrize("topic", [TOPIC, None])
@thorough
@given(good=runs())
def test_the_template_is_the_requests(topic: str | None, good: dict[str, Any]) -> None:
    run = RunConfig.model_validate(good)
    jobs = first_jobs(run)
    document = template(run, "us-east-1", jobs, topic, None if topic else "team@example.com")
    resources = _resolved(document["Resources"], TOPIC)
    by_type: dict[str, list[dict[str, Any]]] = {}
    for resource in resources.values():
        by_type.setdefault(resource["Type"], []).append(resource["Properties"])
    assert by_type.pop("AWS::CloudWatch::Alarm") == [
        one.request for one in alarms(run, jobs, TOPIC)
    ]
    assert by_type.pop("AWS::Events::Rule") == [failure_rule(run.name, "us-east-1", TOPIC)]
    if topic is None:
        [policy] = by_type.pop("AWS::SNS::TopicPolicy")
        assert policy["PolicyDocument"] == topic_policy(TOPIC)
        assert set(by_type) == {"AWS::SNS::Topic", "AWS::SNS::Subscription"}
    else:
        assert by_type == {}
