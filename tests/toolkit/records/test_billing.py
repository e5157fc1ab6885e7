"""What a job has cost while SageMaker has not reported it, from the phases that it does report."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sm_train.cost.prices import ON_DEMAND, SPOT, Price, PriceTable, shipped_prices
from sm_train.toolkit.planning.spent import counted_usd, spent_at_most_usd, spent_usd
from sm_train.toolkit.records.training_job import PRICE_TAG, TrainingJob, price_tag

NAME, REGION = "ml.p4de.24xlarge", "us-east-1"
CREATED = datetime(2026, 11, 20, tzinfo=UTC)
NO_PRICES = PriceTable.of([])

WITH_INSTANCES = ("Downloading", "Training", "Uploading", "Stopping", "A phase of the future")
WAITING = ("Starting", "Pending", "Interrupted", "Restarting")

phases = st.lists(
    st.tuples(st.sampled_from(WITH_INSTANCES + WAITING), st.integers(0, 200_000)), max_size=12
)


def job(
    lived: list[tuple[str, int]], *, is_spot: bool = False, **fields: Any
) -> tuple[TrainingJob, datetime]:
    """Return a live job of four instances that lived through these phases, and the time now."""
    moment = CREATED + timedelta(minutes=5)
    description: dict[str, Any] = {
        "TrainingJobArn": f"arn:aws:sagemaker:{REGION}:345678901234:training-job/demo",
        "CreationTime": CREATED,
        "TrainingStartTime": moment,
        "ResourceConfig": {"InstanceType": NAME, "InstanceCount": 4},
        "EnableManagedSpotTraining": is_spot,
        "SecondaryStatusTransitions": [{"Status": "Starting", "StartTime": CREATED}],
    }
    for status, seconds in [("Downloading", 0), *lived]:
        description["SecondaryStatusTransitions"].append({"Status": status, "StartTime": moment})
        moment += timedelta(seconds=seconds)
    tags = fields.pop("tags", {})
    return TrainingJob.of(
        "demo--256px-0001", "demo", "256px", "InProgress", tags, description | fields
    ), moment


@given(phases)
def test_only_phases_with_instances_are_billed(lived: list[tuple[str, int]]) -> None:
    found, now = job(lived)
    expected = sum(seconds for status, seconds in lived if status in WITH_INSTANCES)
    assert found.billable_seconds(now) == pytest.approx(expected)


@given(phases, st.booleans())
def test_hours_of_a_live_job_cost_what_its_plan_said_wherever_it_is_watched(
    lived: list[tuple[str, int]], is_spot: bool
) -> None:
    """A run that keeps to a plan within the budget is not over it: both count one price."""
    kind = SPOT if is_spot else ON_DEMAND
    price = shipped_prices().price(NAME, REGION)
    planned = Price(NAME, REGION, price.usd_per_instance_hour, "verified", "", None)
    value = price_tag(planned, kind)
    assert value is not None
    found, now = job(lived, is_spot=is_spot, tags={PRICE_TAG: value})
    hours = sum(seconds for status, seconds in lived if status in WITH_INSTANCES) / 3600
    expected = hours * 4 * float(price.usd_per_instance_hour or 0)
    for table in (NO_PRICES, shipped_prices()):
        assert spent_usd([found], table, now) == pytest.approx(expected)
        assert spent_at_most_usd([found], table, now) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("value", "is_spot"),
    [
        ("us-east-1/ml.p4de.24xlarge/spot=9.47", False),
        ("us-west-2/ml.p4de.24xlarge/spot=9.47", True),
        ("us-east-1/ml.p5.48xlarge/spot=9.47", True),
        ("us-east-1/ml.p4de.24xlarge/spot=free", True),
        ("us-east-1/ml.p4de.24xlarge/spot=-1", True),
        ("", True),
    ],
)
def test_price_of_other_instances_or_no_price_is_not_that_of_the_plan(
    value: str, is_spot: bool
) -> None:
    found, now = job([("Training", 3600)], is_spot=is_spot, tags={PRICE_TAG: value})
    on_demand = 4 * 31.5641075
    assert spent_usd([found], shipped_prices(), now) == (None if is_spot else on_demand)
    assert spent_at_most_usd([found], shipped_prices(), now) == pytest.approx(on_demand)
    assert spent_at_most_usd([found], NO_PRICES, now) is None


def test_reported_seconds_of_a_spot_job_cost_the_on_demand_price() -> None:
    """Its saving is in the seconds: 1 − BillableTimeInSeconds ÷ TrainingTimeInSeconds."""
    tags = {PRICE_TAG: f"{REGION}/{NAME}/spot=9.47"}
    found, now = job([("Training", 7200)], is_spot=True, BillableTimeInSeconds=2160, tags=tags)
    assert spent_usd([found], shipped_prices(), now) == pytest.approx(0.6 * 4 * 31.5641075)


def test_job_without_a_price_takes_nothing_from_what_counts_against_the_budget() -> None:
    bounded, now = job([("Training", 3600)], is_spot=True)
    resources = {"InstanceType": "ml.p5e.48xlarge", "InstanceCount": 1}
    unknown, _ = job([("Training", 3600)], ResourceConfig=resources)
    prices = shipped_prices()
    assert spent_at_most_usd([bounded, unknown], prices, now) is None
    assert counted_usd([bounded, unknown], prices, now) == counted_usd([bounded], prices, now) > 0
