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
    ``alarm_metric``, ``eks_control_plane``.
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


def copy_seconds(stage: CostStage, assumed: Assumptions) -> float | None:
    """Return the seconds of a GPU's copy of its share of the state; None if the model is unknown.

    All ranks divide the state, also where each holds a replica.
    """
    size = checkpoint_bytes(stage)
    if size is None:
        return None
    return size / stage.world_size / assumed.checkpoint_bytes_per_second


def blocking_seconds(stage: CostStage, assumed: Assumptions) -> float | None:
    """Seconds that one checkpoint delays training; None if neither it nor the model is known.

    The copy overlaps with the next step's passes, which it slows down, and delays the optimizer by
    what remains of it then.
    """
    if assumed.checkpoint_blocking_seconds is not None:
        return assumed.checkpoint_blocking_seconds
    copy = copy_seconds(stage, assumed)
    if copy is None:
        return None
    step = 0.0 if stage.speed is None else 1 / stage.speed.steps_per_second
    overlapped = min(copy, step)
    return CHECKPOINT_STALL_SECONDS + COPY_SLOWDOWN * overlapped + copy - overlapped


def background_seconds(stage: CostStage, assumed: Assumptions) -> float:
    """Seconds until a checkpoint is complete in S3; 0 if the model is unknown."""
    share = (checkpoint_bytes(stage) or 0) / stage.instances
    return share / assumed.checkpoint_background_bytes_per_second


def upload_requests(stage: CostStage, assumed: Assumptions) -> int:
    """Return the PUT requests of one checkpoint: parts of each rank's file, and two small files.

    A multipart upload adds a request to begin and one to complete it.
    """
    share = (checkpoint_bytes(stage) or 0) / stage.world_size
    parts = math.ceil(share / assumed.upload_part_bytes)
    return stage.world_size * (parts + 2 * (parts > 1)) + 2


def upload_cost(stage: CostStage, assumed: Assumptions) -> Decimal | None:
    """Return the cost of uploading one checkpoint; transfer within a region is free.

    None if the model is unknown.
    """
    if stage.parameters is None:
        return None
    return upload_requests(stage, assumed) * service_prices()["s3_put"].usd


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
