"""Parse AWS's price list for training and Processing, in each format that AWS publishes.

Formats (AWS Billing user guide, "Using the AWS Price List"): the bulk offer file (``products`` and
``terms``), the answer of ``GetProducts`` (``PriceList`` of JSON strings) and a Savings Plan's rate
file (``terms.savingsPlan``). Only the ``usagetype`` (``USE1-Train:ml.TYPE``, spot ``TrSpt:``,
``Processing:``, HyperPod ``Cluster:``) identifies a product: ``instanceType`` may have a suffix and
``component`` may be absent.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from decimal import Decimal, InvalidOperation
from typing import Any

from sm_train.cost.prices import (
    HYPERPOD,
    KINDS,
    ON_DEMAND,
    PROCESSING,
    SPOT,
    PriceError,
    PriceRow,
)

_USAGE = re.compile(
    r"^(?:(?P<prefix>[A-Z0-9]+)-)?(?P<use>Train|TrSpt|Processing|Cluster):(?P<type>ml\.[\w.-]+)$"
)
_USES = {"Train": ON_DEMAND, "TrSpt": SPOT, "Processing": PROCESSING, "Cluster": HYPERPOD}

_REGIONS = {
    "": "us-east-1",
    "USE1": "us-east-1",
    "USE2": "us-east-2",
    "USW1": "us-west-1",
    "USW2": "us-west-2",
    "CAN1": "ca-central-1",
    "SAE1": "sa-east-1",
    "EU": "eu-west-1",
    "EUW1": "eu-west-1",
    "EUW2": "eu-west-2",
    "EUW3": "eu-west-3",
    "EUC1": "eu-central-1",
    "EUN1": "eu-north-1",
    "EUS1": "eu-south-1",
    "APN1": "ap-northeast-1",
    "APN2": "ap-northeast-2",
    "APN3": "ap-northeast-3",
    "APS1": "ap-southeast-1",
    "APS2": "ap-southeast-2",
    "APS3": "ap-south-1",
    "APE1": "ap-east-1",
    "MES1": "me-south-1",
    "AFS1": "af-south-1",
}
"""Usage type prefix → region (AWS Cost and Usage Reports user guide)."""


def parse_price_list(document: Any) -> list[PriceRow]:
    """Return the training, HyperPod and Processing prices in ``document``, in any of AWS's formats.

    Prices are exact, in US dollars per instance-hour. Other products and prices that are not per
    hour are skipped.

    Raises:
        PriceError: not a price list, a damaged one, or prices in another currency than dollars.
    """
    if not isinstance(document, Mapping):
        raise PriceError("not an AWS price list: not a JSON object")
    try:
        if "PriceList" in document:
            return [row for offer in _offers(document["PriceList"]) for row in _offer(offer)]
        terms = document.get("terms", {})
        if "savingsPlan" in terms:
            return list(_savings_plans(document))
        if "products" in document:
            return list(_bulk(document))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        if isinstance(error, PriceError):
            raise
        raise PriceError(f"a damaged AWS price list: {type(error).__name__}: {error}") from None
    raise PriceError("not an AWS price list: it has no PriceList, products or terms.savingsPlan")


def _offers(items: Iterable[Any]) -> Iterator[Mapping[str, Any]]:
    for item in items:
        yield json.loads(item) if isinstance(item, str) else item


def _offer(offer: Mapping[str, Any]) -> Iterator[PriceRow]:
    """Return one item of GetProducts: a product with its terms."""
    terms = offer.get("terms", {}).get("OnDemand", {})
    yield from _product(offer["product"], terms.values(), str(offer["publicationDate"]))


def _bulk(document: Mapping[str, Any]) -> Iterator[PriceRow]:
    on_demand = document["terms"].get("OnDemand", {})
    for sku, product in document["products"].items():
        yield from _product(
            product, on_demand.get(sku, {}).values(), str(document["publicationDate"])
        )


def _product(
    product: Mapping[str, Any], terms: Iterable[Mapping[str, Any]], published: str
) -> Iterator[PriceRow]:
    attributes = product["attributes"]
    usage = _USAGE.match(attributes.get("usagetype", ""))
    if usage is None:
        return
    region = attributes.get("regionCode") or _region(usage["prefix"], attributes["usagetype"])
    for dimension in (price for term in terms for price in term["priceDimensions"].values()):
        if dimension["unit"] != "Hrs":
            continue
        yield PriceRow(
            instance_type=usage["type"],
            region=region,
            kind=_USES[usage["use"]],
            usd_per_hour=_dollars(dimension["pricePerUnit"], attributes["usagetype"]),
            status="verified",
            source=f"AWS Price List, {attributes['usagetype']}",
            date=published[:10],
        )


def _savings_plans(document: Mapping[str, Any]) -> Iterator[PriceRow]:
    published = str(document.get("publicationDate", ""))[:10] or None
    for plan in document["terms"]["savingsPlan"]:
        kind = _plan_kind(plan)
        for rate in plan["rates"] if kind else ():
            usage = _USAGE.match(rate["discountedUsageType"])
            if usage is None or usage["use"] != "Train" or rate["unit"] != "Hrs":
                continue
            price = rate["discountedRate"]
            yield PriceRow(
                instance_type=usage["type"],
                region=_region(usage["prefix"], rate["discountedUsageType"]),
                kind=kind,
                usd_per_hour=_dollars(
                    {price["currency"]: price["price"]}, rate["discountedUsageType"]
                ),
                status="verified",
                source=f"AWS Price List, {plan['description']}",
                date=published,
            )


def _plan_kind(plan: Mapping[str, Any]) -> str:
    """Convert ``1 year Partial Upfront …`` to a kind: ``savings-plan-1y-partial-upfront``."""
    years = plan["leaseContractLength"]["duration"]
    match = re.search(r"\b(no|partial|all) upfront\b", plan["description"], re.IGNORECASE)
    kind = f"savings-plan-{years}y-{match[1].lower()}-upfront" if match else ""
    return kind if kind in KINDS else ""


def _region(prefix: str | None, usage: str) -> str:
    region = _REGIONS.get(prefix or "")
    if region is None:
        raise PriceError(f"{usage}: the region of prefix {prefix!r} is not known")
    return region


def _dollars(per_unit: Mapping[str, str], usage: str) -> Decimal:
    if "USD" not in per_unit:
        raise PriceError(f"{usage}: priced in {', '.join(per_unit)}; only USD can be added up")
    try:
        amount = Decimal(per_unit["USD"])
    except InvalidOperation:
        amount = Decimal("NaN")
    if not (amount.is_finite() and amount >= 0):
        raise PriceError(f"{usage}: {per_unit['USD']!r} is not a price")
    return amount
