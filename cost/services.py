"""Service costs of a stage: checkpoints in S3, FastFile's requests, log ingestion."""

from __future__ import annotations

import csv
import math
from dataclasses import dataclass
from decimal import Decimal
from functools import cache
from pathlib import Path

from sm_train.cost.assumptions import Assumptions
from sm_train.cost.quantity import Quantity, computed
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
    ``alarm_metric``, ``eks_control_plane``, ``lambda_compute``, ``lambda_request`` and
    ``sqs_request``.
    """
    with _TABLE.open(encoding="utf-8", newline="") as file:
        return {
            row["service"]: ServicePrice(
                Decimal(row["usd"]), row["unit"], row["status"], row["source"], row["date"] or None
            )
            for row in csv.DictReader(file)
        }


def checkpoint_bytes(stage: CostStage) -> int | None:
    """Return the bytes of one checkpoint; None if the model is unknown.

    If the stage does not state them, 16 per parameter: AdamW and an EMA.
    """
    if stage.checkpoint_bytes is not None:
        return stage.checkpoint_bytes
    return None if stage.parameters is None else stage.parameters * BYTES_PER_PARAMETER


CHECKPOINT_STALL_SECONDS = 0.005
"""Pause of a checkpoint whose copy ends before the optimizer changes the weights
(benchmarks/checkpoint.py, 2026-11: 2.6 GB of state)."""

COPY_SLOWDOWN = 0.17
"""Seconds by which a copy of one second delays the pass that it overlaps with: a step of 1.48 s
took 1.56 s with a copy of 0.48 s (benchmarks/checkpoint.py, 2026-11; it shares memory bandwidth on
CPUs, assumed for GPUs)."""


def _stored(stage: CostStage) -> Quantity:
    return Quantity(checkpoint_bytes(stage), "checkpoint bytes", "{:,}")


def blocking(stage: CostStage, assumed: Assumptions) -> Quantity:
    """Return the seconds that one checkpoint delays training; unknown if the model is.

    All ranks divide the copy of the state, also where each holds a replica. The copy overlaps with
    the next step's passes, which it slows down, and delays the optimizer by its remainder.
    """
    if assumed.checkpoint_blocking_seconds is not None:
        stated = assumed.quantity("checkpoint_blocking_seconds")
        return Quantity(
            stated.value, "delay per checkpoint", "{:.3g}", " s", stated.source, parts=(stated,)
        )
    rate = assumed.quantity("checkpoint_bytes_per_second")
    copy = (_stored(stage) / stage.terms["GPUs"] / rate).named("copy", "{:.3g}", " s")
    step = Quantity(1, "1") / stage.terms["it/s"] if stage.speed else Quantity(0.0, "0")
    overlapped = computed(min, "min({}, {})", copy, step).named("overlapped", "{:.3g}", " s")
    stall = Quantity(CHECKPOINT_STALL_SECONDS, "5 ms", "{:g}")
    slowdown = Quantity(COPY_SLOWDOWN, "0.17")
    delay = stall + slowdown * overlapped + copy - overlapped
    return delay.named("delay per checkpoint", "{:.3g}", " s", rate.source)


def background_seconds(stage: CostStage, assumed: Assumptions) -> float:
    """Seconds until a checkpoint is complete in S3; 0 if the model is unknown."""
    share = (checkpoint_bytes(stage) or 0) / stage.instances
    return share / assumed.checkpoint_background_bytes_per_second


def _price(service: str, shown: str = "${}") -> Quantity:
    price = service_prices()[service]
    return Quantity(price.usd, "price", shown, source=price.source)


def upload_cost(stage: CostStage, assumed: Assumptions) -> Quantity:
    """Return the dollars for uploading one checkpoint; transfer within a region is free.

    Each rank uploads its file in parts, with a request to begin and one to complete it if it has
    several, and one rank two small files.
    """
    share = _stored(stage) / stage.terms["GPUs"]
    part_size = assumed.quantity("upload_part_bytes")
    files = computed(_part_requests, "(⌈{} ÷ {}⌉, + 2 if several)", share, part_size)
    requests = stage.terms["GPUs"] * files + Quantity(2, "2")
    price = _price("s3_put", "${:f}")
    return (requests.named("PUT requests", "{:,}") * price).named(
        "upload", "${:,.6f}", source=price.source
    )


def _part_requests(size: float, part_size: float) -> int:
    parts = math.ceil(size / part_size)
    return parts + 2 * (parts > 1)


def checkpoint_storage(stage: CostStage, billable: Quantity) -> Quantity:
    """Return the dollars for storing the kept checkpoints as long as the stage takes."""
    price = _price("s3_storage")
    kept = Quantity(stage.checkpoints_kept, "checkpoints kept")
    gigabytes = _stored(stage) / Quantity(_GB, "10⁹", "{:,}")
    months = billable / Quantity(SECONDS_PER_MONTH, "seconds per month", "{:,.0f}")
    return ((kept * gigabytes * months).exact() * price).named(
        "storage", "${:,.4f}", source=price.source
    )


def data_requests(stage: CostStage, assumed: Assumptions) -> Quantity:
    """Return the dollars for the GET requests that stream every image once per use."""
    price = _price("s3_get", "${:f}")
    images = Quantity(stage.images, "images", "{:,}")
    size, request = assumed.quantity("bytes_per_image"), assumed.quantity("bytes_per_request")
    requests = computed(_requests, "⌈{} × {} ÷ {}⌉", images, size, request)
    return (requests * price).named("requests", "${:,.4f}", source=price.source)


def _requests(images: int, size: float, request: float) -> int:
    return math.ceil(images * size / request)


def logs(stage: CostStage, assumed: Assumptions) -> Quantity:
    """Return the dollars for ingesting the log lines of all steps into CloudWatch."""
    price = _price("logs_ingestion")
    gigabytes = stage.steps * assumed.quantity("log_bytes_per_step") / Quantity(_GB, "10⁹", "{:,}")
    return (gigabytes.exact() * price).named("logs", "${:,.4f}", source=price.source)
