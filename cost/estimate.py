"""Stages into seconds and dollars, with a range and every assumption said.

Money is decimal, and a stage's cost is the very sum of its parts; it becomes a float in documents.
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

CAPACITIES = ("on-demand", "spot", "warm-pool", "training-plan")
_SECONDS_PER_HOUR = 3600


@dataclass(frozen=True)
class Assumptions:
    """What is taken for granted where nothing was measured."""

    start_up_seconds: float = 600.0
    """Image download and first step of a job; replace it with your own jobs' figure."""
    restart_seconds: float = 900.0
    """Noticing, replacing a machine, starting again: billed, without progress."""
    checkpoint_every: int = 1000
    """Iterations between checkpoints of a stage that states none: the run file's default."""
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
    start_up_seconds: float
    restart_seconds: float | None
    cost: Decimal | None
    low: Decimal | None
    high: Decimal | None
    breakdown: dict[str, Decimal | None]

    @property
    def overhead_seconds(self) -> float | None:
        return _total([self.start_up_seconds, self.restart_seconds])

    @property
    def billable_seconds(self) -> float | None:
        return _total([self.stage.training_seconds, self.overhead_seconds])

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
            "training_seconds": stage.training_seconds,
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
        return _known(self.stages)


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
        ValueError: ``capacity`` is none of :data:`CAPACITIES`.
    """
    if capacity not in CAPACITIES:
        raise ValueError(f"capacity: {capacity!r} is not one of {', '.join(CAPACITIES)}")
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
    start, training = assumed.start_up_seconds, stage.training_seconds
    restarts = low = high = None
    if training is not None:
        rate = assumed.failures_per_gpu_hour
        restarts = _restart_seconds(stage, training, assumed, rate)
        if capacity != "spot":
            low = start + training / (1 + assumed.faster)
        longest = training / (1 - assumed.slower)
        more = _restart_seconds(stage, longest, assumed, rate * assumed.more_failures)
        high = start + longest + more
    parts = {"training": training, "start_up": start, "restarts": restarts}
    breakdown = {name: _dollars(seconds, stage, price) for name, seconds in parts.items()}
    return StageEstimate(
        stage=stage,
        price=price,
        start_up_seconds=start,
        restart_seconds=restarts,
        cost=_total_money(list(breakdown.values())),
        low=_dollars(low, stage, price),
        high=_dollars(high, stage, price),
        breakdown=breakdown,
    )


def _restart_seconds(
    stage: Stage, training: float, assumed: Assumptions, failures_per_gpu_hour: float
) -> float:
    """Expected seconds lost to failures: their number × (restart + half a checkpoint interval).

    ``training`` is the seconds that the stage's iterations take without a failure.
    """
    failures = failures_per_gpu_hour * stage.world_size * training / _SECONDS_PER_HOUR
    interval = min(stage.checkpoint_every or assumed.checkpoint_every, stage.iterations)
    half_interval = training * interval / stage.iterations / 2
    return failures * (assumed.restart_seconds + half_interval)


def _dollars(seconds: float | None, stage: Stage, price: Price) -> Decimal | None:
    if seconds is None or price.usd_per_instance_hour is None:
        return None
    return Decimal(seconds) * stage.instances * price.usd_per_instance_hour / _SECONDS_PER_HOUR


def _sentences(priced: Sequence[StageEstimate], capacity: str, assumed: Assumptions) -> list[str]:
    per_1000 = assumed.failures_per_gpu_hour * 24 * 1000
    interval = ""
    if any(one.stage.checkpoint_every is None for one in priced):
        interval = f" ({assumed.checkpoint_every:,} iterations where none is stated)"
    sentences = [
        f"start-up: {assumed.start_up_seconds:g} s billed for each stage (assumed)",
        f"failures: {per_1000:.2g} in 1,000 GPU-days (The Llama 3 Herd of Models, 2024), each "
        f"losing {assumed.restart_seconds:g} s (assumed) and half a checkpoint interval{interval}",
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
        if one.price.status == "inferred" and capacity != "training-plan":
            sentences.append(f"price of {one.stage.instance_type} is {one.price.source}")
    sentences += _unknown(priced)
    return list(dict.fromkeys(sentences))


def _unknown(priced: Sequence[StageEstimate]) -> list[str]:
    """Why the total is only a lower bound: one sentence for each thing that is not known."""
    known = _known(priced)
    least = f"at least ${known:,.2f}" if known else "total unknown"
    speeds = [
        f"{least}: stage {one.stage.name} has no known it/s (measure it there; give "
        "iterations_per_second in the run file, or --its)"
        for one in priced
        if one.stage.iterations_per_second is None
    ]
    prices = [
        f"{least}: the price of {one.stage.instance_type} (stage {one.stage.name}) is unknown: "
        f"{one.price.source}"
        for one in priced
        if one.price.usd_per_instance_hour is None
    ]
    return speeds + prices


def _known(priced: Sequence[StageEstimate]) -> Decimal:
    return sum((one.cost for one in priced if one.cost is not None), Decimal(0))


def _total(parts: Sequence[float | None]) -> float | None:
    known = [part for part in parts if part is not None]
    return sum(known) if len(known) == len(parts) else None


def _total_money(parts: Sequence[Decimal | None]) -> Decimal | None:
    known = [part for part in parts if part is not None]
    return sum(known, Decimal(0)) if len(known) == len(parts) else None


def _usd(amount: Decimal | None) -> float | None:
    return None if amount is None else float(amount)
