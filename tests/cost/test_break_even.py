"""Units and units of time behind the lines that compare ways to buy instances."""

from __future__ import annotations

from decimal import Decimal

import pytest
from sm_train.cost.assumptions import Assumptions
from sm_train.cost.network import estimated_units
from sm_train.cost.prices import SAVINGS_PLANS, PriceRow, PriceTable
from sm_train.cost.purchasing import break_even
from sm_train.cost.scaling import scale_one

from tests.cost.break_even_support import NAME, STAGE

ALONE = Assumptions(
    start_up_seconds=0, failures_per_gpu_hour=0, checkpoint_blocking_seconds=0, bytes_per_image=0
)


def test_a_savings_plan_pays_for_all_hours_of_a_year() -> None:
    rows = [
        PriceRow(NAME, "us-east-1", kind, Decimal(usd), "verified", "a contract", None)
        for kind, usd in (("on-demand", 60), ("savings-plan-3y-all-upfront", 30))
    ]
    found = break_even([STAGE], "us-east-1", ALONE, PriceTable.of(rows))
    [plan] = [each for each in found if each.option.startswith("savings-plan")]
    # 360,000 steps at 1 it/s are 100 hours of 4 instances; half of a year has 4,380 hours.
    assert "used 50% of the year (4,380 h); this run uses 400 instance-hours" in plan.sentence


def test_savings_plans_last_a_year_or_three() -> None:
    assert {name[: len("savings-plan-1y")] for name in SAVINGS_PLANS} == {
        "savings-plan-1y",
        "savings-plan-3y",
    }


@pytest.mark.parametrize(
    ("sharding", "parameters", "units"),
    [("none", 65_536_000, 10), ("none", 65_536_001, 11), ("full_shard", 1, 16)],
)
def test_gradients_are_reduced_in_buckets_of_25_mib_or_16_units(
    sharding: str, parameters: int, units: int
) -> None:
    """25 MiB of fp32 are 6,553,600 parameters (PyTorch's bucket_cap_mb)."""
    assert estimated_units(sharding, parameters) == units


def test_a_doubling_keeps_87_to_100_percent_of_the_speed_of_each_gpu() -> None:
    scaled = scale_one(8, 100.0, 16)
    assert (scaled.low, scaled.images_per_second, scaled.high) == pytest.approx((174, 190, 200))
