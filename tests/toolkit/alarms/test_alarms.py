"""``alarms`` against moto's CloudWatch, EventBridge and SNS: made, kept to the jobs, removed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from sm_train.estimators.request.alarms import alarms, failure_rule, first_jobs, template
from sm_train.toolkit.alarms.sns_topic import doubts

from tests.conftest import Aws, Cli
from tests.support.run_documents import config, stage
from tests.support.run_files import write_run
from tests.toolkit.runs.test_run_lifecycle import FIRST, SECOND, Laptop

OTHERS = "sm-train/demo-2--256px-0001/heartbeat"
TOPIC = "arn:aws:sns:us-east-1:123456789012:team"
KINDS = ("disk", "gpu", "heartbeat", "stall")
SERVICES = ["cloudwatch.amazonaws.com", "events.amazonaws.com"]


@pytest.fixture
def laptop(cli: Cli, aws: Aws, tmp_path: Path) -> Laptop:
    """A run with a live job and a topic; somebody else's run has an alarm."""
    statement = {"Effect": "Allow", "Principal": {"Service": SERVICES}, "Action": "sns:Publish"}
    aws.client("sns").create_topic(
        Name="team", Attributes={"Policy": json.dumps({"Statement": [statement]})}
    )
    aws.client("cloudwatch").put_metric_alarm(
        AlarmName=OTHERS,
        MetricName="m",
        Namespace="n",
        Statistic="Sum",
        Period=60,
        EvaluationPeriods=1,
        Threshold=1,
        ComparisonOperator="GreaterThanThreshold",
    )
    return Laptop(cli, aws, tmp_path, alerts={"sns_topic": TOPIC})


def stored(aws: Aws) -> dict[str, dict[str, Any]]:
    found = aws.client("cloudwatch").describe_alarms()["MetricAlarms"]
    return {alarm["AlarmName"]: alarm for alarm in found if alarm["AlarmName"] != OTHERS}


def names(job: str) -> list[str]:
    return [f"sm-train/{job}/{kind}" for kind in KINDS]


def rules(aws: Aws) -> list[str]:
    return [rule["Name"] for rule in aws.client("events").list_rules()["Rules"]]


def test_alarms_are_made_follow_the_jobs_and_are_removed(laptop: Laptop) -> None:
    aws = laptop.aws
    planned: dict[str, Any] = json.loads(laptop("alarms", "demo", "--dry-run").stdout)
    assert stored(aws) == {}
    assert rules(aws) == []
    asked = laptop("alarms", "demo", code=2).stderr
    assert "Make 4 alarms and a rule for demo, $1.10 a month?" in asked
    assert stored(aws) == {}

    made = laptop.json("alarms", "demo", "--yes")
    assert (made["jobs"], made["topic"]) == ([FIRST], TOPIC)
    assert sorted(made["alarms"]) == names(FIRST)
    assert made["cost_per_month_usd"] == 1.1  # 2 + 1 + 4 + 4 metrics
    assert made["warnings"] == [
        "nobody has confirmed a subscription to the topic: its messages reach nobody"
    ]
    wanted = alarms(config(), first_jobs(config()), TOPIC)
    assert planned["put_metric_alarm"] == [alarm.request for alarm in wanted]
    assert aws.bodies("PutRule")[0]["EventPattern"] == planned["put_rule"]["EventPattern"]
    [targets] = aws.bodies("PutTargets")
    assert targets["Targets"] == failure_rule("demo", "us-east-1", TOPIC)["Targets"]
    kept = stored(aws)
    assert sorted(kept) == names(FIRST)
    for alarm in wanted:
        for key, value in alarm.request.items():
            # moto adds fields that were not given.
            assert kept[alarm.name][key] == value or key == "Metrics", (alarm.name, key)
    again = laptop.json("alarms", FIRST, "--yes")
    assert again["alarms"] == made["alarms"]
    assert stored(aws).keys() == kept.keys()

    laptop.lives.tell(FIRST, "Failed", reason="InternalServerError: x", ended_ago=3600)
    followed = laptop.json("watch", "demo", "--once")
    assert followed["message"].endswith("alarms: 4 made, 4 of ended jobs removed")
    assert sorted(stored(aws)) == names(SECOND)

    laptop.lives.tell(SECOND, "Completed")
    laptop("watch", "demo", "--once")
    assert stored(aws) == {}
    ended = laptop("alarms", "demo", "--yes").stderr
    assert "no job is live" in ended
    assert rules(aws) == ["sm-train-demo"]

    removed = laptop.json("alarms", "demo", "--remove")
    assert removed == {"run": "demo", "removed": [], "rule": "sm-train-demo", "topic": None}
    assert rules(aws) == []
    assert OTHERS in [
        one["AlarmName"] for one in aws.client("cloudwatch").describe_alarms()["MetricAlarms"]
    ]
    assert "demo: has no alarms" in laptop("alarms", laptop.run_file, "--remove").stderr


def test_resume_keeps_alarms_and_a_refusal_does_not_keep_it_from_starting(laptop: Laptop) -> None:
    laptop("alarms", "demo", "--yes")
    laptop.lives.tell(FIRST, "Stopped")
    laptop.aws.refusals["PutRule"] = "AccessDeniedException"
    said = laptop("resume", "demo", "--yes").stderr
    assert f"Started {SECOND}" in said
    assert "alarms, if there are any, are as they were: rule sm-train-demo: AWS returned" in said
    del laptop.aws.refusals["PutRule"]
    laptop.lives.tell(SECOND, "Stopped")
    said = laptop("resume", "demo", "--yes").stderr
    assert "alarms: 4 made, 4 of ended jobs removed" in said
    third = "demo--256px-0003"
    assert sorted(stored(laptop.aws)) == names(third)
    resources = laptop.json("alarms", "demo", "--cloudformation")["Resources"].values()
    written = [one["Properties"].get("AlarmName") for one in resources]
    assert sorted(filter(None, written)) == names(third)
    removed = laptop.json("alarms", "demo", "--remove")
    assert sorted(removed["removed"]) == names(third)
    assert stored(laptop.aws) == {}


def test_an_address_gets_a_topic_that_goes_with_the_alarms(
    cli: Cli, aws: Aws, tmp_path: Path
) -> None:
    laptop = Laptop(cli, aws, tmp_path)
    nobody = laptop("alarms", "demo", "--yes", code=2).stderr
    assert "demo: nobody to tell; write alerts.sns_topic in the run file, or give --topic" in nobody
    made = laptop.json("alarms", "demo", "--email", "team@example.com", "--yes")
    sns, own = aws.client("sns"), "arn:aws:sns:us-east-1:123456789012:sm-train-alarms-demo"
    assert made["topic"] == own
    policy = json.loads(sns.get_topic_attributes(TopicArn=own)["Attributes"]["Policy"])
    assert [one["Principal"]["Service"] for one in policy["Statement"]] == SERVICES
    [subscription] = sns.list_subscriptions_by_topic(TopicArn=own)["Subscriptions"]
    assert subscription["Endpoint"] == "team@example.com"
    # The rule knows whom to tell.
    assert laptop.json("alarms", "demo", "--yes")["topic"] == own
    assert laptop.json("alarms", "demo", "--remove")["topic"] == own
    assert sns.list_topics()["Topics"] == []


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--topic", "team"], "--topic: 'team' must be a topic's ARN"),
        (["--email", "team"], "--email: 'team' must be an address"),
        (["--email", "a@b.c", "--topic", TOPIC], "exclude each other"),
        (["--remove", "--dry-run"], "give one of"),
    ],
    ids=["no-arn", "no-address", "both", "two-ways"],
)
def test_slips_are_told_without_asking_aws(cli: Cli, arguments: list[str], words: str) -> None:
    done = cli("alarms", "demo", *arguments)
    assert done.returncode == 2
    assert words in done.stderr


def test_what_cannot_be_done_is_one_line_and_nothing_is_made(laptop: Laptop) -> None:
    topics = "arn:aws:sns:{}:123456789012:{}".format
    for topic, code, words in (
        (topics("eu-west-1", "team"), 3, "is in eu-west-1 and the run in us-east-1"),
        (topics("us-east-1", "gone"), 2, "gone: does not exist"),
    ):
        assert words in laptop("alarms", "demo", "--yes", "--topic", topic, code=code).stderr
    # Of a stack, say.
    events = laptop.aws.client("events")
    events.put_rule(Name="sm-train-demo", EventPattern="{}")
    for arguments in (["--yes"], ["--remove"]):
        refused = laptop("alarms", "demo", *arguments, code=3).stderr
        assert "was not made by `sm-train alarms`" in refused
    assert rules(laptop.aws) == ["sm-train-demo"]
    events.delete_rule(Name="sm-train-demo")
    laptop.aws.refusals["PutMetricAlarm"] = "AccessDeniedException"
    refused = laptop("alarms", "demo", "--yes", code=4).stderr
    assert refused.splitlines()[-1] == (
        "sm-train: alarm sm-train/demo--256px-0001/heartbeat: AWS returned AccessDeniedException: "
        "no, and why"
    )
    assert stored(laptop.aws) == {}


@pytest.mark.parametrize(
    ("policy", "lacking"),
    [
        ({"Effect": "Allow", "Principal": {"Service": SERVICES}, "Action": "sns:Publish"}, []),
        # What SNS gives a new topic.
        (
            {
                "Effect": "Allow",
                "Principal": {"AWS": "*"},
                "Action": ["SNS:Publish"],
                "Condition": {"StringEquals": {"AWS:SourceOwner": "123456789012"}},
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
    ids=["named", "new", "events-only", "anybody", "nobody"],
)
def test_a_topic_that_would_not_hear_is_said_with_the_statement_it_lacks(
    aws: Aws, monkeypatch: pytest.MonkeyPatch, policy: dict[str, Any], lacking: list[str]
) -> None:
    import boto3

    monkeypatch.setenv("AWS_ENDPOINT_URL", aws.url)
    session = boto3.Session("testing", "testing", region_name="us-east-1")
    topic = session.client("sns").create_topic(
        Name="team", Attributes={"Policy": json.dumps({"Statement": [policy]})}
    )["TopicArn"]
    said = " ".join(doubts(session, topic))
    assert [one for one in SERVICES if f'"{one}"' in said] == lacking
    session.client("sns").set_topic_attributes(
        TopicArn=topic, AttributeName="KmsMasterKeyId", AttributeValue="alias/aws/sns"
    )
    said = " ".join(doubts(session, topic))
    assert "encrypted with alias/aws/sns; no policy lets alarms use that key" in said


def test_the_template_of_a_run_file_takes_no_network_and_passes_cfn_lint(
    cli: Cli, tmp_path: Path
) -> None:
    stages = [stage(), stage("512px", instances=12)]
    run = write_run(tmp_path, stages=stages, alerts={"sns_topic": TOPIC})
    printed = cli("alarms", run, "--cloudformation")
    assert printed.returncode == 0, printed.stderr
    whole = config(stages=stages, alerts={"sns_topic": TOPIC})
    assert yaml.safe_load(printed.stdout) == template(
        whole, "us-east-1", first_jobs(whole), TOPIC, None
    )
    assert "for demo--512px-0001" in printed.stderr
    assert "aws cloudformation deploy" in printed.stderr
    mailed = cli("alarms", run, "--cloudformation", "--email", "team@example.com", "--json")
    for name, text in (("told.yaml", printed.stdout), ("mailed.json", mailed.stdout)):
        (tmp_path / name).write_text(text)
    linted = subprocess.run(
        [Path(sys.executable).parent / "cfn-lint", "told.yaml", "mailed.json"],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
    )
    assert linted.returncode == 0, linted.stdout


def test_a_template_for_too_many_machines_is_refused(cli: Cli, tmp_path: Path) -> None:
    run = write_run(tmp_path, stages=[stage(instances=2500)], alerts={"sns_topic": TOPIC})
    refused = cli("alarms", run, "--cloudformation")
    assert refused.returncode == 3
    assert "503 resources, and a template holds 500" in refused.stderr
