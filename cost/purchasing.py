"""Where and how to buy a run's instances: regions, platforms, break-even points of options.

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
    Estimate,
    Purchase,
    estimate,
    hourly_price,
    stage_cost,
    stage_seconds,
    total_money,
)
from sm_train.cost.prices import (
    EC2,
    HYPERPOD,
    ON_DEMAND,
    SAVINGS_PLANS,
    SPOT,
    Price,
    PriceTable,
    capacity_block_price,
    known_regions,
)
from sm_train.cost.services import service_prices
from sm_train.cost.stage import CostStage

_HOURS_PER_YEAR = Decimal(8760)
_SECONDS_PER_HOUR = 3600


@dataclass(frozen=True)
class RegionCost:
    """A run's cost in one region; ``difference`` is to the run's own region."""

    region: str
    price: Price
    cost: Decimal | None
    low: Decimal | None
    high: Decimal | None
    difference: Decimal | None
    is_own: bool

    def as_dict(self) -> dict[str, Any]:
        return {
            "region": self.region,
            "price_per_instance_hour_usd": _float(self.price.usd_per_instance_hour),
            "price_status": self.price.status,
            "price_source": self.price.source,
            "cost_usd": _float(self.cost),
            "cost_low_usd": _float(self.low),
            "cost_high_usd": _float(self.high),
            "difference_usd": _float(self.difference),
            "own_region": self.is_own,
        }


def costs_by_region(
    stages: Sequence[CostStage], purchase: Purchase, assumed: Assumptions, prices: PriceTable
) -> list[RegionCost]:
    """Return the run's cost in every region that offers its instance type, cheapest first."""
    name = stages[0].instance_type
    listed = [row.region for row in prices.rows.values() if row.instance_type == name]
    regions = dict.fromkeys((purchase.region, *listed, *known_regions(name)))
    priced = {
        region: estimate(
            stages,
            Purchase(region, purchase.capacity, purchase.kind),
            assumed=assumed,
            prices=prices,
        )
        for region in regions
        if region != "*"
    }
    own = priced[purchase.region].cost
    found = [_region_cost(region, price, own, purchase.region) for region, price in priced.items()]
    return sorted(
        found, key=lambda regional: (regional.cost is None, regional.cost or 0, not regional.is_own)
    )


def _region_cost(region: str, priced: Estimate, own: Decimal | None, own_region: str) -> RegionCost:
    cost = priced.cost
    difference = None if cost is None or own is None else cost - own
    price = priced.stages[0].price
    return RegionCost(
        region, price, cost, priced.low, priced.high, difference, region == own_region
    )


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
    seconds = [stage_seconds for stage_seconds, _ in priced]
    cost = total_money([stage_usd for _, stage_usd in priced])
    control_plane = Decimal(0)
    if platform == "eks" and None not in seconds:
        hours = Decimal(sum(value or 0.0 for value in seconds)) / SECONDS_PER_HOUR
        control_plane = hours * service_prices()["eks_control_plane"].usd
        cost = None if cost is None else cost + control_plane
    return PlatformCost(platform, hourly[0], cost, control_plane)


@dataclass(frozen=True)
class BreakEven:
    """The point from which a purchase option costs less than on demand."""

    option: str
    sentence: str
    usd_per_instance_hour: Decimal | None

    def as_dict(self) -> dict[str, Any]:
        return {
            "option": self.option,
            "sentence": self.sentence,
            "usd_per_instance_hour": _float(self.usd_per_instance_hour),
        }


def break_even(
    stages: Sequence[CostStage], region: str, assumed: Assumptions, prices: PriceTable
) -> list[BreakEven]:
    """Return the break-even points of spot and of reservations for the run's instance type."""
    name = stages[0].instance_type
    on_demand = prices.price(name, region).usd_per_instance_hour
    hours = _instance_hours(stages, Purchase(region), assumed)
    if on_demand is None or not hours:
        return []
    return [
        *_spot(stages, region, assumed, prices, on_demand, hours),
        *_savings_plans(name, region, prices, on_demand, hours),
        *_capacity_block(name, region, on_demand),
    ]


def _instance_hours(
    stages: Sequence[CostStage], purchase: Purchase, assumed: Assumptions
) -> Decimal | None:
    total = Decimal(0)
    for stage in stages:
        billable = stage_seconds(stage, purchase, assumed)["billable"].value
        if billable is None:
            return None
        total += Decimal(billable) * stage.instances / _SECONDS_PER_HOUR
    return total


def _spot(
    stages: Sequence[CostStage],
    region: str,
    assumed: Assumptions,
    prices: PriceTable,
    on_demand: Decimal,
    hours: Decimal,
) -> list[BreakEven]:
    spot_hours = _instance_hours(stages, Purchase(region, SPOT), assumed)
    if not spot_hours:
        return []
    limit = on_demand * hours / spot_hours
    known = prices.price(stages[0].instance_type, region, SPOT).usd_per_instance_hour
    now = "its price is not known" if known is None else f"it costs ${known:,.2f}"
    sentence = (
        f"spot costs less below ${limit:,.2f} per instance-hour, {limit / on_demand:.0%} of on "
        f"demand: reclaimed instances add {spot_hours / hours - 1:.1%} of instance-hours; {now}"
    )
    return [BreakEven(SPOT, sentence, limit)]


def _savings_plans(
    name: str, region: str, prices: PriceTable, on_demand: Decimal, hours: Decimal
) -> list[BreakEven]:
    priced = [(kind, prices.price(name, region, kind)) for kind in SAVINGS_PLANS]
    known = [(kind, price) for kind, price in priced if price.usd_per_instance_hour is not None]
    used = f"this run uses {hours:,.0f} instance-hours; an instance has 8,760 in a year"
    if not known:
        sentence = (
            "a Savings Plan is billed whether it is used or not: with a discount of 30 % it costs "
            f"less if instances are used 70 % of the year; {used}"
        )
        return [BreakEven("savings-plan", sentence, None)]
    found = []
    for kind, price in known:
        share = (price.usd_per_instance_hour or Decimal(0)) / on_demand
        sentence = (
            f"{kind} costs less if instances are used {share:.0%} of the year "
            f"({share * _HOURS_PER_YEAR:,.0f} h); {used}"
        )
        found.append(BreakEven(kind, sentence, price.usd_per_instance_hour))
    return found


def _capacity_block(name: str, region: str, on_demand: Decimal) -> list[BreakEven]:
    block = capacity_block_price(name, region)
    if block is None:
        return []
    rate, date = block
    share = rate / on_demand
    sentence = (
        f"a reservation at EC2's Capacity Block rate (${rate} per instance-hour, {date}) costs "
        f"less than on demand if {share:.0%} of the reserved hours are used; a training plan's fee "
        "may differ"
    )
    return [BreakEven("reservation", sentence, rate)]


def _float(amount: Decimal | None) -> float | None:
    return None if amount is None else float(amount)
