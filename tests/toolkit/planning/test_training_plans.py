"""Training plans as SageMaker describes them: their price, their limits, and those for sale."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from sm_train.cost.prices import TRAINING_PLAN
from sm_train.estimators.config.load import load_run
from sm_train.toolkit.aws.session import open_session
from sm_train.toolkit.base.errors import UserError
from sm_train.toolkit.planning.price_table import price_table
from sm_train.toolkit.planning.training_plans import TrainingPlan, plan_of, plan_problems

from tests.conftest import Aws, Cli
from tests.support.aws.described_jobs import described
from tests.support.run_documents import config, stage
from tests.support.run_files import write_run

ARN = "arn:aws:sagemaker:us-east-1:345678901234:training-plan/autumn"
TYPE = "ml.p5.48xlarge"
BEGIN = datetime(2026, 12, 1, 12, tzinfo=UTC)
CLUSTER = {"instance_type": TYPE, "capacity": "training-plan", "training_plan": ARN}


def described_plan(body: Mapping[str, Any], **changes: Any) -> tuple[int, dict[str, Any]]:
    """A plan of the documented shape: 4 instances for 10 days cost $96,000, $100 an hour."""
    assert body["TrainingPlanName"] == "autumn"
    times = {
        "StartTime": BEGIN.timestamp(),
        "EndTime": (BEGIN + timedelta(days=10)).timestamp(),
        "DurationHours": 240,
    }
    capacity = {
        "ReservedCapacityArn": f"{ARN}/capacity",
        "InstanceType": TYPE,
        "TotalInstanceCount": 4,
        "Status": "Active",
    }
    plan = {
        "TrainingPlanArn": ARN,
        "TrainingPlanName": "autumn",
        "Status": "Active",
        "UpfrontFee": "96000.00",
        "CurrencyCode": "USD",
        "TotalInstanceCount": 4,
        "InUseInstanceCount": 1,
        "ReservedCapacitySummaries": [capacity | times],
    }
    return 200, plan | times | changes


@pytest.fixture
def server(aws: Aws, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Aws:
    for name, value in aws.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    aws.responses["DescribeTrainingPlan"] = described_plan
    return aws


def plan(**changes: Any) -> TrainingPlan:
    made = TrainingPlan(
        ARN,
        "Active",
        TYPE,
        4,
        0,
        BEGIN,
        BEGIN + timedelta(days=10),
        240 * 3600.0,
        Decimal(96_000),
    )
    return replace(made, **changes)


def problems(plan: TrainingPlan, *, hours: float = 100, region: str = "us-east-1") -> str:
    made = config(cluster=CLUSTER, stages=[stage(instances=4)])
    found = plan_problems(plan, made, region, 3600 * hours, BEGIN)
    return "; ".join(f"{level}: {message}" for level, message, _ in found)


def test_the_fee_is_the_price_of_its_hours(server: Aws) -> None:
    session = open_session(None, "us-east-1")
    found = plan_of(session, config(cluster=CLUSTER, stages=[stage()]))
    assert found is not None
    assert found.usd_per_instance_hour == Decimal(100)
    assert found.seconds_left(BEGIN + timedelta(days=9)) == 86_400
    price = price_table().price(TYPE, "us-east-1", TRAINING_PLAN)
    assert (price.usd_per_instance_hour, price.source) == (
        Decimal(100),
        "the fee of plan autumn ÷ its hours",
    )
    assert plan_of(session, config()) is None


def test_spent_is_the_share_of_the_fee_also_after_the_end() -> None:
    """By the tag with which the job was submitted, whatever this machine's prices are."""
    tag = {"sm-train:price": f"us-east-1/{TYPE}/training-plan=100"}
    description = {
        "ResourceConfig": {"InstanceType": TYPE, "InstanceCount": 4, "TrainingPlanArn": ARN},
        "TrainingStartTime": BEGIN,
        "TrainingEndTime": BEGIN + timedelta(hours=5),
        "BillableTimeInSeconds": 5 * 3600,
    }
    job = described("demo--256px-0001", "Completed", description, tag)
    assert job.price(price_table()).usd_per_instance_hour == 100
    assert job.billable_seconds(BEGIN) == 5 * 3600


@pytest.mark.parametrize(
    ("changes", "run", "expected"),
    [
        ({}, {}, ""),
        ({"status": "Scheduled"}, {}, ""),
        ({"status": "Expired"}, {}, "error: autumn is Expired, and accepts no jobs"),
        (
            {},
            {"region": "us-west-2"},
            "error: autumn is in us-east-1, the run in us-west-2",
        ),
        ({"instance_type": "ml.p5e.48xlarge"}, {}, "error: autumn reserves ml.p5e.48xlarge"),
        (
            {"instances": 2},
            {},
            "error: autumn reserves 2 instances, a stage needs 4",
        ),
        (
            {},
            {"hours": 300},
            "warning: autumn has 10 days left, the run takes 12.5 days: then it stops",
        ),
    ],
)
def test_a_plan_that_does_not_fit_the_run(
    changes: dict[str, Any], run: dict[str, Any], expected: str
) -> None:
    assert problems(plan(**changes), **run) == expected


def test_a_plan_without_a_fee_in_dollars_has_no_price(server: Aws) -> None:
    """Also after another plan of the type had one."""
    session, run = open_session(None, "us-east-1"), config(cluster=CLUSTER, stages=[stage()])
    plan_of(session, run)
    server.responses["DescribeTrainingPlan"] = lambda body: described_plan(body, CurrencyCode="EUR")
    plan_of(session, run)
    price = price_table().price(TYPE, "us-east-1", TRAINING_PLAN)
    assert price.usd_per_instance_hour is None
    elsewhere = price_table().price(TYPE, "us-west-2", TRAINING_PLAN)
    assert elsewhere.usd_per_instance_hour is None


def test_two_periods_count_without_the_time_between() -> None:
    day = timedelta(days=1)
    two = plan(periods=((BEGIN, BEGIN + day), (BEGIN + 5 * day, BEGIN + 6 * day)))
    assert two.seconds_left(BEGIN) == 2 * 86_400
    assert two.seconds_left(BEGIN + day / 2) == 1.5 * 86_400


def test_a_plan_that_cannot_be_described_is_one_line(server: Aws) -> None:
    server.error_codes["DescribeTrainingPlan"] = "AccessDeniedException"
    with pytest.raises(UserError, match="DescribeTrainingPlan"):
        plan_of(open_session(None, "us-east-1"), config(cluster=CLUSTER, stages=[stage()]))


def test_submit_shows_it_and_tags_the_job_with_its_price(
    server: Aws, cli: Cli, tmp_path: Path
) -> None:
    server.make_bucket("ai-bucket", **{"shards/0.tar": b"x", "index.parquet": b"x"})
    path = write_run(tmp_path, cluster=CLUSTER | {"backend": "nccl"})
    assert load_run(path).cluster.training_plan == ARN
    environment = server.environment | {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    shown = cli("submit", path, "--dry-run", "--json", network="loopback", env=environment)
    assert shown.returncode == 0, shown.stderr
    document = json.loads(shown.stdout)
    assert document["training_plan"]["fee_usd"] == 96_000
    tags = {tag["Key"]: tag["Value"] for tag in document["requests"][0]["Tags"]}
    assert tags["sm-train:price"] == f"us-east-1/{TYPE}/training-plan=100"
    text = cli("submit", path, "--dry-run", network="loopback", env=environment).stdout
    assert "autumn: 4 × ml.p5.48xlarge (1 in use), Active" in " ".join(text.split())


def offerings(body: Mapping[str, Any]) -> tuple[int, dict[str, Any]]:
    """Two offerings, the dearer one first."""
    assert (body["InstanceCount"], body["DurationHours"]) == (4, 72)
    assert body["TargetResources"] == ["training-job"]
    found = []
    for number, fee in enumerate(("31000.50", "28800")):
        times = {
            "StartTime": BEGIN.timestamp(),
            "EndTime": (BEGIN + timedelta(days=3)).timestamp(),
            "DurationHours": 72,
        }
        capacity = {"InstanceType": TYPE, "InstanceCount": 4} | times
        found.append(
            {
                "TrainingPlanOfferingId": f"tpo-{number}",
                "TargetResources": ["training-job"],
                "DurationHours": 72,
                "UpfrontFee": fee,
                "CurrencyCode": "USD",
                "ReservedCapacityOfferings": [capacity],
            }
        )
    return 200, {"TrainingPlanOfferings": found}


def test_plans_prints_what_is_for_sale_and_buys_nothing(
    server: Aws, cli: Cli, tmp_path: Path
) -> None:
    server.responses["SearchTrainingPlanOfferings"] = offerings
    path = write_run(
        tmp_path, cluster={"instance_type": TYPE, "backend": "nccl"}, stages=[stage(instances=3)]
    )
    arguments = ("plans", path, "--days", "3", "--after", "2026-12-01")
    listed = cli(*arguments, "--json", network="loopback", env=server.environment)
    assert listed.returncode == 0, listed.stderr
    first, second = json.loads(listed.stdout)["offerings"]
    assert (first["id"], first["fee_usd"], first["usd_per_instance_hour"]) == ("tpo-1", 28_800, 100)
    assert second["fee_usd"] == 31_000.5
    text = cli(*arguments, network="loopback", env=server.environment).stdout
    assert "aws sagemaker create-training-plan --region us-east-1" in text
    assert "--training-plan-offering-id tpo-1" in text
    assert not server.bodies("CreateTrainingPlan")
    server.responses["SearchTrainingPlanOfferings"] = lambda body: (
        200,
        {"TrainingPlanOfferings": []},
    )
    none = cli(*arguments, network="loopback", env=server.environment)
    assert "No offering" in none.stdout
