"""``check`` simulates what role and user may do; ``iam --missing`` writes what they lack."""

from __future__ import annotations

import json
from copy import deepcopy
from pathlib import Path
from typing import Any

import boto3
import pytest
from sm_train.entrypoints.storage.aws_session import prepare_session
from sm_train.estimators.config.schema import RunConfig
from sm_train.estimators.request.iam import policies
from sm_train.estimators.request.images import image_uri
from sm_train.toolkit.checks.account.simulated_permissions import permission_findings

from tests.conftest import Aws, Cli
from tests.support.run_documents import config
from tests.support.run_files import write_run

ACCOUNT = "345678901234"  # moto's
ROLE = f"arn:aws:iam::{ACCOUNT}:role/sm-train"
TOPIC = f"arn:aws:sns:us-east-1:{ACCOUNT}:own"
TRUST = json.dumps({"Version": "2012-10-17", "Statement": []})
CHANGES: dict[str, Any] = {"role": ROLE, "alerts": {"sns_topic": TOPIC}}
SIMULATED = "permissions-simulated"


class Identities:
    """A role for jobs and a user in moto, with policies as their administrator wrote them."""

    def __init__(self, aws: Aws, monkeypatch: pytest.MonkeyPatch) -> None:
        self.iam = aws.client("iam")
        self.iam.create_role(RoleName="sm-train", AssumeRolePolicyDocument=TRUST)
        self.iam.create_user(UserName="imaging")
        key = self.iam.create_access_key(UserName="imaging")["AccessKey"]
        self.environment = {
            "AWS_ENDPOINT_URL": aws.url,
            "AWS_ACCESS_KEY_ID": key["AccessKeyId"],
            "AWS_SECRET_ACCESS_KEY": key["SecretAccessKey"],
        }
        for name, value in self.environment.items():
            monkeypatch.setenv(name, value)

    def allow(self, job: Any, laptop: Any) -> None:
        self.iam.put_role_policy(
            RoleName="sm-train", PolicyName="job", PolicyDocument=json.dumps(job)
        )
        self.iam.put_user_policy(
            UserName="imaging", PolicyName="laptop", PolicyDocument=json.dumps(laptop)
        )


@pytest.fixture
def identities(aws: Aws, monkeypatch: pytest.MonkeyPatch) -> Identities:
    return Identities(aws, monkeypatch)


def documents(run: RunConfig) -> dict[str, Any]:
    return deepcopy(dict(policies(run, "us-east-1", image_uri(run, "us-east-1"))))


def without(document: dict[str, Any], *sids: str) -> dict[str, Any]:
    kept = [statement for statement in document["Statement"] if statement["Sid"] not in sids]
    assert len(kept) == len(document["Statement"]) - len(sids)
    return document | {"Statement": kept}


def found(run: RunConfig) -> list[tuple[str, str, str, str]]:
    session = boto3.Session(region_name="us-east-1")
    prepare_session(session)
    findings = permission_findings(run, session, "us-east-1")
    return [(item.level, item.code, item.where, item.message) for item in findings]


def denied(run: RunConfig) -> list[tuple[str, str, str, str]]:
    return [item for item in found(run) if item[1] != SIMULATED]


def test_policies_of_iam_leave_nothing_denied(identities: Identities) -> None:
    run = config(**CHANGES)
    identities.allow(documents(run)["job"], documents(run)["laptop"])
    [(level, code, _, message)] = found(run)
    assert (level, code) == ("info", SIMULATED)
    assert "actions of sm-train and" in message
    for unseen in ("key policies", "bucket policies", "service control policies"):
        assert unseen in message


@pytest.mark.slow
@pytest.mark.parametrize("identity", ["job", "laptop"])
def test_each_missing_statement_is_named(identities: Identities, identity: str) -> None:
    run = config(**CHANGES)
    whole = documents(run)
    for statement in whole[identity]["Statement"]:
        changed = whole | {identity: without(whole[identity], statement["Sid"])}
        identities.allow(changed["job"], changed["laptop"])
        problems = denied(run)
        messages = " ".join(message for *_, message in problems)
        where = "role" if identity == "job" else "--profile"
        assert {item[2] for item in problems} == {where}, statement
        assert [action for action in statement["Action"] if action not in messages] == []


def test_resources_are_exactly_those_of_the_run(identities: Identities) -> None:
    """A policy for another run does not count."""
    run, other = config(**CHANGES), config(**CHANGES, name="other")
    identities.allow(documents(other)["job"], documents(run)["laptop"])
    text = " ".join(message for *_, message in denied(run))
    logs = f"arn:aws:logs:us-east-1:{ACCOUNT}:log-group:/aws/sagemaker/TrainingJobs"
    for resource in (
        "arn:aws:s3:::ai-bucket/demo/checkpoints/256px/step-",
        f"{logs}:log-stream:demo--256px-0001/algo-1-1",
    ):
        assert resource in text
    assert "ecr:BatchGetImage" not in text


def test_denials_of_resources_with_policies_of_their_own_are_warnings(
    identities: Identities,
) -> None:
    run = config(**CHANGES)
    whole = documents(run)
    identities.allow(without(whole["job"], "Write", "WriteLogs"), whole["laptop"])
    levels = {message.split(" on ")[0]: level for level, _, _, message in denied(run)}
    write = "sm-train may not do s3:AbortMultipartUpload, s3:DeleteObject, s3:PutObject"
    # The bucket's policy may allow it; nothing else allows logs.
    assert levels == {write: "warning", "sm-train may not do logs:PutLogEvents": "error"}
    deny = {"Sid": "No", "Effect": "Deny", "Action": "s3:Put*", "Resource": "*"}
    job = whole["job"] | {"Statement": [*whole["job"]["Statement"], deny]}
    identities.allow(job, whole["laptop"])
    [(level, _, _, message)] = denied(run)
    assert level == "error"
    assert message.endswith("a policy denies it")


def test_conditions_that_a_simulation_cannot_know_are_named(identities: Identities) -> None:
    run = config(**CHANGES)
    conditional = documents(run)["job"]
    for statement in conditional["Statement"]:
        if statement["Sid"] == "Write":
            statement["Condition"] = {"StringEquals": {"aws:SourceVpce": "vpce-1"}}
    identities.allow(conditional, documents(run)["laptop"])
    [(level, code, _, message)] = denied(run)
    assert (level, code) == ("warning", "permission-conditional")
    assert message.endswith("under conditions on aws:SourceVpce only")


def test_key_with_an_alias_is_simulated_as_the_key_itself(identities: Identities, aws: Aws) -> None:
    kms = aws.client("kms")
    key = kms.create_key()["KeyMetadata"]["Arn"]
    kms.create_alias(AliasName="alias/own", TargetKeyId=key)
    run = config(**CHANGES, output_kms_key="alias/own")
    whole = documents(run)
    identities.allow(without(whole["job"], "UseKeysWithAlias"), whole["laptop"])
    [(_, _, _, message)] = denied(run)
    actions = "kms:CreateGrant, kms:Decrypt, kms:GenerateDataKey"
    assert message.startswith(f"sm-train may not do {actions} on {key}: ")


def test_credentials_of_no_user_are_not_simulated(
    identities: Identities, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = config(**CHANGES)
    identities.allow(documents(run)["job"], documents(run)["laptop"])
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "testing")
    [(_, code, _, message)] = found(run)
    assert code == SIMULATED
    assert "your own credentials are of no user or role of IAM" in message


def test_iam_writes_what_is_missing(cli: Cli, identities: Identities, tmp_path: Path) -> None:
    whole = documents(config(**CHANGES))
    path = write_run(tmp_path, **CHANGES)
    identities.allow(without(whole["job"], "WriteLogs"), without(whole["laptop"], "PassRole"))

    def missing(*arguments: str) -> Any:
        command = ["iam", path, "--missing", "--json", *arguments]
        ran = cli(*command, network="loopback", env=identities.environment)
        assert ran.returncode == 0, ran.stderr
        return json.loads(ran.stdout)

    printed = missing()
    for name, sid in (("job", "WriteLogs"), ("laptop", "PassRole")):
        [statement] = printed[name]["Statement"]
        [expected] = [item for item in whole[name]["Statement"] if item["Sid"] == sid]
        assert (statement["Sid"], statement["Action"]) == (sid, expected["Action"])
    assert missing("--only", "job")["Statement"][0]["Sid"] == "WriteLogs"
    command = ["iam", path, "--missing", "--only", "trust"]
    refused = cli(*command, network="loopback", env=identities.environment)
    assert refused.returncode == 2
    assert "--only: trust is not simulated with --missing" in refused.stderr
