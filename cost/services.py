"""Service costs of a stage: checkpoints in S3, FastFile's requests, log ingestion."""

from __future__ import annotations

import csv
import math
from dataclasses import dataclass
from decimal import Decimal
from functools import cache
from pathlib import Path

from sm_train.cost.assumptions import Assumptions
from sm_train.cost.stage import CostStage

_TABLE = Path(__file__).parent / "data" / "services.csv"

BYTES_PER_PARAMETER = 16
"""Bytes per parameter of an fp32 checkpoint: weights, both AdamW moments and EMA weights."""

_GB = 10**9
SECONDS_PER_MONTH = 365 * 86400 / 12


@dataclass(frozen=True)
class ServicePrice:
    """The price of one ``unit`` of a service."""

    usd: Decimal
    unit: str
    status: str
    source: str
    date: str | None


@cache
def service_prices() -> dict[str, ServicePrice]:
    """Return the shipped table: ``s3_get``, ``s3_put``, ``s3_storage``, ``logs_ingestion``,
    ``alarm_metric``.
    """
    with _TABLE.open(encoding="utf-8", newline="") as file:
        return {
            row["service"]: ServicePrice(
                Decimal(row["usd"]), row["unit"], row["status"], row["source"], row["date"] or None
            )
            for row in csv.DictReader(file)
        }


def checkpoint_bytes(stage: CostStage) -> int | None:
    """Return the bytes of one checkpoint: 16 per parameter; None if the model is unknown."""
    return None if stage.parameters is None else stage.parameters * BYTES_PER_PARAMETER


def blocking_seconds(stage: CostStage, assumed: Assumptions) -> float | None:
    """Seconds that one checkpoint pauses training; None if neither it nor the model is known."""
    if assumed.checkpoint_blocking_seconds is not None:
        return assumed.checkpoint_blocking_seconds
    size = checkpoint_bytes(stage)
    return None if size is None else size / assumed.checkpoint_bytes_per_second


def checkpoint_storage(stage: CostStage, billable_seconds: float) -> Decimal | None:
    """Return the storage cost: checkpoints kept × bytes × stage months × price per GB-month."""
    size = checkpoint_bytes(stage)
    if size is None:
        return None
    gb_months = stage.checkpoints_kept * size / _GB * billable_seconds / SECONDS_PER_MONTH
    return Decimal(gb_months) * service_prices()["s3_storage"].usd


def data_requests(stage: CostStage, assumed: Assumptions) -> Decimal | None:
    """Return the cost of the GET requests that stream every image once per use."""
    if stage.images is None:
        return None
    requests = math.ceil(stage.images * assumed.bytes_per_image / assumed.bytes_per_request)
    return requests * service_prices()["s3_get"].usd


def logs(stage: CostStage, assumed: Assumptions) -> Decimal:
    """Return the cost of ingesting the log lines of all steps into CloudWatch."""
    gigabytes = stage.max_steps * assumed.log_bytes_per_step / _GB
    return Decimal(gigabytes) * service_prices()["logs_ingestion"].usd
