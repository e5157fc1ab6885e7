"""Stages into seconds and dollars, with a range and every assumption said.

Billable seconds of a stage = start-up + iterations ÷ it/s + expected restarts × what one loses.
A job is billed from the image's download to its end, per second, for every instance
(``BillableTimeInSeconds × InstanceCount``, SageMaker API reference); waiting for machines is not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from sm_train.cost.prices import Price, training_price
from sm_train.cost.stage import Stage

_SECONDS_PER_HOUR = 3600
_MICRO = Decimal("0.000001")


@dataclass(frozen=True)
class Assumptions:
    """What is taken for granted where nothing was measured."""

    start_up_seconds: float = 600.0
    """Image download and first step of a job; replace it with your own jobs' figure."""
    restart_seconds: float = 900.0
    """Noticing, replacing a machine, starting again: billed, without progress."""
    failures_per_gpu_hour: float = 419 / (16384 * 54 * 24)
    """419 interruptions in 54 days on 16,384 GPUs (The Llama 3 Herd of Models, 2024)."""
    faster: float = 0.05
    """The low end: this much more it/s, and no failure."""
    slower: float = 0.10
    """The high end: this much less it/s, and ``more_failures`` times the failures."""
    more_failures: float = 3.0


@dataclass(frozen=True)
class StageEstimate:
    """One priced stage; None where its it/s or its price is unknown."""

    stage: Stage
    price: Price
    training_seconds: float | None
    start_up_seconds: float
    restart_seconds: float | None
    cost: Decimal | None
    low: Decimal | None
    high: Decimal | None
    breakdown: dict[str, Decimal | None]

    @property
    def overhead_seconds(self) -> float | None:
        return (
            None if self.restart_seconds is None else self.start_up_seconds + self.restart_seconds
        )

    @property
    def billable_seconds(self) -> float | None:
        if self.training_seconds is None or self.overhead_seconds is None:
            return None
        return self.training_seconds + self.overhead_seconds

    @property
    def instance_hours(self) -> float | None:
        if self.billable_seconds is None:
            return None
        return self.billable_seconds * self.stage.instances / _SECONDS_PER_HOUR

    def as_dict(self) -> dict[str, Any]:
        stage, price = self.stage, self.price
        return {
            "name": stage.name,
            "resolution": stage.resolution,
            "instance_type": stage.instance_type,
            "instances": stage.instances,
            "world_size": stage.world_size,
            "effective_batch_size": stage.effective_batch_size,
            "iterations": stage.iterations,
            "iterations_per_second": stage.iterations_per_second,
            "training_seconds": self.training_seconds,
            "overhead_seconds": self.overhead_seconds,
            "billable_seconds": self.billable_seconds,
            "instance_hours": self.instance_hours,
            "price_per_instance_hour_usd": _usd(price.usd_per_instance_hour),
            "price_source": price.source,
            "price_date": price.date,
            "cost_usd": _usd(self.cost),
            "cost_low_usd": _usd(self.low),
            "cost_high_usd": _usd(self.high),
            "breakdown_usd": {name: _usd(part) for name, part in self.breakdown.items()},
        }


@dataclass(frozen=True)
class Estimate:
    """A run's stages, one after another, and what was assumed."""

    stages: tuple[StageEstimate, ...]
    assumptions: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        """The document of ``cost --json``; unknown is None and makes its total None."""
        seconds = [stage.billable_seconds for stage in self.stages]
        return {
            "stages": [stage.as_dict() for stage in self.stages],
            "total": {
                "billable_seconds": _total(seconds),
                "wall_seconds": _total(seconds),
                "instance_hours": _total([stage.instance_hours for stage in self.stages]),
                "cost_usd": _usd(_total_money([stage.cost for stage in self.stages])),
                "cost_low_usd": _usd(_total_money([stage.low for stage in self.stages])),
                "cost_high_usd": _usd(_total_money([stage.high for stage in self.stages])),
                "cost_at_least_usd": _usd(self.known_cost),
            },
            "assumptions": list(self.assumptions),
        }

    @property
    def known_cost(self) -> Decimal:
        """The sum of what is known: a lower bound where something is not."""
        return sum((stage.cost for stage in self.stages if stage.cost is not None), Decimal(0))


def estimate(
    stages: Sequence[Stage],
    *,
    region: str,
    capacity: str = "on-demand",
    assumptions: Assumptions | None = None,
) -> Estimate:
    """Price ``stages`` at the shipped on-demand prices of ``region``.

    Raises:
        UnknownInstanceTypeError: a stage names an instance type that is not in the table.
    """
    assumed = assumptions or Assumptions()
    priced = tuple(
        _price_stage(stage, _price(stage, region, capacity), capacity, assumed) for stage in stages
    )
    return Estimate(priced, tuple(_sentences(priced, capacity, assumed)))


def _price(stage: Stage, region: str, capacity: str) -> Price:
    price = training_price(stage.instance_type, region)
    if capacity != "training-plan":
        return price
    source = "training plan: prepaid, so running costs nothing more"
    return Price(stage.instance_type, region, Decimal(0), "inferred", source, None)


def _price_stage(stage: Stage, price: Price, capacity: str, assumed: Assumptions) -> StageEstimate:
    speed = stage.iterations_per_second
    training = stage.iterations / speed if speed else None
    restarts = _restart_seconds(stage, training, speed, assumed, assumed.failures_per_gpu_hour)
    cost = low = high = None
    if training is not None and restarts is not None and speed is not None:
        start = assumed.start_up_seconds
        cost = _dollars(start + training + restarts, stage, price)
        if capacity != "spot":
            low = _dollars(start + training / (1 + assumed.faster), stage, price)
        longest = training / (1 - assumed.slower)
        rate = assumed.failures_per_gpu_hour * assumed.more_failures
        more = _restart_seconds(stage, longest, speed * (1 - assumed.slower), assumed, rate)
        high = _dollars(start + longest + (more or 0.0), stage, price)
    return StageEstimate(
        stage=stage,
        price=price,
        training_seconds=training,
        start_up_seconds=assumed.start_up_seconds,
        restart_seconds=restarts,
        cost=cost,
        low=low,
        high=high,
        breakdown={
            "training": _dollars(training, stage, price),
            "start_up": _dollars(assumed.start_up_seconds, stage, price),
            "restarts": _dollars(restarts, stage, price),
        },
    )


def _restart_seconds(
    stage: Stage,
    training: float | None,
    speed: float | None,
    assumed: Assumptions,
    failures_per_gpu_hour: float,
) -> float | None:
    """Expected seconds lost to failures: their number × (restart + half a checkpoint interval)."""
    if training is None or speed is None:
        return None
    failures = failures_per_gpu_hour * stage.world_size * training / _SECONDS_PER_HOUR
    half_interval = (stage.checkpoint_every or 0) / speed / 2
    return failures * (assumed.restart_seconds + min(half_interval, training / 2))


def _dollars(seconds: float | None, stage: Stage, price: Price) -> Decimal | None:
    if seconds is None or price.usd_per_instance_hour is None:
        return None
    hours = Decimal(seconds) * stage.instances / _SECONDS_PER_HOUR
    return (hours * price.usd_per_instance_hour).quantize(_MICRO)


def _sentences(priced: Sequence[StageEstimate], capacity: str, assumed: Assumptions) -> list[str]:
    per_1000 = assumed.failures_per_gpu_hour * 24 * 1000
    sentences = [
        f"start-up: {assumed.start_up_seconds:g} s billed for each stage (assumed)",
        f"failures: {per_1000:.2g} in 1,000 GPU-days (The Llama 3 Herd of Models, 2024), each "
        f"losing {assumed.restart_seconds:g} s (assumed) and half a checkpoint interval",
        f"range: it/s {assumed.faster:.0%} higher without failures to {assumed.slower:.0%} lower "
        f"with {assumed.more_failures:g} times the failures (assumed)",
    ]
    if capacity == "spot":
        sentences.append("spot: the on-demand price is an upper bound; spot's own is not known")
    if capacity == "training-plan":
        sentences.append("training plan: its fee is paid beforehand and not in these figures")
    if capacity == "warm-pool":
        sentences.append("warm pool: time that machines are kept after a job is billed on top")
    for one in priced:
        sentences += _unknown(one)
        if one.price.status == "inferred" and capacity != "training-plan":
            name, source = one.stage.instance_type, one.price.source
            sentences.append(f"price of {name} is inferred: {source}")
    return list(dict.fromkeys(sentences))


def _unknown(one: StageEstimate) -> list[str]:
    name = one.stage.name
    sentences = []
    if one.stage.iterations_per_second is None:
        sentences.append(
            f"{name}: no it/s is known, so the total is at least what the others cost "
            "(measure it and write iterations_per_second in the run file)"
        )
    if one.price.usd_per_instance_hour is None:
        sentences.append(
            f"{name}: the price of {one.stage.instance_type} is unknown ({one.price.source}), so "
            "the total is at least what the others cost"
        )
    return sentences


def _total(parts: Sequence[float | None]) -> float | None:
    known = [part for part in parts if part is not None]
    return sum(known) if len(known) == len(parts) else None


def _total_money(parts: Sequence[Decimal | None]) -> Decimal | None:
    known = [part for part in parts if part is not None]
    return sum(known, Decimal(0)) if len(known) == len(parts) else None


def _usd(amount: Decimal | None) -> float | None:
    return None if amount is None else float(amount)
