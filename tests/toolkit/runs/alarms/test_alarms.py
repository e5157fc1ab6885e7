"""``alarms`` against moto's CloudWatch, EventBridge and SNS: created, synced with jobs, deleted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from sm_train.estimators.request.alarm_requests import failure_rule, job_alarms
from sm_train.toolkit.runs.alarms.sns_topic import topic_warnings

from tests.conftest import Aws, Cli
from tests.support.run_documents import config, monitored_jobs
from tests.toolkit.runs.run_lifecycle_support import FIRST, SECOND, Laptop

OTHER_ALARM = "sm-train/demo-2--256px-0001/heartbeat"
TOPIC = "arn:aws:sns:us-east-1:345678901234:team"
KINDS = ("disk", "gpu", "heartbeat", "stall")
SERVICES = ["cloudwatch.amazonaws.com", "events.amazonaws.com"]


@pytest.fixture
def laptop(cli: Cli, aws: Aws, tmp_path: Path) -> Laptop:
    """A run with a live job and a topic; another run has an alarm."""
    statement = {"Effect": "Allow", "Principal": {"Service": SERVICES}, "Action": "sns:Publish"}
    aws.client("sns").create_topic(
        Name="team", Attributes={"Policy": json.dumps({"Statement": [statement]})}
    )
    aws.client("cloudwatch").put_metric_alarm(
        AlarmName=OTHER_ALARM,
        MetricName="m",
        Namespace="n",
        Statistic="Sum",
        Period=60,
        EvaluationPeriods=1,
        Threshold=1,
        ComparisonOperator="GreaterThanThreshold",
    )
    return Laptop(cli, aws, tmp_path, alerts={"sns_topic": TOPIC})


def stored_alarms(aws: Aws) -> dict[str, dict[str, Any]]:
    alarms = aws.client("cloudwatch").describe_alarms()["MetricAlarms"]
    return {alarm["AlarmName"]: alarm for alarm in alarms if alarm["AlarmName"] != OTHER_ALARM}


def alarm_names(job: str) -> list[str]:
    return [f"sm-train/{job}/{kind}" for kind in KINDS]


def rule_names(aws: Aws) -> list[str]:
    return [rule["Name"] for rule in aws.client("events").list_rules()["Rules"]]


@pytest.mark.integration
def test_alarms_are_created_follow_the_jobs_and_are_deleted(laptop: Laptop) -> None:
    aws = laptop.aws
    planned: dict[str, Any] = json.loads(laptop("alarms", "demo", "--dry-run").stdout)
    assert stored_alarms(aws) == {}
    assert rule_names(aws) == []
    question = laptop("alarms", "demo", code=2).stderr
    assert "Create 4 alarms and a rule for demo, $1.20 a month?" in question
    assert stored_alarms(aws) == {}

    created = laptop.json("alarms", "demo", "--yes")
    assert (created["jobs"], created["topic"]) == ([FIRST], TOPIC)
    assert sorted(created["alarms"]) == alarm_names(FIRST)
    assert created["cost_per_month_usd"] == 1.2  # 2 + 1 + 4 + 5 metrics
    assert created["warnings"] == [
        "the topic has no confirmed subscription: its messages reach nobody"
    ]
    expected = job_alarms(config(), monitored_jobs(config()), TOPIC)
    assert planned["put_metric_alarm"] == [alarm.request for alarm in expected]
    assert aws.bodies("PutRule")[0]["EventPattern"] == planned["put_rule"]["EventPattern"]
    [targets] = aws.bodies("PutTargets")
    assert targets["Targets"] == failure_rule("demo", "us-east-1", TOPIC).targets
    stored = stored_alarms(aws)
    assert sorted(stored) == alarm_names(FIRST)
    for alarm in expected:
        for key, value in alarm.request.items():
            # moto adds fields to Metrics.
            assert stored[alarm.name][key] == value or key == "Metrics", (alarm.name, key)
    again = laptop.json("alarms", FIRST, "--yes")
    assert again["alarms"] == created["alarms"]
    assert stored_alarms(aws).keys() == stored.keys()

    laptop.sagemaker.set_status(FIRST, "Failed", reason="InternalServerError: x", ended_ago=3600)
    followed = laptop.json("watch", "demo", "--once")
    assert followed["message"].endswith("alarms: 4 created, 4 of ended jobs deleted")
    assert sorted(stored_alarms(aws)) == alarm_names(SECOND)

    laptop.sagemaker.set_status(SECOND, "Completed")
    laptop.sagemaker.checkpoint("256px", 1000)
    laptop("watch", "demo", "--once")
    assert stored_alarms(aws) == {}
    ended = laptop("alarms", "demo", "--yes").stderr
    assert "no job is live" in ended
    assert rule_names(aws) == ["sm-train-demo"]

    deleted = laptop.json("alarms", "demo", "--remove")
    assert deleted == {"run": "demo", "removed": [], "rule": "sm-train-demo", "topic": None}
    assert rule_names(aws) == []
    assert OTHER_ALARM in [
        alarm["AlarmName"] for alarm in aws.client("cloudwatch").describe_alarms()["MetricAlarms"]
    ]
    assert "demo: has no alarms" in laptop("alarms", laptop.run_file, "--remove").stderr


@pytest.mark.integration
def test_resume_syncs_alarms_and_starts_even_if_that_fails(laptop: Laptop) -> None:
    laptop("alarms", "demo", "--yes")
    laptop.sagemaker.set_status(FIRST, "Stopped")
    laptop.aws.error_codes["PutRule"] = "AccessDeniedException"
    output = laptop("resume", "demo", "--yes").stderr
    assert f"Started {SECOND}" in output
    assert "alarms were not updated: rule sm-train-demo: AWS" in output
    del laptop.aws.error_codes["PutRule"]
    laptop.sagemaker.set_status(SECOND, "Stopped")
    output = laptop("resume", "demo", "--yes").stderr
    assert "alarms: 4 created, 4 of ended jobs deleted" in output
    third = "demo--256px-0003"
    assert sorted(stored_alarms(laptop.aws)) == alarm_names(third)
    deleted = laptop.json("alarms", "demo", "--remove")
    assert sorted(deleted["removed"]) == alarm_names(third)
    assert stored_alarms(laptop.aws) == {}


@pytest.mark.integration
def test_email_gets_a_topic_that_is_deleted_with_the_alarms(
    cli: Cli, aws: Aws, tmp_path: Path
) -> None:
    laptop = Laptop(cli, aws, tmp_path)
    error = laptop("alarms", "demo", "--yes", code=2).stderr
    assert "demo: no topic to notify; write alerts.sns_topic in the run file, or pass" in error
    email = ("--email", "team@example.com")
    error = laptop("alarms", "demo", *email, "--yes", code=2).stderr
    assert "--email: name the customer-managed KMS key that encrypts the new topic" in error
    error = laptop("alarms", "demo", *email, "--kms-key", "alias/aws/sns", "--yes", code=2).stderr
    assert "--kms-key: alias/aws/sns is AWS's own key, which alarms cannot use" in error
    assert aws.client("sns").list_topics()["Topics"] == []
    created = laptop.json("alarms", "demo", *email, "--unencrypted", "--yes")
    sns, topic = aws.client("sns"), "arn:aws:sns:us-east-1:345678901234:sm-train-alarms-demo"
    assert created["topic"] == topic
    policy = json.loads(sns.get_topic_attributes(TopicArn=topic)["Attributes"]["Policy"])
    assert [statement["Principal"]["Service"] for statement in policy["Statement"]] == SERVICES
    [subscription] = sns.list_subscriptions_by_topic(TopicArn=topic)["Subscriptions"]
    assert subscription["Endpoint"] == "team@example.com"
    assert not sns.get_topic_attributes(TopicArn=topic)["Attributes"].get("KmsMasterKeyId")
    assert created["warnings"] == ["the topic is not encrypted"]
    encrypted = laptop.json("alarms", "demo", *email, "--kms-key", "alias/own", "--yes")
    key = sns.get_topic_attributes(TopicArn=topic)["Attributes"]["KmsMasterKeyId"]
    assert key == "alias/own"
    assert "alias/own; the Statement of the key's policy must contain" in encrypted["warnings"][0]
    # The rule holds the topic.
    assert laptop.json("alarms", "demo", "--yes")["topic"] == topic
    assert laptop.json("alarms", "demo", "--remove")["topic"] == topic
    assert sns.list_topics()["Topics"] == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--topic", "team"], "--topic: 'team' must be a topic ARN"),
        (["--email", "team"], "--email: 'team' must be an address"),
        (["--email", "a@b.c", "--topic", TOPIC], "mutually exclusive"),
        (["--remove", "--dry-run"], "mutually exclusive"),
        (["--kms-key", "alias/own"], "--kms-key encrypts the topic of --email; pass both"),
        (["--unencrypted"], "--unencrypted creates the topic of --email"),
    ],
    ids=[
        "no-arn",
        "no-address",
        "topic-and-email",
        "remove-and-dry-run",
        "key-of-nothing",
        "unencrypted-nothing",
    ],
)
def test_invalid_options_fail_without_calling_aws(
    cli: Cli, arguments: list[str], message: str
) -> None:
    result = cli("alarms", "demo", *arguments)
    assert result.returncode == 2
    assert message in result.stderr


@pytest.mark.integration
def test_errors_are_one_line_and_nothing_is_created(laptop: Laptop) -> None:
    topics = "arn:aws:sns:{}:345678901234:{}".format
    for topic, code, message in (
        (topics("eu-west-1", "team"), 3, "is in eu-west-1 and the run in us-east-1"),
        (topics("us-east-1", "gone"), 2, "gone: does not exist"),
    ):
        assert message in laptop("alarms", "demo", "--yes", "--topic", topic, code=code).stderr
    # A rule that somebody else created.
    events = laptop.aws.client("events")
    events.put_rule(Name="sm-train-demo", EventPattern="{}")
    for arguments in (["--yes"], ["--remove"]):
        error = laptop("alarms", "demo", *arguments, code=3).stderr
        assert "was not created by `sm-train alarms`" in error
    assert rule_names(laptop.aws) == ["sm-train-demo"]
    events.delete_rule(Name="sm-train-demo")
    laptop.aws.error_codes["PutMetricAlarm"] = "AccessDeniedException"
    error = laptop("alarms", "demo", "--yes", code=4).stderr
    assert error.splitlines()[-1] == (
        "sm-train: alarm sm-train/demo--256px-0001/heartbeat: AWS returned AccessDeniedException: "
        "rejected by the test"
    )
    assert stored_alarms(laptop.aws) == {}


@pytest.mark.parametrize(
    ("policy", "missing"),
    [
        ({"Effect": "Allow", "Principal": {"Service": SERVICES}, "Action": "sns:Publish"}, []),
        # The default policy of a new topic.
        (
            {
                "Effect": "Allow",
                "Principal": {"AWS": "*"},
                "Action": ["SNS:Publish"],
                "Condition": {"StringEquals": {"AWS:SourceOwner": "345678901234"}},
            },
            SERVICES[1:],
        ),
        (
            {"Effect": "Allow", "Principal": {"Service": SERVICES[1]}, "Action": "sns:*"},
            SERVICES[:1],
        ),
        ({"Effect": "Allow", "Principal": "*", "Action": "sns:Publish"}, []),
        ({"Effect": "Deny", "Principal": "*", "Action": "sns:Publish"}, SERVICES),
    ],
    ids=["named", "default", "events-only", "anybody", "nobody"],
)
def test_topic_warning_contains_the_missing_statement(
    aws: Aws, monkeypatch: pytest.MonkeyPatch, policy: dict[str, Any], missing: list[str]
) -> None:
    import boto3

    monkeypatch.setenv("AWS_ENDPOINT_URL", aws.url)
    session = boto3.Session("testing", "testing", region_name="us-east-1")
    topic = session.client("sns").create_topic(
        Name="team", Attributes={"Policy": json.dumps({"Statement": [policy]})}
    )["TopicArn"]
    warnings = " ".join(topic_warnings(session, topic))
    assert [service for service in SERVICES if f'"{service}"' in warnings] == missing
    session.client("sns").set_topic_attributes(
        TopicArn=topic, AttributeName="KmsMasterKeyId", AttributeValue="alias/aws/sns"
    )
    warnings = " ".join(topic_warnings(session, topic))
    assert "encrypted with alias/aws/sns; alarms cannot use that key" in warnings
