"""Prices of instance-hours, each with its status, source and date.

Statuses: ``verified`` is AWS's own price list or the user's file; ``third-party`` quotes that list;
``derived`` multiplies a price of another region or of EC2 by a published factor; ``assumed`` lacks
the factor. Derived and assumed prices are ranges.

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
from typing import Literal, cast

from sm_train.cost.instances import instance_type, is_own_machine

_DATA = Path(__file__).parent / "data"
_TABLE, _REGIONS = _DATA / "prices.csv", _DATA / "regions.csv"
_BLOCKS = _DATA / "capacity_blocks.csv"
_CENT_SHARE = Decimal("0.0001")

REFERENCE_REGION = "us-east-1"
"""Region whose prices are preferred when another region's must be derived."""

ON_DEMAND, SPOT = "on-demand", "spot"
SAVINGS_PLANS = tuple(
    f"savings-plan-{years}y-{upfront}-upfront"
    for years in (1, 3)
    for upfront in ("no", "partial", "all")
)
TRAINING_PLAN = "training-plan"
HYPERPOD, EC2 = "hyperpod-on-demand", "ec2-on-demand"
"""On-demand hours outside of training jobs: of a HyperPod cluster, and of EC2 (EKS, own Slurm)."""

KINDS = (ON_DEMAND, SPOT, *SAVINGS_PLANS, TRAINING_PLAN, HYPERPOD, EC2)
"""The purchase options of an instance-hour of training."""

Status = Literal["verified", "third-party", "derived", "assumed", "unknown"]

PROCESSING = "processing"
"""The kind of an instance-hour of SageMaker Processing, which has one purchase option."""

ANY = "*"
STALE_DAYS = 90

LEAST_SHARE = {SPOT: Decimal("0.10"), **dict.fromkeys(SAVINGS_PLANS, Decimal("0.36"))}
"""The least price ÷ on-demand price: managed spot training saves "up to 90%" (SageMaker developer
guide), Savings Plans "up to 64%" (SageMaker pricing page)."""

DERIVED_RANGE = (Decimal("0.95"), Decimal("1.15"))
"""A derived price's least and most. SageMaker ÷ EC2 is 1.15 for P4 and P5, 1.25 for most G types
and up to 1.4 for the smallest ones (the shipped prices)."""

ASSUMED_FACTOR, ASSUMED_RANGE = Decimal("1.2"), (Decimal("0.83"), Decimal("1.42"))
"""Factor and range of a region whose factor is unknown: the median of ``data/regions.csv``, and its
range of 1.0 to 1.7."""


class PriceError(ValueError):
    """A price source cannot be used; the message names the location and the fix."""


@dataclass(frozen=True)
class PriceRow:
    """One price of a table. ``usd_per_hour`` None is unknown; ``date`` None is undated."""

    instance_type: str
    region: str
    kind: str
    usd_per_hour: Decimal | None
    status: Status
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

    ``least_usd_per_instance_hour`` and ``most_usd_per_instance_hour`` are set if only a range is
    known; for spot and Savings Plans without a price they are all that is known.
    """

    instance_type: str
    region: str
    usd_per_instance_hour: Decimal | None
    status: Status
    source: str
    date: str | None
    least_usd_per_instance_hour: Decimal | None = None
    most_usd_per_instance_hour: Decimal | None = None

    @property
    def least(self) -> Decimal | None:
        """The lowest possible price of an instance-hour."""
        if self.least_usd_per_instance_hour is None:
            return self.usd_per_instance_hour
        return self.least_usd_per_instance_hour

    @property
    def most(self) -> Decimal | None:
        """The highest possible price of an instance-hour."""
        if self.most_usd_per_instance_hour is None:
            return self.usd_per_instance_hour
        return self.most_usd_per_instance_hour


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

        If the table has none for ``region``, it is derived from another region's by a published
        factor, or assumed, unless AWS's complete list for ``region`` was read. An unknown spot or
        Savings Plan price has only bounds.

        Raises:
            UnknownInstanceTypeError: no such instance type.
            ValueError: ``kind`` is none of :data:`KINDS`.
        """
        if kind not in KINDS:
            raise ValueError(f"purchase: {kind!r} is not one of {', '.join(KINDS)}")
        if (usd := instance_type(name).own_usd_per_hour) is not None:
            return Price(name, region, usd, "verified", "the run file states it", None)
        listed = self._listed_price(name, region, kind)
        if listed.usd_per_instance_hour is None and kind in LEAST_SHARE:
            listed = self._bounds(name, region, kind)
        elif listed.usd_per_instance_hour is None and kind == TRAINING_PLAN:
            listed = replace(listed, source=_plan_source(name, region))
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
        if row is not None and row.usd_per_hour is not None:
            return _from_price_row(row, name, region)
        is_own = row is not None or kind == TRAINING_PLAN  # a fee is that of one plan
        elsewhere = None if is_own else self._in_another_region(name, kind)
        if elsewhere is not None and elsewhere.usd_per_hour is not None:
            return _moved(_from_price_row(elsewhere, name, region), elsewhere)
        source = row.source if row else f"no {kind} price is known"
        return Price(name, region, None, "unknown", source, None)

    def _in_another_region(self, name: str, kind: str) -> PriceRow | None:
        rows = [row for row in self.rows.values() if (row.instance_type, row.kind) == (name, kind)]
        priced = [row for row in rows if row.usd_per_hour is not None]
        return min(priced, key=lambda row: row.region != REFERENCE_REGION, default=None)

    def _bounds(self, name: str, region: str, kind: str) -> Price:
        """Return what is known of a spot or Savings Plan price without a row."""
        on_demand = self.price(name, region, ON_DEMAND)
        least, most = on_demand.least, on_demand.most
        if least is None or most is None:
            return on_demand
        share = LEAST_SHARE[kind]
        source = (
            f"no {kind} price is known: between {share:.0%} of the on-demand price (AWS: savings "
            f"of up to {1 - share:.0%}) and all of it ({on_demand.source})"
        )
        return Price(name, region, None, "unknown", source, None, least * share, most)


def _from_price_row(row: PriceRow, name: str, region: str) -> Price:
    price = Price(name, region, row.usd_per_hour, row.status, row.source, row.date)
    if row.status != "derived" or row.usd_per_hour is None:
        return price
    low, high = (row.usd_per_hour * share for share in DERIVED_RANGE)
    return replace(
        price,
        least_usd_per_instance_hour=low,
        most_usd_per_instance_hour=high,
    )


def _moved(price: Price, row: PriceRow) -> Price:
    """Return the price of ``row``'s region in the region of ``price``."""
    family = price.instance_type.split(".")[1]
    status: Status
    here, there = region_factor(family, price.region), region_factor(family, row.region)
    if here is not None and there is not None:
        factor, status, (low, high) = here / there, "derived", DERIVED_RANGE
        how = f"× {factor:.3g}, EC2's ratio of the regions (2026-01)"
    else:
        factor, status, (low, high) = ASSUMED_FACTOR, "assumed", ASSUMED_RANGE
        how = (
            f"× {factor}, because no price of {price.region} is known; it may not be offered there"
        )
    least, middle, most = price.least, price.usd_per_instance_hour, price.most
    assert least is not None
    assert middle is not None
    assert most is not None
    return replace(
        price,
        usd_per_instance_hour=(middle * factor).quantize(_CENT_SHARE),
        status=status,
        source=f"{status}: the price in {row.region} {how} ({row.source})",
        least_usd_per_instance_hour=least * factor * low,
        most_usd_per_instance_hour=most * factor * high,
    )


@cache
def _region_factors() -> dict[tuple[str, str], Decimal]:
    with _REGIONS.open(encoding="utf-8", newline="") as file:
        return {
            (row["family"], row["region"]): Decimal(row["factor"]) for row in csv.DictReader(file)
        }


def region_factor(family: str, region: str) -> Decimal | None:
    """Return the price of ``family``, such as p5, in ``region`` ÷ that in us-east-1.

    None if EC2 published none for the region when the table was read: it may not be offered there.
    """
    return _region_factors().get((family, region))


def known_regions(instance_type: str) -> tuple[str, ...]:
    """Return the regions in which EC2 offered the family of ``instance_type``."""
    family = instance_type.split(".")[1]
    return tuple(region for factor_family, region in _region_factors() if factor_family == family)


@cache
def _capacity_blocks() -> dict[tuple[str, str], tuple[Decimal, str]]:
    with _BLOCKS.open(encoding="utf-8", newline="") as file:
        return {
            (row["instance_type"], row["region"]): (Decimal(row["usd_per_hour"]), row["date"])
            for row in csv.DictReader(file)
        }


def capacity_block_price(name: str, region: str) -> tuple[Decimal, str] | None:
    """Return EC2's Capacity Block rate for an instance-hour of ``name``, and its date."""
    return _capacity_blocks().get((name, region))


def _plan_source(name: str, region: str) -> str:
    source = (
        "training plan: prepaid; its fee is unknown (give it with --prices, kind training-plan)"
    )
    block = capacity_block_price(name, region)
    if block is None:
        return source
    return f"{source}; EC2 Capacity Blocks cost ${block[0]} per instance-hour there ({block[1]})"


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
    least, most = price.least_usd_per_instance_hour, price.most_usd_per_instance_hour
    return replace(
        price,
        usd_per_instance_hour=price.usd_per_instance_hour * share,
        least_usd_per_instance_hour=None if least is None else least * share,
        most_usd_per_instance_hour=None if most is None else most * share,
        source=f"{price.source}; {discount.percent.normalize():f} % off ({discount.source})",
    )


def staleness(price: Price, today: date) -> str | None:
    """Return why ``price`` may be out of date on ``today``; None if it is younger than 90 days."""
    if price.usd_per_instance_hour is None or is_own_machine(price.instance_type):
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
                status=cast(Status, row["status"]),
                source=row["source"],
                date=row["date"] or None,
            )
            for row in csv.DictReader(file)
        )
