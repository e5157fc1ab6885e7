"""Dollars for one instance-hour of training, with where and when the figure is from."""

from __future__ import annotations

from dataclasses import dataclass
from decimal import Decimal
from typing import Literal

from sm_train.cost.instances import instance_type

Status = Literal["verified", "inferred", "unknown"]


@dataclass(frozen=True)
class Price:
    """An on-demand price; None is unknown, which is not 0."""

    instance_type: str
    region: str
    usd_per_instance_hour: Decimal | None
    status: Status
    source: str
    date: str | None


def training_price(name: str, region: str) -> Price:
    """The on-demand price of instance type ``name`` in ``region``.

    Prices differ between regions: where the table has none for ``region``, the figure of another
    one is given, marked inferred, with a source that says so.

    Raises:
        UnknownInstanceTypeError: no such instance type.
    """
    machine = instance_type(name)
    if machine.usd_per_hour is None:
        return Price(name, region, None, "unknown", machine.price_source, None)
    status: Status = "verified" if machine.price_status == "verified" else "inferred"
    source = machine.price_source
    if region not in machine.price_regions:
        status = "inferred"
        source = f"the price in {machine.price_regions[0]} stands in for {region} ({source})"
    return Price(name, region, machine.usd_per_hour, status, source, machine.price_date)
