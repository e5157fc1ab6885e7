"""``iam``: the recorded calls of real commands are allowed, and nothing beyond them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from sm_train.estimators.config.fields import MAX_JOB_NAME
from sm_train.estimators.config.naming import canary_prefix, measuring_run
from sm_train.estimators.request.iam import merge_policies, policies

from tests.conftest import Aws, Cli
from tests.support.aws.policy_enforcement import ACCOUNT, allowed
from tests.support.job_lifecycle import FakeSageMaker
from tests.support.run_documents import ECR, config
from tests.support.run_files import write_run

SHARDS = {f"shards/{index}.tar": b"x" for index in range(4)} | {"index.parquet": b"x"}
ROLE = "arn:aws:iam::210987654321:role/sm-train"

NOT_CALLED = {
    "sagemaker:UpdateTrainingJob": "watch, to end a warm pool at the budget",
    "logs:GetLogEvents": "diagnose, which reads each stream",
    "ecr:DescribeImages": "check, for an image that is not AWS's",
    "iam:SimulatePrincipalPolicy": "check, for a role that exists",
    "pricing:GetProducts": "cost --refresh, which has its own test",
}
"""Actions that no command of the test calls, and what needs them."""

_LOG_GROUP = "arn:aws:logs:us-east-1:210987654321:log-group:/aws/sagemaker/TrainingJobs:*"


class EndedJobs(FakeSageMaker):
    """Every job ends with ``status`` as soon as it is created."""

    status = "InProgress"

    def _start(self, response: dict[str, Any]) -> dict[str, Any]:
        super()._start(response)
        arn = response["TrainingJobArn"]
        self.set_status(arn.rsplit("/", 1)[1], self.status, region=arn.split(":")[3])
        return response


@pytest.mark.integration
@pytest.mark.parametrize("loses", [False, True], ids=["answers", "lost answers"])
def test_commands_need_the_printed_policies_and_no_more(
    cli: Cli, aws: Aws, tmp_path: Path, loses: bool
) -> None:
    """The server enforces them: it denies what the policy of the caller does not allow.

    Also if the first answer to each conditional write is lost after S3 has carried it out.
    """
    aws.loses_conditional_writes = loses
    aws.make_bucket("ai-bucket")
    aws.make_bucket("their-bucket", **SHARDS)
    topic = aws.client("sns").create_topic(Name="team")["TopicArn"]
    run = write_run(
        tmp_path,
        name="Demo",
        role=f"arn:aws:iam::{ACCOUNT}:role/sm-train",
        data={"uri": "s3://their-bucket/shards/"},
        tags={"team": "imaging"},
        alerts={"sns_topic": topic},
    )
    options = {"network": "loopback", "env": aws.environment}
    printed = cli("iam", run, "--json")
    assert printed.returncode == 0, printed.stderr
    documents = json.loads(printed.stdout)
    image = "arn:aws:ecr:us-east-1:763104351884:repository/pytorch"
    assert allowed(documents["job"], "ecr:BatchGetImage", image) == "PullImage"
    jobs = EndedJobs(aws)
    aws.policy = documents["laptop"]

    def run_command(*command: Any, code: int = 0) -> str:
        result = cli(*command, **options)
        assert aws.denied == [], (command, result.stderr)
        assert result.returncode == code, (command, result.stderr)
        return str(result.stdout)

    job = json.loads(run_command("submit", run, "--yes", "--json"))["training_job_name"]
    run_command("alarms", run, "--topic", topic, "--yes")
    # 3: check finds that moto does not have the role.
    run_command("check", run, code=3)
    for command in (
        ["cost", run, "--actual"],
        ["status", run],
        ["--region", "us-east-1", "list"],
        ["watch", run, "--once"],
        ["logs", run],
        ["--region", "us-east-1", "submit", "--clone", job, "--set", "name=Demo", "--dry-run"],
        ["--region", "us-east-1", "stop", job],
    ):
        run_command(*command)
    jobs.set_status(job, "Stopped")
    resumed = json.loads(run_command("resume", run, "--yes", "--json"))["training_job_name"]
    jobs.status = "Failed"
    run_command("doctor", run, "--yes", code=6)
    # 3: the canary's report says that nothing was observed.
    run_command("doctor", run, "--yes", "--canary", "--interval", "1s", code=3)
    run_command("measure", run, "--stage", "256px", "--yes", code=6)
    run_command("alarms", run, "--remove")
    run_command("alarms", run, "--email", "team@example.com", "--unencrypted", "--yes")
    run_command("alarms", run, "--remove")
    used = {action for action, *_ in aws.checked}
    granted = {action for statement in aws.policy["Statement"] for action in statement["Action"]}
    assert granted - used == NOT_CALLED.keys()

    # The function that watches the run restarts its job.
    aws.policy = documents["watch"]
    jobs.status = "InProgress"
    reason = "InternalServerError: We encountered an internal error. Please try again."
    jobs.set_status(resumed, "Failed", reason=reason, ended_ago=3600)
    created = len(aws.bodies("CreateTrainingJob"))
    run_command("watch", run, "--once")
    assert len(aws.bodies("CreateTrainingJob")) == created + 1


def test_other_runs_are_not_allowed() -> None:
    laptop = policies(config(), "us-east-1", ECR)["laptop"]
    jobs = "arn:aws:sagemaker:us-east-1:210987654321:training-job/"
    assert allowed(laptop, "sagemaker:StopTrainingJob", f"{jobs}demo--256px-0001") == "ManageJobs"
    for action, resource in (
        ("sagemaker:StopTrainingJob", f"{jobs}other--256px-0001"),
        ("s3:PutObject", "arn:aws:s3:::ai-bucket/shards/0.tar"),
        ("s3:GetObject", "arn:aws:s3:::other/demo/x"),
        ("iam:PassRole", "arn:aws:iam::210987654321:role/admin"),
        ("s3:DeleteObject", "arn:aws:s3:::ai-bucket/demo/x"),
        ("s3:ListBucket", "arn:aws:s3:::ai-bucket"),
        (
            "logs:GetLogEvents",
            f"{_LOG_GROUP.removesuffix(':*')}:log-stream:other--256px-0001/algo-1-1",
        ),
    ):
        assert allowed(laptop, action, resource) is None, action


LONG = "a-run-whose-name-has-over-thirty-letters"


@pytest.mark.parametrize("run", ["demo", LONG])
def test_measurements_and_canaries_of_the_run_are_allowed_and_no_other_run(run: str) -> None:
    documents = policies(config(name=run), "us-east-1", ECR)
    laptop, job = documents["laptop"], documents["job"]
    canary = f"{canary_prefix(run)}1122000000"
    for jobs_of, is_allowed in (
        (run, True),
        (measuring_run(run), True),
        (canary, True),
        (f"{run}-2", False),
        (measuring_run(f"{run}-2"), False),
        (f"{canary_prefix(f'{run}-2')}1122000000", False),
    ):
        assert len(jobs_of) <= MAX_JOB_NAME - len("--s-0001")
        arn = f"arn:aws:sagemaker:us-east-1:210987654321:training-job/{jobs_of}--256px-0001"
        stream = f"{_LOG_GROUP.removesuffix(':*')}:log-stream:{jobs_of}--256px-0001/algo-1-1"
        for policy, action, resource in (
            (laptop, "sagemaker:CreateTrainingJob", arn),
            (laptop, "logs:GetLogEvents", stream),
            (job, "logs:PutLogEvents", stream),
            (job, "s3:PutObject", f"arn:aws:s3:::ai-bucket/{jobs_of}/checkpoints/256px/a"),
        ):
            assert (allowed(policy, action, resource) is not None) == is_allowed, (action, resource)


def test_laptop_may_check_and_use_the_key_of_the_bucket() -> None:
    keys = {"other": "alias/other", "ai-bucket": "default"}
    laptop = policies(config(bucket_kms_keys=keys), "us-east-1", ECR)["laptop"]
    for action in ("s3:GetBucketPolicy", "s3:GetEncryptionConfiguration"):
        assert allowed(laptop, action, "arn:aws:s3:::ai-bucket") == "CheckEncryption"
    [statement] = [
        allowed for allowed in laptop["Statement"] if allowed["Sid"] == "UseKeysWithAlias"
    ]
    assert set(statement["Action"]) >= {"kms:GenerateDataKey", "kms:Decrypt"}
    assert statement["Condition"]["ForAnyValue:StringEquals"] == {
        "kms:ResourceAliases": ["alias/other"]
    }


def test_keys_with_an_alias_are_limited_to_it() -> None:
    alias = "arn:aws:kms:us-east-1:210987654321:alias/own"
    runs = (config(output_kms_key=alias), config(name="other", output_kms_key="alias/more"))
    both = [policies(run, "us-east-1", ECR)["job"] for run in runs]
    for policy, names in (
        (both[0], ["alias/own"]),
        (merge_policies(both), ["alias/more", "alias/own"]),
    ):
        [statement] = [
            allowed for allowed in policy["Statement"] if "kms:Decrypt" in allowed["Action"]
        ]
        assert statement["Resource"] == ["arn:aws:kms:us-east-1:210987654321:key/*"]
        condition = {"ForAnyValue:StringEquals": {"kms:ResourceAliases": names}}
        assert statement["Condition"] == condition


@pytest.mark.parametrize("name", ["laptop", "job", "watch"])
def test_buckets_are_listed_below_the_run_and_its_inputs_only(name: str) -> None:
    run = config(
        data={"uri": "s3://ai-bucket/shards/"},
        model={"preset": "sd2", "components": "s3://models.own/sd2/"},
    )
    policy = policies(run, "us-east-1", ECR)[name]
    for bucket, prefix, is_allowed in (
        ("ai-bucket", "demo/", True),
        ("ai-bucket", "demo/checkpoints/256px/", True),
        ("ai-bucket", "shards/", True),
        ("ai-bucket", "", False),
        ("ai-bucket", "demo-2/", False),
        ("ai-bucket", "other/", False),
        ("models.own", "sd2/vae/", True),
        ("models.own", "demo/", False),
    ):
        sid = allowed(policy, "s3:ListBucket", f"arn:aws:s3:::{bucket}", prefix)
        assert (sid is not None) == is_allowed, (bucket, prefix)
    # Only SageMaker, with the job's role, may list without a prefix.
    listings = [
        statement for statement in policy["Statement"] if "s3:ListBucket" in statement["Action"]
    ]
    operator = "StringLikeIfExists" if name == "job" else "StringLike"
    assert [list(listing["Condition"]) for listing in listings] == [[operator]] * 2


def test_function_of_watch_may_touch_its_runs_only(cli: Cli, tmp_path: Path) -> None:
    first = write_run(tmp_path, name="Demo")
    second = first.with_name("second.yaml")
    second.write_text(first.read_text().replace("Demo", "other"))
    printed = cli("template", "watch-lambda", str(first), str(second))
    assert printed.returncode == 0, printed.stderr
    # The functions of CloudFormation are read as their arguments.
    template = yaml.safe_load(re.sub(r"!(Ref|Sub|GetAtt) ", "", printed.stdout))
    function = template["Resources"]["Watcher"]["Properties"]
    assert function["Environment"]["Variables"]["SM_TRAIN_RUNS"] == "Demo,other"
    [policy] = function["Policies"]
    jobs = "arn:aws:sagemaker:us-east-1:210987654321:training-job/"
    for action, resource, is_allowed in (
        ("sagemaker:StopTrainingJob", f"{jobs}demo--256px-0001", True),
        ("sagemaker:StopTrainingJob", f"{jobs}other--256px-0001", True),
        ("sagemaker:StopTrainingJob", f"{jobs}third--256px-0001", False),
        ("s3:PutObject", "arn:aws:s3:::ai-bucket/other/claims/a", True),
        ("s3:PutObject", "arn:aws:s3:::ai-bucket/third/claims/a", False),
        ("iam:PassRole", ROLE, True),
        ("iam:PassRole", "arn:aws:iam::210987654321:role/admin", False),
        ("iam:GetRole", ROLE, False),
        ("sns:DeleteTopic", "arn:aws:sns:us-east-1:210987654321:sm-train-alarms-Demo", False),
    ):
        assert (allowed(policy, action, resource) is not None) == is_allowed, (action, resource)
    for prefix, is_allowed in (("Demo/", True), ("other/", True), ("third/", False)):
        sid = allowed(policy, "s3:ListBucket", "arn:aws:s3:::ai-bucket", prefix)
        assert (sid is not None) == is_allowed, prefix


def test_template_takes_run_files_for_the_watch_function_only(cli: Cli, tmp_path: Path) -> None:
    run = str(write_run(tmp_path))
    for arguments, message in (
        (["watch-lambda"], "watch-lambda takes the run files to watch"),
        (["pack-lambda", run], "pack-lambda takes no run file"),
    ):
        refused = cli("template", *arguments)
        assert (refused.returncode, message in refused.stderr) == (2, True)


def test_job_reads_its_channels_and_writes_below_its_run() -> None:
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
        "ai-bucket/demo/checkpoints/256px/a",
    ):
        assert allowed(job, "s3:GetObject", f"arn:aws:s3:::{path}") == "Read", path
    assert allowed(job, "s3:PutObject", "arn:aws:s3:::ai-bucket/demo/output/a") == "Write"
    assert allowed(job, "s3:PutObject", "arn:aws:s3:::data/shards/0.tar") is None
    assert allowed(job, "s3:GetObject", "arn:aws:s3:::ai-bucket/other/a") is None
    assert allowed(job, "s3:GetObject", "arn:aws:s3:::whole-other/a") is None
    image = "arn:aws:ecr:us-east-1:210987654321:repository/own"
    assert allowed(job, "ecr:BatchGetImage", image) == "PullImage"
    assert allowed(job, "ec2:CreateNetworkInterface", "*") is None


def test_fallbacks_extend_the_policies_to_their_regions_only() -> None:
    run = config(
        cluster={"instance_type": "ml.p5.48xlarge", "image": ECR},
        alerts={"slack_secret": "slack/webhook"},
        recovery={"fallbacks": [{"region": "us-west-2", "buckets": {"ai-bucket": "west"}}]},
    )
    documents = policies(run, "us-east-1", ECR)
    laptop, job = documents["laptop"], documents["job"]
    west_job = "arn:aws:sagemaker:us-west-2:210987654321:training-job/demo--256px-0001"
    assert allowed(laptop, "sagemaker:CreateTrainingJob", west_job) == "ManageJobs"
    europe_job = west_job.replace("us-west-2", "eu-west-1")
    assert allowed(laptop, "sagemaker:CreateTrainingJob", europe_job) is None
    for key in ("west/demo/checkpoints/256px/a", "ai-bucket/demo/jobs/a"):
        for action in ("s3:GetObject", "s3:PutObject", "s3:AbortMultipartUpload"):
            assert allowed(laptop, action, f"arn:aws:s3:::{key}"), (action, key)
    assert allowed(job, "s3:GetObject", "arn:aws:s3:::west/shards/0.tar") == "Read"
    image = "arn:aws:ecr:us-west-2:210987654321:repository/own"
    assert allowed(job, "ecr:BatchGetImage", image) == "PullImage"
    secret = "arn:aws:secretsmanager:us-west-2:210987654321:secret:slack/webhook-??????"
    assert allowed(job, "secretsmanager:GetSecretValue", secret) == "ReadSecrets"
    objects = "arn:aws:s3:::ai-bucket/demo/x"
    without_fallbacks = policies(config(), "us-east-1", ECR)["laptop"]
    assert allowed(without_fallbacks, "s3:AbortMultipartUpload", objects) is None


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
            {"trackers": {"wandb": {"secret": "wandb/key"}}},
            "secretsmanager:GetSecretValue",
        ),
        (
            {
                "trackers": {
                    "mlflow": {"uri": "arn:aws:sagemaker:us-east-1:210987654321:mlflow-app/a"}
                }
            },
            "sagemaker-mlflow:LogBatch",
        ),
        (
            {"alerts": {"sns_topic": "arn:aws:sns:us-east-1:210987654321:sm-train"}},
            "sns:Publish",
        ),
    ],
    ids=["keys", "vpc", "remote-debug", "secret", "parameter", "wandb", "mlflow", "topic"],
)
def test_job_may_use_what_the_run_file_names(
    aws: Aws, changes: dict[str, Any], action: str
) -> None:
    """moto checks that each document is valid IAM grammar."""
    documents = policies(config(**changes), "us-east-1", ECR)
    actions = [name for statement in documents["job"]["Statement"] for name in statement["Action"]]
    assert action in actions
    iam = aws.client("iam")
    for name in ("laptop", "job"):
        iam.create_policy(PolicyName=name, PolicyDocument=json.dumps(documents[name]))
    iam.create_role(RoleName="own", AssumeRolePolicyDocument=json.dumps(documents["trust"]))


def test_private_network_adds_what_its_parts_need_and_no_more() -> None:
    arn = "arn:aws:{}:us-east-1:210987654321:{}"
    repository = arn.format("codeartifact", "repository/own/packages")
    function = arn.format("lambda", "function:registry")
    run = config(
        cluster={
            "instance_type": "ml.p5.48xlarge",
            "vpc": {"subnets": ["subnet-1"], "security_groups": ["sg-1"]},
            "image": "registry.example.com/own:1",
            "image_credentials": function,
            "package_index": repository,
        },
        data={
            "uri": "s3://ai-bucket/shards/",
            "file_system": {"id": "fs-0123456789", "type": "FSxLustre", "directory": "/a/b"},
        },
        channels={
            "words": {"file_system": {"id": "fs-01234567", "type": "EFS", "directory": "/w"}}
        },
    )
    documents = policies(run, "us-east-1", "registry.example.com/own:1")
    lustre, efs = (
        arn.format("fsx", "file-system/fs-0123456789"),
        arn.format("elasticfilesystem", "file-system/fs-01234567"),
    )
    for action, resource in (
        ("lambda:InvokeFunction", function),
        ("codeartifact:GetAuthorizationToken", arn.format("codeartifact", "domain/own")),
        ("codeartifact:GetRepositoryEndpoint", repository),
        ("codeartifact:ReadFromRepository", repository),
        ("fsx:DescribeFileSystems", lustre),
        ("elasticfilesystem:DescribeMountTargets", efs),
    ):
        assert allowed(documents["job"], action, resource), action
        assert allowed(documents["job"], action, f"{resource}-2") is None, action
    for action, resource in (
        ("ec2:DescribeRouteTables", "*"),
        ("fsx:DescribeFileSystems", lustre),
        ("elasticfilesystem:DescribeFileSystems", efs),
    ):
        assert allowed(documents["laptop"], action, resource), action
    actions = {
        action for statement in documents["job"]["Statement"] for action in statement["Action"]
    }
    assert "ecr:BatchGetImage" not in actions
    plain = policies(config(), "us-east-1", ECR)
    assert not [sid for sid in plain["job"]["Statement"] if "FileSystems" in sid["Sid"]]
