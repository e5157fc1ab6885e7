"""Training jobs, HyperPod and EKS at their own prices."""

from __future__ import annotations

from decimal import Decimal

import pytest
from sm_train.cost.assumptions import Assumptions
from sm_train.cost.instances import instance_types
from sm_train.cost.prices import EC2, HYPERPOD, shipped_prices
from sm_train.cost.purchasing import platform_costs
from sm_train.cost.speed import Speed
from sm_train.cost.stage import CostStage

NONE = Assumptions(start_up_seconds=0, evaluation_seconds=0)


def _stage(instance_type: str) -> CostStage:
    return CostStage(
        name="256px",
        resolution=256,
        instance_type=instance_type,
        instances=2,
        per_device_batch_size=1,
        gradient_accumulation_steps=1,
        max_steps=3600,
        checkpoint_every=3600,
        speed=Speed(1.0, 1.0, 1.0, "measured", "test"),
    )


def test_platforms_differ_by_their_prices_only() -> None:
    stages = [_stage("ml.p4d.24xlarge")]
    priced = platform_costs(stages, "us-west-2", NONE, shipped_prices())
    assert [option.platform for option in priced] == ["training-jobs", "hyperpod", "eks"]
    hourly = {option.platform: option.price.usd_per_instance_hour for option in priced}
    assert hourly == {
        "training-jobs": Decimal("25.251286"),
        "hyperpod": Decimal("25.91001756"),
        "eks": Decimal("21.9576"),  # the price in us-east-1 × the ratio of the regions, 1
    }
    jobs, hyperpod, eks = (option.cost or Decimal(0) for option in priced)
    hours = (hyperpod - jobs) / (Decimal("25.91001756") - Decimal("25.251286"))
    assert float(hours) == pytest.approx(2, rel=0.1)  # two instances for an hour
    control_plane = eks - jobs + hours * (Decimal("25.251286") - Decimal("21.9576"))
    assert float(control_plane) == pytest.approx(float(hours) / 2 * 0.10)


def test_unknown_price_stays_unknown() -> None:
    """AWS publishes no on-demand price of p5e."""
    priced = platform_costs([_stage("ml.p5e.48xlarge")], "us-east-1", NONE, shipped_prices())
    assert [option.cost for option in priced] == [None, None, None]
    assert [option.as_dict()["price_per_instance_hour_usd"] for option in priced] == [None] * 3


def test_ec2_costs_less_than_hyperpod_for_every_type() -> None:
    table = shipped_prices()
    compared = 0
    for kind in instance_types():
        ec2 = table.price(kind.name, "us-east-1", EC2).usd_per_instance_hour
        hyperpod = table.price(kind.name, "us-east-1", HYPERPOD).usd_per_instance_hour
        if ec2 is not None and hyperpod is not None:
            assert 1 < hyperpod / ec2 <= Decimal("1.25"), kind.name
            compared += 1
    assert compared > 20
