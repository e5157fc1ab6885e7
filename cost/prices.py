"""Dollars for one instance-hour of training, with where and when the figure is from."""

from __future__ import annotations

from dataclasses import dataclass
from decimal import Decimal
from typing import Literal

from sm_train.cost.instances import instance_type


@dataclass(frozen=True)
class Price:
    """An on-demand price; None is unknown, which is not 0."""

    instance_type: str
    region: str
    usd_per_instance_hour: Decimal | None
    status: Literal["verified", "inferred", "unknown"]
    source: str
    date: str | None


def training_price(name: str, region: str) -> Price:
    """The on-demand price of instance type ``name`` in ``region``.

    Prices differ between regions: where the table has none for ``region``, the figure of another
    one is given. Such a price, and one that is worked out from EC2's, is marked inferred, and its
    source begins with that word.

    Raises:
        UnknownInstanceTypeError: no such instance type.
    """
    machine = instance_type(name)
    if machine.usd_per_hour is None:
        return Price(name, region, None, "unknown", machine.price_source, None)
    source, known_here = machine.price_source, region in machine.price_regions
    if not known_here:
        source = f"the price in {machine.price_regions[0]} stands in for {region} ({source})"
    if known_here and machine.price_status == "verified":
        return Price(name, region, machine.usd_per_hour, "verified", source, machine.price_date)
    source = f"inferred: {source}"
    return Price(name, region, machine.usd_per_hour, "inferred", source, machine.price_date)
