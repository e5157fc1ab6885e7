"""``iam``: what is recorded of real commands is allowed, and nothing is allowed beyond it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest
from sm_train.estimators.request.iam import policies

from tests.conftest import Aws, Cli
from tests.support.job_lifecycle import Lives
from tests.support.run_documents import ECR, config
from tests.support.run_files import write_run

SHARDS = {f"shards/{index}.tar": b"x" for index in range(4)} | {"index.parquet": b"x"}
ROLE = "arn:aws:iam::111122223333:role/sm-train"

# What no command of this test calls, and why the policy has it all the same.
OTHERS = {
    "sagemaker:StopTrainingJob": "stop",
    "logs:GetLogEvents": "diagnose, which reads stream by stream",
    "ecr:DescribeImages": "check, of an image that is not AWS's own",
    "iam:GetRole": "check, by a protocol that is not recorded here",
    "pricing:GetProducts": "cost --refresh, whose test has a stand-in of its own",
    "sns:GetTopicAttributes": "alarms, by a protocol that is not recorded here",
    **dict.fromkeys(
        [
            "sns:CreateTopic",
            "sns:TagResource",
            "sns:ListTagsForResource",
            "sns:SetTopicAttributes",
            "sns:Subscribe",
            "sns:DeleteTopic",
        ],
        "alarms --email, by the same",
    ),
}


def allowed(policy: dict[str, Any], action: str, resource: str) -> str | None:
    """The statement that allows ``action`` on ``resource``."""
    for statement in policy["Statement"]:
        if action in statement["Action"] and any(
            fnmatchcase(resource, one) for one in statement["Resource"]
        ):
            sid: str = statement["Sid"]
            return sid
    return None


_GROUP = "arn:aws:logs:us-east-1:111122223333:log-group:/aws/sagemaker/TrainingJobs:*"
_ALARM = "arn:aws:cloudwatch:us-east-1:111122223333:alarm:"
_ELSEWHERE = {
    "ListServiceQuotas": ("servicequotas:ListServiceQuotas", "*"),
    "DescribeLogStreams": ("logs:DescribeLogStreams", _GROUP),
    "FilterLogEvents": ("logs:FilterLogEvents", _GROUP),
    "GetMetricData": ("cloudwatch:GetMetricData", "*"),
    "DescribeAlarms": ("cloudwatch:DescribeAlarms", "*"),
} | {
    operation: (f"events:{operation}", "arn:aws:events:us-east-1:111122223333:rule/sm-train-Demo")
    for operation in (
        "DescribeRule",
        "ListTagsForResource",
        "ListTargetsByRule",
        "PutRule",
        "PutTargets",
        "RemoveTargets",
        "DeleteRule",
    )
}
"""Operations of other services than SageMaker, as IAM sees them."""


def calls(aws: Aws) -> Iterator[tuple[str, str]]:
    """Every recorded call as the action and the resource that IAM sees."""
    job = "arn:aws:sagemaker:us-east-1:111122223333:training-job/"
    for operation, body in aws.calls:
        name = body.get("TrainingJobName", "").lower()
        if operation in _ELSEWHERE:
            action, resource = _ELSEWHERE[operation]
            yield action, resource
            if "Tags" in body:
                yield "events:TagResource", resource
        elif operation in ("PutMetricAlarm", "DeleteAlarms"):
            for alarm in body.get("AlarmNames") or [body["AlarmName"]]:
                yield f"cloudwatch:{operation}", _ALARM + alarm
        elif operation == "ListTags":
            yield "sagemaker:ListTags", job + body["ResourceArn"].rpartition("/")[2].lower()
        else:
            yield f"sagemaker:{operation}", job + name if name else "*"
        if operation == "CreateTrainingJob":
            yield "sagemaker:AddTags", job + name
            yield "iam:PassRole", body["RoleArn"]
    for method, path, query in aws.requests:
        bucket, _, key = path.strip("/").partition("/")
        if bucket in ("moto-api", ""):  # "" is of IAM and STS
            continue
        if key:
            action = {"GET": "GetObject", "HEAD": "GetObject"}.get(method, "PutObject")
        else:
            assert method == "HEAD" or "list-type=2" in query, (method, path, query)
            action = "ListBucket"
        yield f"s3:{action}", f"arn:aws:s3:::{path.strip('/')}"


def test_the_laptops_policy_is_what_its_commands_call(cli: Cli, aws: Aws, tmp_path: Path) -> None:
    aws.make_bucket("my-bucket")
    aws.make_bucket("their-bucket", **SHARDS)
    topic = aws.client("sns").create_topic(Name="team")["TopicArn"]
    run = write_run(
        tmp_path, name="Demo", data={"uri": "s3://their-bucket/shards/"}, tags={"team": "imaging"}
    )
    aws.calls.clear()
    aws.requests.clear()
    options = {"network": "loopback", "env": aws.environment}
    submitted = cli("submit", run, "--yes", "--json", **options)
    assert submitted.returncode == 0, submitted.stderr
    job = json.loads(submitted.stdout)["training_job_name"]
    Lives(aws).tell(job, "InProgress")
    for command in (
        ["alarms", run, "--topic", topic, "--yes"],
        ["alarms", run, "--remove"],
        ["check", run],
        ["cost", run, "--actual"],
        ["watch", run, "--once"],
        ["logs", run],
        ["--region", "us-east-1", "submit", "--clone", job, "--set", "name=Demo", "--dry-run"],
    ):
        result = cli(*command, **options)
        # 3: check finds the account of the stand-in to be another than the role's.
        assert result.returncode in (0, 3), result.stderr
    printed = cli("iam", run, "--json")
    assert printed.returncode == 0, printed.stderr
    documents = json.loads(printed.stdout)
    image = "arn:aws:ecr:us-east-1:763104351884:repository/pytorch-training"
    assert allowed(documents["job"], "ecr:BatchGetImage", image) == "Image"
    policy = documents["laptop"]
    recorded = set(calls(aws))
    assert {"sagemaker:CreateTrainingJob", "s3:PutObject"} < {action for action, _ in recorded}
    assert [call for call in sorted(recorded) if allowed(policy, *call) is None] == []
    used = {action for action, _ in recorded}
    granted = {action for statement in policy["Statement"] for action in statement["Action"]}
    assert granted - used == OTHERS.keys()
    statements = {statement["Sid"] for statement in policy["Statement"]}
    assert {allowed(policy, *call) for call in recorded} >= statements - {
        "CheckImage",
        "CheckRole",
        "LookAtTopic",
        "AlarmTopic",
    }


def test_another_runs_places_are_not_allowed() -> None:
    laptop = policies(config(), "us-east-1", ECR)["laptop"]
    jobs = "arn:aws:sagemaker:us-east-1:111122223333:training-job/"
    assert allowed(laptop, "sagemaker:StopTrainingJob", f"{jobs}demo-256px-1") == "Jobs"
    for action, resource in (
        ("sagemaker:StopTrainingJob", f"{jobs}other-256px-1"),
        ("s3:PutObject", "arn:aws:s3:::my-bucket/shards/0.tar"),
        ("s3:GetObject", "arn:aws:s3:::other/demo/x"),
        ("iam:PassRole", "arn:aws:iam::111122223333:role/admin"),
        ("s3:DeleteObject", "arn:aws:s3:::my-bucket/demo/x"),
    ):
        assert allowed(laptop, action, resource) is None, action


def test_the_jobs_role_reads_its_channels_and_writes_below_its_run() -> None:
    run = config(
        data={"uri": "s3://data/shards/", "validation": "s3://data/held-out/"},
        model={"preset": "sd2", "components": "s3://models/sd2/"},
        channels={"masks": {"uri": "s3://masks/a/"}, "all": {"uri": "s3://whole"}},
        cluster={"instance_type": "ml.p5.48xlarge", "image": ECR},
    )
    job = policies(run, "us-east-1", ECR)["job"]
    for path in (
        "data/shards/0.tar",
        "data/index.parquet",
        "data/held-out/0.tar",
        "models/sd2/vae/a",
        "masks/a/b",
        "whole/a",
        "my-bucket/demo/checkpoints/256px/a",
    ):
        assert allowed(job, "s3:GetObject", f"arn:aws:s3:::{path}") == "Read", path
    assert allowed(job, "s3:PutObject", "arn:aws:s3:::my-bucket/demo/output/a") == "Write"
    assert allowed(job, "s3:PutObject", "arn:aws:s3:::data/shards/0.tar") is None
    assert allowed(job, "s3:GetObject", "arn:aws:s3:::my-bucket/other/a") is None
    assert allowed(job, "s3:GetObject", "arn:aws:s3:::whole-other/a") is None
    image = "arn:aws:ecr:us-east-1:111122223333:repository/own"
    assert allowed(job, "ecr:BatchGetImage", image) == "Image"
    assert allowed(job, "ec2:CreateNetworkInterface", "*") is None


def test_a_run_with_fallbacks_is_allowed_its_places_there_and_no_more() -> None:
    run = config(
        cluster={"instance_type": "ml.p5.48xlarge", "image": ECR},
        alerts={"slack_secret": "slack/webhook"},
        recovery={"fallbacks": [{"region": "us-west-2", "buckets": {"my-bucket": "west"}}]},
    )
    documents = policies(run, "us-east-1", ECR)
    laptop, job = documents["laptop"], documents["job"]
    there = "arn:aws:sagemaker:us-west-2:111122223333:training-job/demo-256px-1"
    assert allowed(laptop, "sagemaker:CreateTrainingJob", there) == "Jobs"
    elsewhere = there.replace("us-west-2", "eu-west-1")
    assert allowed(laptop, "sagemaker:CreateTrainingJob", elsewhere) is None
    for key in ("west/demo/checkpoints/256px/a", "my-bucket/demo/jobs/a"):
        for action in ("s3:GetObject", "s3:PutObject", "s3:AbortMultipartUpload"):
            assert allowed(laptop, action, f"arn:aws:s3:::{key}"), (action, key)
    assert allowed(job, "s3:GetObject", "arn:aws:s3:::west/shards/0.tar") == "Read"
    image = "arn:aws:ecr:us-west-2:111122223333:repository/own"
    assert allowed(job, "ecr:BatchGetImage", image) == "Image"
    secret = "arn:aws:secretsmanager:us-west-2:111122223333:secret:slack/webhook-??????"
    assert allowed(job, "secretsmanager:GetSecretValue", secret) == "Secrets"
    one = policies(config(), "us-east-1", ECR)["laptop"]
    assert allowed(one, "s3:AbortMultipartUpload", "arn:aws:s3:::my-bucket/demo/x") is None


@pytest.mark.parametrize(
    ("changes", "action"),
    [
        ({"output_kms_key": "alias/own"}, "kms:GenerateDataKey"),
        (
            {
                "cluster": {
                    "instance_type": "ml.p5.48xlarge",
                    "vpc": {"subnets": ["subnet-1"], "security_groups": ["sg-1"]},
                }
            },
            "ec2:CreateNetworkInterface",
        ),
        (
            {"cluster": {"instance_type": "ml.p5.48xlarge", "remote_debug": True}},
            "ssmmessages:OpenDataChannel",
        ),
        ({"alerts": {"slack_secret": "slack/webhook"}}, "secretsmanager:GetSecretValue"),
        ({"alerts": {"webhook_secret": "ssm:/own/webhook"}}, "ssm:GetParameter"),
        (
            {"alerts": {"sns_topic": "arn:aws:sns:us-east-1:111122223333:sm-train"}},
            "sns:Publish",
        ),
    ],
    ids=["keys", "vpc", "remote-debug", "secret", "parameter", "topic"],
)
def test_what_a_run_asks_for_its_role_may_do(
    aws: Aws, changes: dict[str, Any], action: str
) -> None:
    """moto checks each document as IAM's grammar does."""
    documents = policies(config(**changes), "us-east-1", ECR)
    granted = [one for statement in documents["job"]["Statement"] for one in statement["Action"]]
    assert action in granted
    iam = aws.client("iam")
    for name in ("laptop", "job"):
        iam.create_policy(PolicyName=name, PolicyDocument=json.dumps(documents[name]))
    iam.create_role(RoleName="own", AssumeRolePolicyDocument=json.dumps(documents["trust"]))
