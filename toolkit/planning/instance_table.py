"""Lists instance types with their GPUs, network and prices by region."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypedDict

from sm_train.cost.instances import InstanceType, instance_types
from sm_train.cost.prices import Price, PriceTable, known_regions
from sm_train.toolkit.base.errors import UserError
from sm_train.toolkit.terminal.console import write_line
from sm_train.toolkit.terminal.formatting import format_usd
from sm_train.toolkit.terminal.text_table import terminal_width, text_table


class RegionPrice(TypedDict):
    """The on-demand price of an instance-hour; null is unknown."""

    price_per_instance_hour_usd: float | None
    price_status: str
    price_source: str
    price_date: str | None


class InstanceDocument(RegionPrice):
    """One type of ``instances --json``: its price in the chosen region, and in each other one."""

    instance_type: str
    gpu: str
    gpus: int
    gpu_memory_gib: float | None
    efa_gbps: float | None
    network_gbps: float | None
    local_nvme_gb: float | None
    regions: dict[str, RegionPrice]


def list_instances(gpu: str | None, region: str, prices: PriceTable) -> list[InstanceDocument]:
    """Return the types that the trainer runs on, whose GPU or name contains ``gpu``.

    ``regions`` are those in which EC2 offered the family when the price table was made.

    Raises:
        UserError: no type matches.
    """
    types = [kind for kind in instance_types() if kind.trains]
    chosen = [kind for kind in types if gpu is None or _matches(kind, gpu)]
    if not chosen:
        names = ", ".join(dict.fromkeys(kind.accelerator for kind in types))
        raise UserError(f"--gpu: {gpu!r} is in no GPU's name and no type's; GPUs: {names}")
    return [_document(type_, region, prices) for type_ in chosen]


def _matches(instance_type: InstanceType, text: str) -> bool:
    return (
        text.lower() in instance_type.accelerator.lower()
        or text.lower() in instance_type.name.lower()
    )


def _document(instance_type: InstanceType, region: str, prices: PriceTable) -> InstanceDocument:
    return {
        "instance_type": instance_type.name,
        "gpu": instance_type.accelerator,
        "gpus": instance_type.accelerators,
        "gpu_memory_gib": instance_type.accelerator_memory_gib,
        "efa_gbps": instance_type.network_gbps if instance_type.supports_efa else None,
        "network_gbps": instance_type.network_gbps,
        "local_nvme_gb": instance_type.local_nvme_gb,
        **_price(prices.price(instance_type.name, region)),
        "regions": {
            other: _price(prices.price(instance_type.name, other))
            for other in known_regions(instance_type.name)
        },
    }


def _price(price: Price) -> RegionPrice:
    usd = price.usd_per_instance_hour
    return {
        "price_per_instance_hour_usd": None if usd is None else float(usd),
        "price_status": price.status,
        "price_source": price.source,
        "price_date": price.date,
    }


def show_instances(documents: Sequence[InstanceDocument], region: str) -> None:
    """Print the types and their prices in one region."""
    rows = [
        (
            document["instance_type"],
            f"{document['gpus']} × {document['gpu']}",
            _quantity(document["gpu_memory_gib"]),
            _quantity(document["efa_gbps"]),
            _amount(document, region, 1),
            _amount(document, region, document["gpus"]),
        )
        for document in documents
    ]
    header = ("instance type", "GPUs", "GiB each", "EFA Gb/s", "$/h", "$/GPU-h")
    for line in text_table(header, rows, left=2, width=terminal_width()):
        write_line(line)
    write_line(f"\nOn demand in {region}. ~ derived from another region, – not known there")


def show_prices_by_region(documents: Sequence[InstanceDocument]) -> None:
    """Print the price of each type in each region, cheapest first."""
    rows = [
        (document["instance_type"], other, _formatted(price, 1))
        for document in documents
        for other, price in sorted(document["regions"].items(), key=lambda item: _sort_key(item[1]))
    ]
    header = ("instance type", "region", "$/h")
    for line in text_table(header, rows, left=2, width=terminal_width()):
        write_line(line)
    write_line("\nOn demand, where EC2 offered the family in 2026-01. ~ is derived.")


def _sort_key(price: RegionPrice) -> float:
    usd = price["price_per_instance_hour_usd"]
    return float("inf") if usd is None else usd


def _quantity(value: float | None) -> str:
    return "–" if value is None else f"{value:,.0f}"


def _amount(document: InstanceDocument, region: str, parts: int) -> str:
    """Format the price of an instance-hour divided by ``parts``."""
    known = document["price_status"] in ("verified", "third-party") or region in document["regions"]
    return _formatted(document, parts) if known else "–"


def _formatted(price: RegionPrice, parts: int) -> str:
    usd = price["price_per_instance_hour_usd"]
    if usd is None:
        return "unknown"
    mark = "" if price["price_status"] in ("verified", "third-party") else "~"
    return mark + format_usd(usd / parts)
