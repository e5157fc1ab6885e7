"""Lists instance types with their GPUs, network and prices by region."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypedDict

from sm_train.cost.instances import InstanceType, instance_types
from sm_train.cost.prices import Price, PriceTable, known_regions
from sm_train.toolkit.errors import UserError
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
    types = [one for one in instance_types() if one.trains]
    chosen = [one for one in types if gpu is None or _matches(one, gpu)]
    if not chosen:
        names = ", ".join(dict.fromkeys(one.accelerator for one in types))
        raise UserError(f"--gpu: {gpu!r} is in no GPU's name and no type's; GPUs: {names}")
    return [_document(one, region, prices) for one in chosen]


def _matches(one: InstanceType, text: str) -> bool:
    return text.lower() in one.accelerator.lower() or text.lower() in one.name.lower()


def _document(one: InstanceType, region: str, prices: PriceTable) -> InstanceDocument:
    return {
        "instance_type": one.name,
        "gpu": one.accelerator,
        "gpus": one.accelerators,
        "gpu_memory_gib": one.accelerator_memory_gib,
        "efa_gbps": one.network_gbps if one.supports_efa else None,
        "network_gbps": one.network_gbps,
        "local_nvme_gb": one.local_nvme_gb,
        **_price(prices.price(one.name, region)),
        "regions": {
            other: _price(prices.price(one.name, other)) for other in known_regions(one.name)
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
            one["instance_type"],
            f"{one['gpus']} × {one['gpu']}",
            _quantity(one["gpu_memory_gib"]),
            _quantity(one["efa_gbps"]),
            _amount(one, region, 1),
            _amount(one, region, one["gpus"]),
        )
        for one in documents
    ]
    header = ("instance type", "GPUs", "GiB each", "EFA Gb/s", "$/h", "$/GPU-h")
    for line in text_table(header, rows, left=2, width=terminal_width()):
        write_line(line)
    write_line(f"\nOn demand in {region}. ~ derived from another region, – not known there")


def show_prices_by_region(documents: Sequence[InstanceDocument]) -> None:
    """Print the price of each type in each region, cheapest first."""
    rows = [
        (one["instance_type"], other, _formatted(price, 1))
        for one in documents
        for other, price in sorted(one["regions"].items(), key=lambda item: _sort_key(item[1]))
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


def _amount(one: InstanceDocument, region: str, parts: int) -> str:
    """Format the price of an instance-hour divided by ``parts``."""
    known = one["price_status"] in ("verified", "third-party") or region in one["regions"]
    return _formatted(one, parts) if known else "–"


def _formatted(price: RegionPrice, parts: int) -> str:
    usd = price["price_per_instance_hour_usd"]
    if usd is None:
        return "unknown"
    mark = "" if price["price_status"] in ("verified", "third-party") else "~"
    return mark + format_usd(usd / parts)
