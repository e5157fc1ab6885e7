"""What a SageMaker Processing job costs: estimated from its speed, and at its time limit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypedDict

from sm_train.cost.prices import PriceTable
from sm_train.estimators.request.processing import ProcessingRequest
from sm_train.toolkit.terminal.formatting import format_duration, format_usd

START_SECONDS = 300.0
"""Assumed start-up time: pulling the container image and installing packages."""


@dataclass(frozen=True)
class ProcessingCost:
    """Estimated and maximum cost of all instances in US dollars; None if unknown.

    ``seconds`` is the estimated duration of the job.
    """

    usd_per_hour: float | None
    seconds: float | None
    usd: float | None
    max_usd: float | None
    source: str


class CostDocument(TypedDict):
    """The cost in the output of a command with ``--on sagemaker --dry-run``."""

    cost_usd: float | None
    cost_limit_usd: float | None
    seconds: float | None
    price_per_instance_hour_usd: float | None
    price_source: str


def cost_document(cost: ProcessingCost) -> CostDocument:
    """Return a cost as JSON values."""
    return {
        "cost_usd": cost.usd,
        "cost_limit_usd": cost.max_usd,
        "seconds": cost.seconds,
        "price_per_instance_hour_usd": cost.usd_per_hour,
        "price_source": cost.source,
    }


def estimate_cost(
    request: ProcessingRequest, work_seconds: float | None, table: PriceTable, region: str
) -> ProcessingCost:
    """Return the cost of ``work_seconds`` after the start, if known, and that at the time limit."""
    cluster = request["ProcessingResources"]["ClusterConfig"]
    limit = request["StoppingCondition"]["MaxRuntimeInSeconds"]
    price = table.processing_price(cluster["InstanceType"], region)
    hourly = price.usd_per_instance_hour
    if hourly is None:
        return ProcessingCost(None, None, None, None, price.source)
    seconds = None if work_seconds is None else min(START_SECONDS + work_seconds, limit)
    per_second = float(hourly) * cluster["InstanceCount"] / 3600
    return ProcessingCost(
        float(hourly),
        seconds,
        None if seconds is None else per_second * seconds,
        per_second * limit,
        price.source,
    )


def describe_job(request: ProcessingRequest, cost: ProcessingCost, assumption: str) -> str:
    """Return a line with the instances, the time limit and the cost.

    ``assumption`` is the speed that the estimated cost is based on.
    """
    cluster = request["ProcessingResources"]["ClusterConfig"]
    limit = format_duration(request["StoppingCondition"]["MaxRuntimeInSeconds"])
    instances = f"{cluster['InstanceCount']} × {cluster['InstanceType']} for at most {limit}"
    return f"{instances}; {_format_cost(cost, assumption)}"


def _format_cost(cost: ProcessingCost, assumption: str) -> str:
    if cost.usd_per_hour is None or cost.max_usd is None:
        return f"cost unknown: {cost.source} (get it from AWS with `sm-train cost --refresh`)"
    estimate = ""
    if cost.usd is not None and cost.seconds is not None:
        duration = format_duration(cost.seconds)
        estimate = f"about {format_usd(cost.usd)} for {duration}, if {assumption}; "
    price = f"${cost.usd_per_hour:.4f} per instance-hour, {cost.source}"
    return f"{estimate}at most {format_usd(cost.max_usd)} ({price})"
