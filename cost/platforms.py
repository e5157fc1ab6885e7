"""The same instance-hours as training jobs, on HyperPod and on EKS, each at its own price.

A training job is billed from the image download to its end. A HyperPod or EKS cluster is billed
while its instances are allocated, also when no job runs on them: the costs here are those of the
run's own hours. EKS adds its control plane, which HyperPod orchestrated by Slurm does not need.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, Literal

from sm_train.cost.assumptions import Assumptions
from sm_train.cost.estimate import (
    SECONDS_PER_HOUR,
    Purchase,
    hourly_price,
    stage_cost,
    total_money,
)
from sm_train.cost.prices import EC2, HYPERPOD, ON_DEMAND, Price, PriceTable
from sm_train.cost.services import service_prices
from sm_train.cost.stage import CostStage

Platform = Literal["training-jobs", "hyperpod", "eks"]

PRICE_KINDS: dict[Platform, str] = {
    "training-jobs": ON_DEMAND,
    "hyperpod": HYPERPOD,
    "eks": EC2,
}
"""Platform → the kind of its instance-hour's price."""


@dataclass(frozen=True)
class PlatformCost:
    """A run's cost on one platform; ``control_plane`` is the part that EKS itself costs."""

    platform: Platform
    price: Price
    cost: Decimal | None
    control_plane: Decimal

    def as_dict(self) -> dict[str, Any]:
        price = self.price
        hourly = price.usd_per_instance_hour
        return {
            "platform": self.platform,
            "price_per_instance_hour_usd": None if hourly is None else float(hourly),
            "price_status": price.status,
            "price_source": price.source,
            "price_date": price.date,
            "control_plane_usd": float(self.control_plane),
            "cost_usd": None if self.cost is None else float(self.cost),
        }


def platform_costs(
    stages: Sequence[CostStage], region: str, assumed: Assumptions, prices: PriceTable
) -> list[PlatformCost]:
    """Return the on-demand cost of ``stages`` on each platform, one stage after the other.

    The price is that of the first stage's instance type.
    """
    return [
        _platform_cost(platform, kind, stages, region, assumed, prices)
        for platform, kind in PRICE_KINDS.items()
    ]


def _platform_cost(
    platform: Platform,
    kind: str,
    stages: Sequence[CostStage],
    region: str,
    assumed: Assumptions,
    prices: PriceTable,
) -> PlatformCost:
    purchase = Purchase(region, kind=kind)
    hourly = [hourly_price(stage.instance_type, purchase, prices) for stage in stages]
    priced = [
        stage_cost(stage, price, purchase, assumed)
        for stage, price in zip(stages, hourly, strict=True)
    ]
    seconds = [one for one, _ in priced]
    cost = total_money([one for _, one in priced])
    control_plane = Decimal(0)
    if platform == "eks" and None not in seconds:
        hours = Decimal(sum(one or 0.0 for one in seconds)) / SECONDS_PER_HOUR
        control_plane = hours * service_prices()["eks_control_plane"].usd
        cost = None if cost is None else cost + control_plane
    return PlatformCost(platform, hourly[0], cost, control_plane)
