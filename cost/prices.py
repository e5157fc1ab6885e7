"""Prices of instance-hours, each with its source and date.

A :class:`PriceTable` takes precedence over another: AWS's price list over the shipped table, the
user's price file over both. Dates are ISO days; the caller passes the current date, because this
layer has no clock.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from datetime import date
from decimal import Decimal
from functools import cache
from pathlib import Path
from typing import Literal

from sm_train.cost.instances import instance_type

_TABLE = Path(__file__).parent / "data" / "prices.csv"

ON_DEMAND, SPOT = "on-demand", "spot"
SAVINGS_PLANS = tuple(
    f"savings-plan-{years}y-{upfront}-upfront"
    for years in (1, 3)
    for upfront in ("no", "partial", "all")
)
KINDS = (ON_DEMAND, SPOT, *SAVINGS_PLANS)
"""The purchase options of an instance-hour of training."""

PROCESSING = "processing"
"""The kind of an instance-hour of SageMaker Processing, which has one purchase option."""

ANY = "*"
STALE_DAYS = 90

SPOT_LEAST = Decimal("0.10")
"""Managed spot training saves "up to 90%" (SageMaker developer guide): the least spot price."""


class PriceError(ValueError):
    """A price source cannot be used; the message names the location and the fix."""


@dataclass(frozen=True)
class PriceRow:
    """One price of a table. ``usd_per_hour`` None is unknown; ``date`` None is undated."""

    instance_type: str
    region: str
    kind: str
    usd_per_hour: Decimal | None
    status: str
    source: str
    date: str | None


@dataclass(frozen=True)
class Discount:
    """A negotiated discount on the list price; ``*`` matches every type or region."""

    instance_type: str
    region: str
    kind: str
    percent: Decimal
    source: str
    date: str | None


@dataclass(frozen=True)
class Price:
    """The price of an instance-hour; None is unknown, which is not 0.

    ``least_usd_per_instance_hour`` is set if only a range is known, as for spot: the price is then
    the upper end of the range.
    """

    instance_type: str
    region: str
    usd_per_instance_hour: Decimal | None
    status: Literal["verified", "inferred", "unknown"]
    source: str
    date: str | None
    least_usd_per_instance_hour: Decimal | None = None

    @property
    def least(self) -> Decimal | None:
        """The lowest possible price of an instance-hour."""
        if self.least_usd_per_instance_hour is None:
            return self.usd_per_instance_hour
        return self.least_usd_per_instance_hour


@dataclass(frozen=True)
class PriceTable:
    """Prices by type, region and kind.

    ``listed`` maps a region to the date on which AWS's complete price list for it was read: a type
    without a row is not offered in that region.
    """

    rows: Mapping[tuple[str, str, str], PriceRow]
    discounts: tuple[Discount, ...] = ()
    listed: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        rows: Iterable[PriceRow],
        discounts: Iterable[Discount] = (),
        listed: Mapping[str, str] | None = None,
    ) -> PriceTable:
        """Return a table of ``rows``; the last row for a type, region and kind counts."""
        by_key = {(row.instance_type, row.region, row.kind): row for row in rows}
        return cls(by_key, tuple(discounts), listed or {})

    def over(self, below: PriceTable) -> PriceTable:
        """Return this table with ``below`` as the default for what it does not price.

        A price for every region hides the single regions of ``below``, and a region whose
        complete list was read hides all of its prices in ``below``.
        """
        shown = {
            key: row
            for key, row in below.rows.items()
            if (row.instance_type, ANY, row.kind) not in self.rows
            and not (row.region in self.listed and row.kind in (ON_DEMAND, SPOT, PROCESSING))
        }
        return PriceTable(
            {**shown, **self.rows},
            (*below.discounts, *self.discounts),
            {**below.listed, **self.listed},
        )

    def price(self, name: str, region: str, kind: str = ON_DEMAND) -> Price:
        """Return the price of instance type ``name`` in ``region``, bought as ``kind``.

        Prices differ between regions. If the table has none for ``region``, the price of another
        region is used, unless AWS's complete list for ``region`` was read. Such a price, and one
        derived from EC2's, is marked inferred, and its source starts with that word. An unknown
        spot price is a range below the on-demand price.

        Raises:
            UnknownInstanceTypeError: no such instance type.
            ValueError: ``kind`` is none of :data:`KINDS`.
        """
        if kind not in KINDS:
            raise ValueError(f"purchase: {kind!r} is not one of {', '.join(KINDS)}")
        instance_type(name)
        listed = self._listed_price(name, region, kind)
        if listed.usd_per_instance_hour is None and kind == SPOT:
            listed = self._spot_range(name, region)
        return self._less_discounts(listed, kind)

    def processing_price(self, name: str, region: str) -> Price:
        """Return the price of a Processing instance, also of a type that does not train."""
        return self._less_discounts(self._listed_price(name, region, PROCESSING), PROCESSING)

    def _less_discounts(self, price: Price, kind: str) -> Price:
        for discount in self.discounts:
            if _covers(discount, price.instance_type, price.region, kind):
                price = _discounted(price, discount)
        return price

    def _listed_price(self, name: str, region: str, kind: str) -> Price:
        row = self.rows.get((name, region, kind)) or self.rows.get((name, ANY, kind))
        if row is None and region in self.listed and kind in (ON_DEMAND, PROCESSING):
            source = f"not in AWS's price list for {region} of {self.listed[region]}: not offered"
            return Price(name, region, None, "unknown", source, None)
        other_region = None if row else self._in_another_region(name, kind)
        row = row or other_region
        if row is None or row.usd_per_hour is None:
            source = row.source if row else f"no {kind} price is known"
            return Price(name, region, None, "unknown", source, None)
        source = row.source
        if other_region:
            source = (
                f"the price in {row.region}, used for {region}, where the type may not be offered "
                f"({source})"
            )
        if not other_region and row.status == "verified":
            return Price(name, region, row.usd_per_hour, "verified", source, row.date)
        return Price(name, region, row.usd_per_hour, "inferred", f"inferred: {source}", row.date)

    def _in_another_region(self, name: str, kind: str) -> PriceRow | None:
        rows = (row for row in self.rows.values() if (row.instance_type, row.kind) == (name, kind))
        return next(rows, None)

    def _spot_range(self, name: str, region: str) -> Price:
        most = self.price(name, region, ON_DEMAND)
        if most.usd_per_instance_hour is None:
            return most
        source = (
            "inferred: the spot price is unknown; between 10 % of the on-demand price "
            f"(SageMaker states savings of up to 90 %) and all of it ({most.source})"
        )
        least = most.usd_per_instance_hour * SPOT_LEAST
        return replace(most, status="inferred", source=source, least_usd_per_instance_hour=least)


def _covers(discount: Discount, name: str, region: str, kind: str) -> bool:
    return (
        discount.instance_type in (ANY, name)
        and discount.region in (ANY, region)
        and discount.kind == kind
    )


def _discounted(price: Price, discount: Discount) -> Price:
    if price.usd_per_instance_hour is None:
        return price
    share = 1 - discount.percent / 100
    least = price.least_usd_per_instance_hour
    return replace(
        price,
        usd_per_instance_hour=price.usd_per_instance_hour * share,
        least_usd_per_instance_hour=None if least is None else least * share,
        source=f"{price.source}; {discount.percent.normalize():f} % off ({discount.source})",
    )


def staleness(price: Price, today: date) -> str | None:
    """Return why ``price`` may be out of date on ``today``; None if it is younger than 90 days."""
    if price.usd_per_instance_hour is None:
        return None
    where = f"price of {price.instance_type}"
    if price.date is None:
        return f"{where} is undated; `sm-train cost --refresh` fetches the current one"
    days = (today - date.fromisoformat(price.date)).days
    if days <= STALE_DAYS:
        return None
    return f"{where} is {days} days old; `sm-train cost --refresh` fetches the current one"


@cache
def shipped_prices() -> PriceTable:
    """Return the dated table that ships with sm-train."""
    with _TABLE.open(encoding="utf-8", newline="") as file:
        return PriceTable.of(
            PriceRow(
                instance_type=row["instance_type"],
                region=row["region"],
                kind=row["kind"],
                usd_per_hour=Decimal(row["usd_per_hour"]) if row["usd_per_hour"] else None,
                status=row["status"],
                source=row["source"],
                date=row["date"] or None,
            )
            for row in csv.DictReader(file)
        )
