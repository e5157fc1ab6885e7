"""Parse AWS's price list for training and Processing: the pages of ``GetProducts``.

A page is a ``PriceList`` of JSON strings (Price List API reference). Only the ``usagetype``
(``USE1-Train:ml.TYPE``, spot ``TrSpt:``, ``Processing:``, HyperPod ``Cluster:``) identifies a
product: ``instanceType`` may have a suffix and ``component`` may be absent.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from decimal import Decimal, InvalidOperation
from typing import Any

from sm_train.cost.prices import (
    HYPERPOD,
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
    """Return the training, HyperPod and Processing prices of a page of ``GetProducts``.

    Prices are exact, in US dollars per instance-hour. Other products and prices that are not per
    hour are skipped.

    Raises:
        PriceError: not a price list, a damaged one, or prices in another currency than dollars.
    """
    if not isinstance(document, Mapping) or "PriceList" not in document:
        raise PriceError("not an AWS price list: it has no PriceList")
    try:
        return [row for offer in document["PriceList"] for row in _offer(offer)]
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        if isinstance(error, PriceError):
            raise
        raise PriceError(f"a damaged AWS price list: {type(error).__name__}: {error}") from None


def _offer(text: str | Mapping[str, Any]) -> Iterator[PriceRow]:
    """Yield the prices of a product with its terms."""
    offer = json.loads(text) if isinstance(text, str) else text
    terms = offer.get("terms", {}).get("OnDemand", {})
    yield from _product(offer["product"], terms.values(), str(offer["publicationDate"]))


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
