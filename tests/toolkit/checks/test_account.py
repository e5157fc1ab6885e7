"""Tests of ``check`` against an account: role, quotas, buckets, shards, existing checkpoints."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

import boto3
import pytest
from sm_train.entrypoints.job_interface.checkpoint_layout import FORMAT_VERSION
from sm_train.entrypoints.shards.removal_list import RemovalList
from sm_train.entrypoints.shards.shard_format import Shard
from sm_train.entrypoints.shards.shard_index import IndexWriter, write_index
from sm_train.entrypoints.storage.store import ObjectStore
from sm_train.estimators.config.schema import RunConfig
from sm_train.toolkit.aws.bucket_policy import denies_unencrypted
from sm_train.toolkit.base.errors import ExitCode, UserError
from sm_train.toolkit.checks.account.role import secret_findings
from sm_train.toolkit.checks.finding import Finding
from sm_train.toolkit.checks.preflight import Subject, offline_findings, online_findings
from sm_train.toolkit.checks.storage import listing_findings
from sm_train.toolkit.planning.run_price import estimate_run
from sm_train.toolkit.shards.shard_listing import list_prefix

from tests.conftest import Aws, Cli
from tests.support.fake_services import (
    FakeResponse,
    FakeServer,
    deny_all,
    fake_bucket,
    fake_policy_simulator,
    fake_server,
    fake_service_quotas,
)
from tests.support.moto_server import aws_session
from tests.support.run_documents import config, stage
from tests.support.run_files import write_run
from tests.support.shard_files import expiring_index

TODAY = date(2025, 1, 1)
INSTANCE_TYPE = "ml.p4de.24xlarge"
ACCOUNT = "345678901234"  # moto's
ROLE = f"arn:aws:iam::{ACCOUNT}:role/sm-train"
TRUST = {
    "Version": "2012-10-17",
    "Statement": [
        {
            "Effect": "Allow",
            "Principal": {"Service": "sagemaker.amazonaws.com"},
            "Action": "sts:AssumeRole",
        }
    ],
}
QUOTAS = {
    **{f"ml.m{number}.large for endpoint usage": 2.0 for number in range(250)},
    f"{INSTANCE_TYPE} for training job usage": 4.0,
    f"{INSTANCE_TYPE} for spot training job usage": 0.0,
    f"{INSTANCE_TYPE} for training warm pool usage": 0.0,
    "Longest run time for a training job": 5 * 86400.0,
    "Maximum number of instances per training job": 20.0,
    "Maximum number of instances per spot training job": 20.0,
    "Number of instances across all training jobs": 20.0,
    "Number of instances across all spot training jobs": 20.0,
    **{f"ml.c{number}.large for endpoint usage": 2.0 for number in range(2000)},
}

MANIFEST = json.dumps(
    {"schemaVersion": 2, "mediaType": "application/vnd.docker.distribution.manifest.v2+json"}
)

SESSION = aws_session()
"""Shared by all tests: it caches botocore's service models, not endpoints or credentials."""

Check = Callable[..., dict[str, Finding]]


def index_of(sizes: dict[str, int], folder: Path, samples: int = 200) -> bytes:
    """Return an index of shards with ``samples`` samples each."""
    path = folder / "written-index.parquet"
    keys, offsets = tuple(map(str, range(samples))), tuple(range(samples + 1))
    write_index(path, (Shard(name, size, "00" * 32, keys, offsets) for name, size in sizes.items()))
    return path.read_bytes()


@pytest.fixture
def quotas() -> Iterator[FakeServer]:
    with fake_server(fake_service_quotas(QUOTAS)) as stand_in:
        yield stand_in


@pytest.fixture
def check(aws: Aws, quotas: FakeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Check:
    """Return a function that checks a run in an account without problems."""
    for name, value in aws.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("AWS_ENDPOINT_URL_SERVICE_QUOTAS", quotas.url)
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    iam = aws.client("iam")
    iam.create_role(RoleName="sm-train", AssumeRolePolicyDocument=json.dumps(TRUST))
    everything = {
        "Version": "2012-10-17",
        "Statement": {"Effect": "Allow", "Action": "*", "Resource": "*"},
    }
    iam.put_role_policy(
        RoleName="sm-train", PolicyName="all", PolicyDocument=json.dumps(everything)
    )
    four = {f"{number}.tar": 1 for number in range(4)}
    shards = {f"shards/{name}": b"x" for name in four}
    aws.make_bucket("ai-bucket", **shards, **{"index.parquet": index_of(four, tmp_path)})

    def run(index: Path | None = None, **changes: Any) -> dict[str, Finding]:
        checked: RunConfig = config(**{"role": ROLE, **changes})
        subject = Subject(checked, "us-east-1", estimate_run(checked, "us-east-1"), tmp_path, index)
        findings = online_findings(subject, SESSION, TODAY, lambda count: None)
        return {
            finding.code: finding
            for finding in findings
            if finding.code
            not in (
                "small-shards",
                "shared-shards",
                "smddp-tradeoff",
                "order-depends-on-ranks",
                "permissions-simulated",
            )
        }

    return run


# ------------------------------------------------------------------ role and quotas


def test_account_without_problems_has_no_findings(check: Check) -> None:
    assert check() == {}


def test_unusable_roles_are_reported(check: Check, aws: Aws) -> None:
    other = ROLE.replace(ACCOUNT, "210987654321")
    assert "210987654321" in check(role=other)["role-account"].message
    assert check(role=f"{ROLE}-not")["role-absent"].level == "error"
    other_path = f"arn:aws:iam::{ACCOUNT}:role/a/path/sm-train"
    assert f"a role {ROLE} exists" in check(role=other_path)["role-absent"].message
    policy = json.dumps(TRUST).replace("sagemaker", "lambda")
    aws.client("iam").update_assume_role_policy(RoleName="sm-train", PolicyDocument=policy)
    assert check()["role-trust"].level == "error"
    assert check(role=None)["role-unset"].level == "warning"


def test_instance_quotas_are_checked(check: Check, quotas: FakeServer) -> None:
    found = check(stages=[stage(instances=5), stage("b", instances=2)])["instance-quota"]
    assert found.level == "error"
    assert f"5 instances exceed the account's quota of 4 ({INSTANCE_TYPE}" in found.message
    assert found.fix.endswith("--region us-east-1 --quota-code L-000000FA --desired-value 5")
    # The quotas that are needed are on the third of 23 pages.
    assert len(quotas.requests) == 3
    spot = check(cluster={"instance_type": INSTANCE_TYPE, "capacity": "spot"})["instance-quota"]
    assert "for spot training job usage" in spot.message
    plan = {
        "capacity": "training-plan",
        "training_plan": "arn:aws:sagemaker:us-east-1:210987654321:training-plan/mine",
    }
    assert "instance-quota" not in check(cluster={"instance_type": INSTANCE_TYPE, **plan})


def test_warm_pool_and_runtime_quotas_are_checked(check: Check) -> None:
    warm = {"instance_type": INSTANCE_TYPE, "capacity": "warm-pool", "keep_alive_period": "30m"}
    assert check(cluster=warm)["warm-pool-quota"].level == "warning"
    long = check(cluster={"instance_type": INSTANCE_TYPE, "max_runtime": "10d"})["runtime-quota"]
    assert (long.level, long.where) == ("error", "cluster.max_runtime")
    assert "10 days exceed the account's quota of 5 days" in long.message
    assert "--desired-value 864000" in long.fix


def test_unlisted_quota_is_reported(check: Check) -> None:
    found = check(cluster={"instance_type": "ml.g5.48xlarge"})["quota-unknown"]
    assert "ml.g5.48xlarge for training job usage" in found.message


# ------------------------------------------------------------------ rejected calls


@pytest.mark.parametrize(
    ("status", "reason"),
    [
        (200, "(HTTP 200)"),
        (403, "(HTTP 403)"),
        (502, "AWS responded with 502"),
    ],
)
def test_page_of_a_proxy_costs_only_one_check(
    status: int, reason: str, check: Check, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = b"<!DOCTYPE html>\n<html><head><title>Blocked</title></head></html>"
    answer = FakeResponse(status, page, {"Content-Type": "text/html"})
    with fake_server(lambda request: answer) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL_IAM", proxy.url)
        monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
        found = check()
    assert found["unchecked"].level == "warning"
    assert reason in found["unchecked"].message
    assert ("is no AWS document but a web page" in found["unchecked"].message) == (status < 500)
    assert found["unchecked"].fix == "retry"


def test_rejected_call_costs_only_one_check(
    check: Check, aws: Aws, monkeypatch: pytest.MonkeyPatch
) -> None:
    aws.error_codes["ListServiceQuotas"] = "AccessDeniedException"
    monkeypatch.setenv("AWS_ENDPOINT_URL_SERVICE_QUOTAS", aws.url)
    long = {"instance_type": INSTANCE_TYPE, "max_runtime": "10d"}
    found = check(role=f"{ROLE}-not", cluster=long)
    assert {code: found[code].level for code in found} == {
        "unchecked": "warning",
        "role-absent": "error",
        "runtime-quota": "info",
    }
    assert "the quotas: could not be checked" in found["unchecked"].message
    assert "servicequotas:ListServiceQuotas" in found["unchecked"].fix
    with fake_server(deny_all("AccessDenied")) as iam:
        monkeypatch.setenv("AWS_ENDPOINT_URL_SERVICE_QUOTAS", aws.url)
        monkeypatch.setenv("AWS_ENDPOINT_URL_IAM", iam.url)
        aws.error_codes["ListServiceQuotas"] = "ThrottlingException"
        run = config(role=ROLE)
        subject = Subject(run, "us-east-1", estimate_run(run, "us-east-1"), Path())
        unchecked = [
            finding
            for finding in online_findings(subject, SESSION, TODAY, lambda count: None)
            if finding.code == "unchecked"
        ]
    assert [(finding.where, finding.fix.split(",")[0]) for finding in unchecked] == [
        ("role", "allow iam:GetRole"),
        ("role", "allow iam:SimulatePrincipalPolicy"),
        ("cluster", "retry"),
    ]


@pytest.mark.parametrize("service", ["STS", "IAM"])
def test_expired_credentials_raise_instead_of_a_finding(
    check: Check, monkeypatch: pytest.MonkeyPatch, service: str
) -> None:
    with fake_server(deny_all("ExpiredToken")) as stand_in:
        monkeypatch.setenv(f"AWS_ENDPOINT_URL_{service}", stand_in.url)
        with pytest.raises(UserError, match="ExpiredToken") as failure:
            check()
    assert failure.value.exit_code == ExitCode.PERMISSION


@pytest.mark.integration
def test_secrets_that_the_job_cannot_read_are_reported(
    aws: Aws, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in aws.environment.items():
        monkeypatch.setenv(name, value)
    manager = aws.client("secretsmanager")
    key = manager.create_secret(Name="wandb/key", SecretString="hidden-value")["ARN"]
    manager.create_secret(Name="mlflow/key", SecretString="hidden-value")
    aws.client("ssm").put_parameter(Name="/own/webhook", Value="hidden-value", Type="SecureString")
    parameter = f"arn:aws:ssm:us-east-1:{ACCOUNT}:parameter/own/webhook"
    run = config(
        role=ROLE,
        alerts={"slack_secret": "absent", "webhook_secret": "ssm:/own/webhook"},
        trackers={
            "wandb": {"secret": "wandb/key"},
            "mlflow": {"uri": "https://mlflow.example.com", "secret": "mlflow/key"},
        },
    )
    with fake_server(fake_policy_simulator([key, parameter])) as iam:
        monkeypatch.setenv("AWS_ENDPOINT_URL_IAM", iam.url)
        found = list(secret_findings(run, SESSION, "us-east-1", ACCOUNT))
    assert [(finding.code, finding.where, finding.message) for finding in found] == [
        ("secret-absent", "alerts.slack_secret", "absent does not exist in us-east-1"),
        ("secret-denied", "trackers.mlflow.secret", "sm-train may not read mlflow/key"),
    ]
    assert "secretsmanager:GetSecretValue on arn:aws:secretsmanager:" in found[1].fix
    assert not {"GetSecretValue", "GetParameter"} & {operation for operation, _ in aws.calls}


# ------------------------------------------------------------------ buckets and shards in S3


def test_missing_and_cross_region_buckets_are_errors(check: Check, aws: Aws) -> None:
    assert "nowhere" in check(bucket="nowhere")["bucket-missing"].message
    aws.make_bucket("far", "eu-west-1", **{"shards/0.tar": b"x"})
    far = check(data={"uri": "s3://far/shards/"})
    assert set(far) == {"bucket-region"}
    assert (far["bucket-region"].level, far["bucket-region"].where) == ("error", "data.uri")


def test_empty_prefixes_are_errors(check: Check) -> None:
    data = {"uri": "s3://ai-bucket/shards/", "validation": "s3://ai-bucket/held-out/"}
    assert check(data=data)["prefix-missing"].where == "data.validation"
    model = {"preset": "sd2", "components": "s3://ai-bucket/components/"}
    assert check(model=model)["prefix-missing"].where == "model.components"
    assert check(data={"uri": "s3://ai-bucket/shard/"})["no-shards"].level == "error"


def test_objects_other_than_shards_are_reported(check: Check, aws: Aws) -> None:
    s3 = aws.client("s3")
    s3.put_object(Bucket="ai-bucket", Key="shards/", Body=b"")  # the console's folder object
    assert check() == {}
    s3.put_object(Bucket="ai-bucket", Key="shards-old/0.tar", Body=b"x")
    assert check(data={"uri": "s3://ai-bucket/shards"}) == {}
    s3.put_object(Bucket="ai-bucket", Key="shards/readme.txt", Body=b"x")
    found = check(data={"uri": "s3://ai-bucket/shards"})["not-shards"]
    assert found.level == "warning"
    assert "1 objects under s3://ai-bucket/shards/ are not shards" in found.message
    assert "shards/readme.txt" in found.message
    s3.put_object(Bucket="ai-bucket", Key="one", Body=b"x")
    single = check(data={"uri": "s3://ai-bucket/one"})
    assert single["single-object"].level == "error"


def test_index_in_s3_is_compared_with_the_shards(check: Check, aws: Aws, tmp_path: Path) -> None:
    s3 = aws.client("s3")
    s3.put_object(Bucket="ai-bucket", Key="shards/4.tar", Body=b"x")
    stale = check()["index-stale"]
    assert (stale.level, stale.where) == ("error", "data.index")
    assert "lists 4 shards with 4 bytes" in stale.message
    s3.put_object(Bucket="ai-bucket", Key="index.parquet", Body=b"PAR1 nothing PAR1")
    assert check()["index-unreadable"].level == "error"
    s3.delete_object(Bucket="ai-bucket", Key="index.parquet")
    assert check()["index-missing"].level == "error"
    assert "index-missing" not in check(data={"uri": "s3://ai-bucket/shards/", "index": False})


def test_a_streamed_shard_that_waits_for_the_index_is_no_difference(check: Check, aws: Aws) -> None:
    s3 = aws.client("s3")
    s3.put_object(Bucket="ai-bucket", Key="shards/streamed-000007.tar", Body=b"x")
    assert "index-stale" in check()
    s3.put_object(Bucket="ai-bucket", Key=".streaming/records/000007", Body=b"x")
    assert "index-stale" not in check()


@pytest.mark.slow
def test_shards_of_an_unfinished_removal_are_no_difference(check: Check, aws: Aws) -> None:
    """Old shards that are kept for a live job, and new ones that the index does not list yet."""
    s3 = aws.client("s3")
    for kept, new in (("old.tar", "3.tar"), ("3.tar", "3-r1.tar")):
        removals = RemovalList().with_rewrites({kept: new})
        s3.put_object(Bucket="ai-bucket", Key="index.parquet.removed", Body=removals.encode())
        extra = kept if kept != "3.tar" else new
        s3.put_object(Bucket="ai-bucket", Key=f"shards/{extra}", Body=b"x")
        assert "index-stale" not in check()
        s3.delete_object(Bucket="ai-bucket", Key=f"shards/{extra}")
    s3.put_object(Bucket="ai-bucket", Key="shards/4.tar", Body=b"xx")
    assert "index-stale" in check()
    s3.put_object(Bucket="ai-bucket", Key="index.parquet.removed", Body=b"no list")
    unreadable = check()["index-unreadable"]
    assert "s3://ai-bucket/index.parquet.removed: not a list of removed" in unreadable.message


EXPIRY = [
    ("2020-01-01", "a"),
    ("2025-01-11T01:00:00+09:00", "b"),  # the evening of the 10th in UTC
    ("2199-01-01", "a"),
    ("perpetual", "a"),
    (None, "b"),
]


@pytest.mark.slow
def test_samples_that_expire_before_the_run_ends_are_named(
    check: Check, aws: Aws, tmp_path: Path
) -> None:
    """Moments of several time zones; with data.where the selected ones alone."""
    index = expiring_index(tmp_path, EXPIRY)
    aws.client("s3").put_object(Bucket="ai-bucket", Key="index.parquet", Body=index)

    def found(days: int = 12, **data: Any) -> Finding | None:
        stages = [stage(max_steps=days * 86_400, steps_per_second=1.0)]
        return check(data={"uri": "s3://ai-bucket/shards/", **data}, stages=stages).get(
            "expiring-samples"
        )

    finding = found()
    assert finding is not None
    assert finding.message.startswith("2 of 5 samples expire before the run ends (2025-01-1")
    assert finding.message.endswith(
        "by the column expiry: 000000000 on 2020-01-01, 000000001 on 2025-01-10; 1 values are no "
        "dates"
    )
    # A comparison of these texts would also select others.
    assert "--where" not in finding.fix
    short = found(days=2)
    assert short is not None
    assert short.message.startswith("1 of 5 samples expire")
    selected = found(where="owner = 'a'")
    assert selected is not None
    assert selected.message.startswith("1 of 3 samples expire")
    assert found(where="expiry = '2199-01-01'") is None
    typo = found(expiry="license_end")
    assert typo is not None
    assert typo.message == "the index has no column license_end"
    no_dates = found(expiry="owner")
    assert no_dates is not None
    assert "no value of the column owner is a date" in no_dates.message
    # A stage that mixes sources reads other indexes, or this one with a condition of its own.
    aws.make_bucket("more", **{"set/index.parquet": index, "set/shards/0.tar": b"x"})
    sources = [{"channel": "train", "where": "owner = 'a'"}, {"channel": "more"}]
    mixed = config(
        role=ROLE,
        data={"uri": "s3://ai-bucket/shards/", "sources": sources},
        stages=[stage(max_steps=12 * 86_400, steps_per_second=1.0)],
        channels={"more": {"uri": "s3://more/set/shards/"}},
    )
    subject = Subject(mixed, "us-east-1", estimate_run(mixed, "us-east-1"), tmp_path, None)
    every = online_findings(subject, SESSION, TODAY, lambda count: None)
    messages = [finding.message for finding in every if finding.code == "expiring-samples"]
    assert [message.partition(" expire")[0] for message in messages] == [
        "1 of 3 samples of channel train",
        "2 of 5 samples of channel more",
    ]
    offline = Subject(
        config(data={"uri": "s3://ai-bucket/shards/", "local": "expiring-pack/shards"}),
        "us-east-1",
        estimate_run(config(stages=[stage(steps_per_second=None)]), "us-east-1"),
        tmp_path,
        None,
    )
    by_index = replace(offline, config=config(), index=tmp_path / "expiring-pack/index.parquet")
    for subject in (offline, by_index):
        codes = {finding.code for finding in offline_findings(subject, TODAY)}
        assert "expiring-samples" in codes
    # A condition of the source counts, and an index that no stage reads does not.
    for mixture, expected in ((sources, 1), ([{"channel": "more"}], 0)):
        changed = {"uri": "s3://ai-bucket/shards/", "local": "expiring-pack/shards"}
        mixed = config(
            data=changed | {"sources": mixture}, channels={"more": {"uri": "s3://more/set/shards/"}}
        )
        listed = list(offline_findings(replace(offline, config=mixed), TODAY))
        messages = [finding.message for finding in listed if finding.code == "expiring-samples"]
        assert len(messages) == expected
        assert all("of 3 samples of channel train" in message for message in messages)
    dates = expiring_index(tmp_path / "dates", [("2020-01-01", "a"), ("2199-01-01", "b")])
    aws.client("s3").put_object(Bucket="ai-bucket", Key="index.parquet", Body=dates)
    plain = found()
    assert plain is not None
    assert "--where \"expiry < '2025-01-1" in plain.fix


def test_a_condition_is_checked_against_the_columns_of_the_index(
    check: Check, aws: Aws, tmp_path: Path
) -> None:
    data = {"uri": "s3://ai-bucket/shards/", "where": "license = 'CC0' AND score > 5"}
    found = check(data=data)["condition-invalid"]
    assert (found.level, found.where) == ("error", "data.where")
    assert found.message.startswith("the index has no columns; pack with --index-column")
    path = tmp_path / "with-columns.parquet"
    columns: dict[str, tuple[Any, ...]] = {"license": ("CC0", None), "score": (6.5, 7.0)}
    with (
        path.open("wb") as file,
        IndexWriter(file, columns={"license": "text", "score": "number"}) as writer,
    ):
        for number in range(4):
            shard = Shard(f"{number}.tar", 1, "00" * 32, ("0", "1"), (0, 1, 2), columns=columns)
            writer.add(shard)
    aws.client("s3").put_object(Bucket="ai-bucket", Key="index.parquet", Body=path.read_bytes())
    assert "condition-invalid" not in check(data=data)
    wrong = check(data=data | {"where": "licence = 'CC0'"})["condition-invalid"]
    assert "has no column licence (did you mean license?)" in wrong.message


def test_local_index_names_differing_shards_and_provides_sample_counts(
    check: Check, tmp_path: Path
) -> None:
    path = tmp_path / "given.parquet"
    path.write_bytes(index_of({f"{number}.tar": 1 for number in range(4)}, tmp_path))
    small = [stage(per_device_batch_size=16, gradient_accumulation_steps=2)]
    # The shards match the index, so sample counts are known: 4 × 200 for a step of 1,024.
    assert set(check(path, stages=small)) == {"decoding", "few-samples"}
    path.write_bytes(index_of({"0.tar": 1, "1.tar": 2, "2.tar": 1, "9.tar": 1}, tmp_path))
    found = check(path)
    assert found["index-stale"].message == "9.tar does not exist, but the index lists 1 bytes"


@pytest.mark.slow
def test_thirty_thousand_shards_need_thirty_calls_and_a_few(
    check: Check, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = {f"{number:06d}.tar": 3 * 10**9 for number in range(30_000)}
    contents = {"set/index.parquet": index_of(sizes, tmp_path, samples=5)}
    counts: list[int] = []
    with fake_server(
        fake_bucket({f"set/shards/{name}": size for name, size in sizes.items()}, contents)
    ) as s3:
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", s3.url)
        run = config(role=ROLE, data={"uri": "s3://ai-bucket/set/shards/"})
        subject = Subject(run, "us-east-1", estimate_run(run, "us-east-1"), tmp_path)
        found = online_findings(subject, SESSION, TODAY, counts.append)
    assert {finding.code for finding in found} == {
        "smddp-tradeoff",
        "order-depends-on-ranks",
        "permissions-simulated",
    }
    lists = [request for request in s3.requests if "shards" in request.query.get("prefix", "")]
    assert len(lists) == 30
    assert counts == [1000 * number for number in range(1, 31)]
    # The others: the bucket, the index's size and its last bytes, for its totals and for its
    # columns, and the stage's checkpoints.
    assert len(s3.requests) <= len(lists) + 8
    assert sum(len(request.headers.get("Range", "")) > 0 for request in s3.requests) <= 4


def test_listing_stops_at_its_limit() -> None:
    sizes = {f"set/{number:05d}.tar": 1 for number in range(3500)}
    with fake_server(fake_bucket(sizes, {})) as s3:
        session = boto3.Session("testing", "testing", region_name="us-east-1")
        client = session.client("s3", endpoint_url=s3.url)
        store = ObjectStore(client)
        listing = list_prefix(store, "s3://ai-bucket/set/", limit=2000)
        assert (len(listing.shards), listing.truncated, len(s3.requests)) == (2000, True, 2)
        assert not list_prefix(store, "s3://ai-bucket/set/", limit=3500).truncated
    [found] = listing_findings(config(), listing)
    assert (found.code, found.level) == ("too-many-objects", "warning")


def test_missing_local_shards_are_an_error_only_offline(check: Check, tmp_path: Path) -> None:
    data = {"uri": "s3://ai-bucket/shards/", "local": "missing"}
    assert check(data=data) == {}
    run = config(data=data)
    subject = Subject(run, "us-east-1", estimate_run(run, "us-east-1"), tmp_path)
    assert "no-shards" in {finding.code for finding in offline_findings(subject, TODAY)}


# ------------------------------------------------------------------ another region

WEST = {"fallbacks": [{"region": "us-west-2", "buckets": {"ai-bucket": "west"}}]}


@pytest.mark.slow
def test_fallback_region_needs_a_bucket_with_the_same_shards(
    check: Check, aws: Aws, tmp_path: Path
) -> None:
    plain = {"backend": "nccl", "instance_type": INSTANCE_TYPE}
    missing = check(recovery=WEST, cluster=plain)["bucket-missing"]
    assert (missing.level, missing.where) == ("error", "recovery.fallbacks[0]")
    assert "us-west-2: bucket west does not exist" in missing.message
    aws.make_bucket("west", "us-west-2", **{f"shards/{number}.tar": b"x" for number in range(3)})
    found = check(recovery=WEST, cluster=plain)
    assert {code: finding.level for code, finding in found.items()} == {
        "fallback-data": "error",
        "index-missing": "error",
        "idle-instances": "error",
    }
    assert "such as 3.tar" in found["fallback-data"].message
    s3 = aws.client("s3", "us-west-2")
    for key in ("shards/3.tar", "index.parquet"):
        s3.copy_object(Bucket="west", Key=key, CopySource=f"ai-bucket/{key}")
    assert check(recovery=WEST, cluster=plain) == {}


def test_fallback_bucket_must_be_in_the_fallback_region(check: Check, aws: Aws) -> None:
    aws.make_bucket("east-too")
    recovery = {"fallbacks": [{"region": "us-west-2", "buckets": {"ai-bucket": "east-too"}}]}
    found = check(recovery=recovery, cluster={"backend": "nccl", "instance_type": INSTANCE_TYPE})
    assert found["bucket-region"].where == "recovery.fallbacks[0]"
    assert "is in us-east-1, but the job would run in us-west-2" in found["bucket-region"].message


@pytest.mark.slow
def test_fallback_quotas_are_checked(check: Check, quotas: FakeServer) -> None:
    other_type = {"fallbacks": [{"instance_type": "ml.p4d.24xlarge"}]}
    found = check(recovery=other_type, cluster={"backend": "nccl", "instance_type": INSTANCE_TYPE})
    assert "ml.p4d.24xlarge for training job usage" in found["quota-unknown"].message
    spot = {"fallbacks": [{"capacity": "spot"}]}
    found = check(recovery=spot, cluster={"backend": "nccl", "instance_type": INSTANCE_TYPE})
    assert found["instance-quota"].where == "recovery.fallbacks[0]"


# ------------------------------------------------------------------ the image


@pytest.mark.slow
def test_image_missing_from_the_registry_is_an_error(check: Check, aws: Aws) -> None:
    def with_image(name: str) -> dict[str, Any]:
        address = f"{ACCOUNT}.dkr.ecr.us-east-1.amazonaws.com/{name}"
        return {"cluster": {"instance_type": INSTANCE_TYPE, "image": address}}

    assert check(**with_image("custom:1"))["image-absent"].level == "error"
    ecr = aws.client("ecr")
    ecr.create_repository(repositoryName="custom")
    assert check(**with_image("custom:1"))["image-absent"].where == "cluster.image"
    ecr.put_image(repositoryName="custom", imageManifest=MANIFEST, imageTag="1")
    assert check(**with_image("custom:1")) == {}
    aws.error_codes["DescribeImages"] = "AccessDeniedException"
    assert "ecr:DescribeImages" in check(**with_image("custom:1"))["unchecked"].fix


# ------------------------------------------------------------------ existing checkpoints

SD2_BYTES = 865_910_724 * 16


def put_checkpoint(aws: Aws, step: int, *, size: int = SD2_BYTES, complete: bool = True) -> None:
    """Create a checkpoint folder as a job does, with zeros for tensors."""
    folder = f"demo/checkpoints/256px/step-{step:08d}"
    files = [{"name": "tensors-00000.safetensors", "bytes": size, "blake3": ""}]
    rest = {"step": step, "world_size": 8, "fingerprint": "0", "files": files}
    marker = {"format": FORMAT_VERSION} | rest
    s3 = aws.client("s3")
    s3.put_object(Bucket="ai-bucket", Key=f"{folder}/tensors-00000.safetensors", Body=b"")
    aws.extend("ai-bucket", f"{folder}/tensors-00000.safetensors", size)
    if complete:
        s3.put_object(
            Bucket="ai-bucket", Key=f"{folder}/complete.json", Body=json.dumps(marker).encode()
        )


def create_job(aws: Aws, data: str = "s3://ai-bucket/shards/", run: str = "demo") -> str:
    name = "demo--256px-0001"
    aws.client("sagemaker").create_training_job(
        TrainingJobName=name,
        RoleArn=ROLE,
        AlgorithmSpecification={"TrainingInputMode": "FastFile", "TrainingImage": "x"},
        InputDataConfig=[
            {
                "ChannelName": "train",
                "DataSource": {"S3DataSource": {"S3DataType": "S3Prefix", "S3Uri": data}},
            }
        ],
        OutputDataConfig={"S3OutputPath": "s3://ai-bucket/demo/output"},
        ResourceConfig={"InstanceType": INSTANCE_TYPE, "InstanceCount": 4, "VolumeSizeInGB": 30},
        StoppingCondition={"MaxRuntimeInSeconds": 60},
        Tags=[{"Key": "sm-train:run", "Value": run}],
    )
    return name


@pytest.mark.integration
def test_checkpoint_of_the_same_run_is_resumed(check: Check, aws: Aws) -> None:
    put_checkpoint(aws, 500)
    put_checkpoint(aws, 600, complete=False)
    create_job(aws)
    found = check()
    assert set(found) == {"checkpoints-resumed"}
    assert "step 500 of 1,000" in found["checkpoints-resumed"].message


def test_checkpoint_that_lost_a_file_is_not_the_one_that_is_resumed(check: Check, aws: Aws) -> None:
    put_checkpoint(aws, 500)
    put_checkpoint(aws, 600)
    lost = "demo/checkpoints/256px/step-00000600/tensors-00000.safetensors"
    aws.client("s3").delete_object(Bucket="ai-bucket", Key=lost)
    create_job(aws)
    assert "step 500 of 1,000" in check()["checkpoints-resumed"].message


def test_checkpoints_without_a_job_of_the_run_are_reported(check: Check, aws: Aws) -> None:
    put_checkpoint(aws, 500)
    found = check()
    assert set(found) == {"checkpoints-other-run"}
    assert "no job in this region is tagged with run demo" in found["checkpoints-other-run"].message
    create_job(aws, run="somebody-elses")
    assert set(check()) == {"checkpoints-other-run"}


def test_checkpoints_of_a_run_on_other_data_are_reported(check: Check, aws: Aws) -> None:
    put_checkpoint(aws, 500)
    name = create_job(aws, data="s3://ai-bucket/cats/")
    message = check()["checkpoints-other-run"].message
    assert f"its job {name} read s3://ai-bucket/cats/" in message


def test_checkpoints_of_another_model_are_detected_by_size(check: Check, aws: Aws) -> None:
    put_checkpoint(aws, 500)
    create_job(aws)
    found = check(model={"preset": "sdxl"})["checkpoints-other-model"]
    assert found.level == "error"
    assert "13.9 GB, but sdxl checkpoints have 41.1 GB" in found.message
    # Checkpoints without EMA weights are smaller, but belong to the same model.
    assert set(check(training={"ema_decay": 0, "compile": False})) == {"checkpoints-resumed"}


def test_checkpoint_at_the_end_of_the_stage_is_a_warning(check: Check, aws: Aws) -> None:
    put_checkpoint(aws, 1000)
    create_job(aws)
    assert check()["checkpoints-beyond"].level == "warning"


# ------------------------------------------------------------------ the command


def findings_of(result: Any) -> list[dict[str, str]]:
    document = json.loads(result.stdout)
    assert set(document) == {"ok", "findings"}
    assert document["ok"] == (result.returncode == 0)
    found: list[dict[str, str]] = document["findings"]
    assert all(set(finding) == {"level", "code", "where", "message", "fix"} for finding in found)
    return found


def severities(found: Sequence[dict[str, str]]) -> list[int]:
    return [("error", "warning", "info").index(finding["level"]) for finding in found]


def test_command_queries_aws_and_sorts_by_severity(
    cli: Cli, check: Check, aws: Aws, quotas: FakeServer, tmp_path: Path
) -> None:
    stages = [stage(instances=8, steps_per_second=None)]
    run = write_run(tmp_path, role=f"{ROLE}-not", stages=stages)
    env = aws.environment | {"AWS_ENDPOINT_URL_SERVICE_QUOTAS": quotas.url}
    result = cli("check", run, "--json", network="loopback", env=env)
    assert result.returncode == 3, result.stderr
    found = findings_of(result)
    codes = {finding["code"] for finding in found}
    assert codes >= {"role-absent", "instance-quota", "idle-instances", "throughput-unmeasured"}
    assert severities(found) == sorted(severities(found))
    assert result.stderr == ""


def encrypt(aws: Aws, key: str, *statements: dict[str, Any]) -> None:
    """Set the default encryption of the run's bucket, and its policy."""
    s3 = aws.client("s3")
    default = {"SSEAlgorithm": "aws:kms", "KMSMasterKeyID": key}
    rules = {"Rules": [{"ApplyServerSideEncryptionByDefault": default}]}
    s3.put_bucket_encryption(Bucket="ai-bucket", ServerSideEncryptionConfiguration=rules)
    policy = {"Version": "2012-10-17", "Statement": list(statements)}
    s3.put_bucket_policy(Bucket="ai-bucket", Policy=json.dumps(policy))


DENY = {
    "Effect": "Deny",
    "Principal": "*",
    "Action": "s3:PutObject",
    "Resource": "arn:aws:s3:::ai-bucket/*",
    "Condition": {"StringNotEquals": {"s3:x-amz-server-side-encryption": "aws:kms"}},
}
"""As in the S3 user guide, Requiring SSE-KMS (read 2026-11)."""


@pytest.mark.slow
def test_policy_that_denies_sagemakers_checkpoints_is_an_error(check: Check, aws: Aws) -> None:
    encrypt(aws, "1234", DENY)
    found = check(output_kms_key="1234")["upload-encryption"]
    assert found.level == "error"
    assert "denies the checkpoints that SageMaker uploads" in found.message
    tolerant = {"Null": {"s3:x-amz-server-side-encryption": "false"}}
    encrypt(aws, "1234", DENY | {"Condition": {**DENY["Condition"], **tolerant}})  # type: ignore[dict-item]
    assert "upload-encryption" not in check(output_kms_key="1234")


def test_policy_of_another_partition_names_its_own_resources(check: Check, aws: Aws) -> None:
    encrypt(aws, "1234", DENY | {"Resource": "arn:aws-us-gov:s3:::ai-bucket/*"})
    role = ROLE.replace("arn:aws:", "arn:aws-us-gov:")
    assert check(output_kms_key="1234", role=role)["upload-encryption"].level == "error"


def test_checkpoints_that_the_bucket_encrypts_with_another_key_are_reported(
    check: Check, aws: Aws
) -> None:
    assert "upload-encryption" not in check(), "no key is named, so none is expected"
    encrypt(aws, "arn:aws:kms:us-east-1:345678901234:key/1234", DENY | {"Effect": "Allow"})
    assert "upload-encryption" not in check(output_kms_key="1234")
    found = check(output_kms_key="5678")["upload-encryption"]
    assert found.level == "warning"
    assert "not with 5678" in found.message


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, "yes"),
        ({"Action": ["s3:Get*", "s3:Put*"]}, "yes"),
        ({"Action": "s3:GetObject"}, "no"),
        ({"Effect": "Allow"}, "no"),
        ({"Resource": "arn:aws:s3:::ai-bucket/other/*"}, "no"),
        ({"Principal": {"AWS": "*"}}, "yes"),
        ({"Principal": {"AWS": "arn:aws:iam::345678901234:role/other"}}, "perhaps"),
        ({"Condition": {}}, "no"),
        ({"Condition": {"Null": {"s3:X-Amz-Server-Side-Encryption": True}}}, "yes"),
        ({"Condition": {"Null": {"s3:x-amz-server-side-encryption": "false"}}}, "no"),
        (
            {
                "Condition": {
                    "StringNotLikeIfExists": {
                        "s3:x-amz-server-side-encryption-aws-kms-key-id": "arn:aws:kms:*"
                    }
                }
            },
            "yes",
        ),
        ({"Condition": {"StringEquals": {"s3:x-amz-server-side-encryption": "AES256"}}}, "no"),
        (
            {
                "Condition": {
                    **DENY["Condition"],  # type: ignore[dict-item]
                    "ArnNotLike": {"aws:PrincipalArn": "arn:aws:iam::*:role/sm-train"},
                }
            },
            "perhaps",
        ),
    ],
)
def test_denial_of_uploads_that_name_no_encryption(changes: dict[str, Any], expected: str) -> None:
    policy = {"Statement": DENY | changes}
    assert denies_unencrypted(policy, "arn:aws:s3:::ai-bucket/demo/x") == expected
    assert denies_unencrypted(None, "arn:aws:s3:::ai-bucket/demo/x") == "no"


def test_images_that_are_in_no_shard_yet_are_reported(check: Check, aws: Aws) -> None:
    assert "staged-images" not in check()
    for name in ("a", "b"):
        key = f".streaming/staged/{name}"
        aws.client("s3").put_object(Bucket="ai-bucket", Key=key, Body=b"x")
    found = check()["staged-images"]
    assert found.level == "warning"
    assert found.message.endswith("in no shard: 2")


def test_index_in_s3_says_how_much_data_a_run_trains_on(
    cli: Cli, check: Check, aws: Aws, quotas: FakeServer, tmp_path: Path
) -> None:
    """The index of 95 samples counts, whatever the run file states."""
    index = index_of({"0.tar": 1}, tmp_path, samples=95)
    aws.client("s3").put_object(Bucket="ai-bucket", Key="index.parquet", Body=index)
    data = {"uri": "s3://ai-bucket/shards/", "samples": 10**9}
    run = write_run(tmp_path, data=data, stages=[stage(max_steps=550_000)], role=ROLE)
    env = aws.environment | {"AWS_ENDPOINT_URL_SERVICE_QUOTAS": quotas.url}
    checked = cli("check", run, "--json", network="loopback", env=env)
    assert checked.returncode == 3, checked.stderr
    [found] = [finding for finding in findings_of(checked) if finding["code"] == "epochs"]
    assert found["level"] == "error"
    assert "281,600,000 images, and the shards hold 95: 2,964,211 epochs" in found["message"]
    planned = cli("submit", run, "--dry-run", network="loopback", env=env)
    text = " ".join(planned.stdout.split())
    assert "samples 95; epochs: 2,964,211 of 256px" in text
    assert "2,964,211 epochs" in text.partition("Warning")[2]


def test_offline_accepts_an_index_instead_of_shards(cli: Cli, tmp_path: Path) -> None:
    index = tmp_path / "given.parquet"
    index.write_bytes(index_of({f"{number}.tar": 3 * 10**9 for number in range(3)}, tmp_path))
    result = cli("check", write_run(tmp_path), "--offline", "--index", index)
    assert result.returncode == 3
    assert "idle-instances" in result.stderr
    assert "epochs" in result.stderr  # 512,000 images, and 600 samples in the index
    assert result.stdout == ""
    index.write_bytes(b"not an index")
    broken = cli("check", write_run(tmp_path), "--offline", "--index", index)
    assert broken.returncode == 2
    assert broken.stderr.startswith("sm-train: --index: ")


def test_invalid_run_file_is_reported_as_findings(cli: Cli, tmp_path: Path) -> None:
    run = write_run(tmp_path, stages=[stage(effective_batch_size=2048)], nonsense=1)
    result = cli("check", run, "--json")
    assert result.returncode == 2
    found = {finding["where"]: finding for finding in findings_of(result)}
    assert found["stages[0].effective_batch_size"]["code"] == "batch-arithmetic"
    assert found["stages[0].effective_batch_size"]["fix"] == "write gradient_accumulation_steps: 8"
    assert found["nonsense"]["code"] == "run-file"
    assert "does not multiply out" in result.stderr
    missing = cli("check", tmp_path / "nowhere.yaml", "--json")
    assert [finding["code"] for finding in findings_of(missing)] == ["run-file"]
