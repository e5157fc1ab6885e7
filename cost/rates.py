"""Dollars for a day and for a million images, from a cluster's price and speed."""

from __future__ import annotations

from decimal import Decimal

_HOURS_PER_DAY = 24
_SECONDS_PER_HOUR = 3600
_MILLION = 10**6


def usd_per_day(instances: int, usd_per_instance_hour: Decimal) -> Decimal:
    """Dollars for 24 hours of ``instances`` machines: also the ceiling of what a day can cost."""
    return instances * usd_per_instance_hour * _HOURS_PER_DAY


def usd_per_million_images(
    images_per_second: float, instances: int, usd_per_instance_hour: Decimal
) -> Decimal:
    """Dollars for a million images at ``images_per_second`` of all ``instances`` together.

    Training alone: start-up, restarts and checkpoints come on top.
    """
    seconds = Decimal(_MILLION) / Decimal(images_per_second)
    return seconds * instances * usd_per_instance_hour / _SECONDS_PER_HOUR
