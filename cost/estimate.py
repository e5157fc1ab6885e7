"""Billable seconds and dollars of a run's stages, with a range and the assumptions behind them.

Billable seconds of a stage = start-up + steps ÷ it/s + checkpoints × blocking + evaluation
+ expected failures × (restart + half a checkpoint interval). SageMaker bills a job from the image
download to its end, per second, for every instance (``BillableTimeInSeconds × InstanceCount``,
SageMaker API reference); waiting for capacity is not billed.

Money is decimal, and a stage's cost is the exact sum of its parts; JSON documents hold floats.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from decimal import Decimal
from functools import cached_property

from sm_train.cost import services
from sm_train.cost.assumptions import SPOT_RATE_PER_INSTANCE_HOUR, Assumptions
from sm_train.cost.failures import daly_interval, lost_per_failure
from sm_train.cost.instances import is_own_machine
from sm_train.cost.prices import (
    KINDS,
    ON_DEMAND,
    SAVINGS_PLANS,
    SPOT,
    TRAINING_PLAN,
    Price,
    PriceTable,
    shipped_prices,
)
from sm_train.cost.quantity import Quantity, computed, rounded_down, sum_of
from sm_train.cost.stage import CostStage
from sm_train.cost.uncertainty import Range, Risk, ranges

CAPACITIES = ("on-demand", "spot", "warm-pool", "training-plan")
SECONDS_PER_HOUR = 3600

INSTANCE_PARTS = ("training", "start_up", "checkpoints", "evaluation", "restarts", "warm_pool")
SERVICE_PARTS = ("storage", "uploads", "requests", "logs")


@dataclass(frozen=True)
class Purchase:
    """Where and how instances are bought.

    ``capacity`` is the run file's; ``kind`` is the price's (a Savings Plan pays for on-demand
    capacity).

    Raises:
        ValueError: no such capacity or kind, or a kind that does not fit the capacity.
    """

    region: str
    capacity: str = "on-demand"
    kind: str = ON_DEMAND

    def __post_init__(self) -> None:
        if self.capacity not in CAPACITIES:
            raise ValueError(f"capacity: {self.capacity!r} is not one of {', '.join(CAPACITIES)}")
        if self.kind not in KINDS:
            raise ValueError(f"purchase: {self.kind!r} is not one of {', '.join(KINDS)}")
        if self.kind in SAVINGS_PLANS and self.capacity in ("spot", "training-plan"):
            raise ValueError(f"purchase: {self.kind} does not apply to capacity {self.capacity}")

    @property
    def is_spot(self) -> bool:
        """Whether instances can be reclaimed."""
        return SPOT in (self.capacity, self.kind)

    @property
    def price_kind(self) -> str:
        """The kind of the price."""
        if self.is_spot:
            return SPOT
        return TRAINING_PLAN if self.capacity == TRAINING_PLAN else self.kind


@dataclass(frozen=True)
class Seconds:
    """Billable seconds of a stage by purpose; None is unknown.

    ``overhead`` is everything but training, and ``billable`` both, without the warm pool that is
    billed after the job.
    """

    training: float | None
    start_up: float
    checkpoints: float
    evaluation: float
    restarts: float | None
    warm_pool: float
    overhead: float | None
    billable: float | None


SECONDS = tuple(field.name for field in fields(Seconds))


@dataclass(frozen=True)
class CheckpointInterval:
    """The configured checkpoint interval compared with the best one (Daly, 2006)."""

    seconds: float
    best_seconds: float
    best_steps: int
    extra: Decimal | None
    """Dollars by which the configured interval is more expensive than the best one."""


@dataclass(frozen=True)
class StageEstimate:
    """One priced stage; None where its it/s or its price is unknown.

    ``terms`` are all its numbers with their derivations, by name, in the order of derivation.
    """

    stage: CostStage
    price: Price
    terms: dict[str, Quantity]
    seconds_range: Range | None = None
    low: Decimal | None = None
    high: Decimal | None = None

    @property
    def failures(self) -> float | None:
        """The expected number of interruptions."""
        return self.terms["failures"].number

    @cached_property
    def seconds(self) -> Seconds:
        return Seconds(**{purpose: self.terms[purpose].value for purpose in SECONDS})

    @cached_property
    def breakdown(self) -> dict[str, Decimal | None]:
        """Dollars by purpose and service."""
        parts = (*INSTANCE_PARTS, *SERVICE_PARTS)
        return {part: self.terms[f"{part} $"].value for part in parts if f"{part} $" in self.terms}

    @property
    def cost(self) -> Decimal | None:
        return self.terms["cost"].usd

    @property
    def known_cost(self) -> Decimal:
        """The cost, or a lower bound of it: the sum of the known parts at the least price."""
        if self.cost is not None:
            return self.cost
        known = sum((part for part in self.breakdown.values() if part is not None), Decimal(0))
        if self.price.usd_per_instance_hour is not None:
            return known
        billable = self.seconds.billable
        seconds = None if billable is None else billable + self.seconds.warm_pool
        return known + (money(seconds, self.stage.instances, self.price.least) or Decimal(0))

    @property
    def job_at_most(self) -> Decimal | None:
        """The instances of one job that runs until its limit; None if limit or price is unknown.

        All attempts of a job that SageMaker retries share the limit (API reference,
        StoppingCondition).
        """
        limit = self.stage.max_runtime_seconds
        seconds = None if limit is None else limit + self.stage.keep_alive_seconds
        return money(seconds, self.stage.instances, self.price.most)

    @property
    def instance_hours(self) -> float | None:
        billable = self.seconds.billable
        return None if billable is None else billable * self.stage.instances / SECONDS_PER_HOUR


@dataclass(frozen=True)
class Estimate:
    """A run's priced stages, one after another, with purchase and assumptions."""

    stages: tuple[StageEstimate, ...]
    purchase: Purchase
    assumed: Assumptions
    seconds_range: Range | None
    low: Decimal | None
    high: Decimal | None

    @property
    def cost(self) -> Decimal | None:
        return total_money([stage.cost for stage in self.stages])

    @property
    def at_most(self) -> Decimal | None:
        """The cost if no stage makes progress: its most jobs in a row, each until its limit."""
        jobs = [stage.job_at_most for stage in self.stages]
        return total_money(
            [
                None if job is None else job * priced_stage.stage.max_jobs
                for job, priced_stage in zip(jobs, self.stages, strict=True)
            ]
        )

    @property
    def known_cost(self) -> Decimal:
        """The sum of the known parts: a lower bound if one is unknown."""
        return sum((stage.known_cost for stage in self.stages), Decimal(0))


def estimate(
    stages: Sequence[CostStage],
    purchase: Purchase,
    *,
    assumed: Assumptions | None = None,
    prices: PriceTable | None = None,
) -> Estimate:
    """Estimate ``stages``, bought as ``purchase``, with ``prices`` (default: the shipped table).

    Raises:
        UnknownInstanceTypeError: a stage names an instance type that is not in the table.
    """
    assumed, table = assumed or Assumptions(), prices or shipped_prices()
    priced = [
        price_stage(stage, hourly_price(stage.instance_type, purchase, table), purchase, assumed)
        for stage in stages
    ]
    return _with_ranges(priced, purchase, assumed)


def hourly_price(instance_type: str, purchase: Purchase, table: PriceTable) -> Price:
    """Return the price of an instance-hour of ``instance_type``, bought as ``purchase``."""
    return table.price(instance_type, purchase.region, purchase.price_kind)


def failures_per_second(stage: CostStage, purchase: Purchase, assumed: Assumptions) -> float:
    """Return the interruptions per second of the whole cluster."""
    rate: float = _failure_rate(stage, purchase, assumed).value
    return rate * stage.world_size / SECONDS_PER_HOUR


def _failure_rate(stage: CostStage, purchase: Purchase, assumed: Assumptions) -> Quantity:
    """Interruptions per GPU-hour: hardware failures and, on spot, reclaimed instances."""
    rate = assumed.quantity("failures_per_gpu_hour")
    if purchase.is_spot:
        reclaimed = Quantity(SPOT_RATE_PER_INSTANCE_HOUR, "reclaimed instances per hour", "{:.3g}")
        rate += reclaimed / Quantity(stage.instance.accelerators, "GPUs per instance")
    return rate.named("failure rate", "{:.3g}", " per GPU-hour", assumed.source(rate.name))


def _checkpoint_steps(stage: CostStage, assumed: Assumptions) -> Quantity:
    """Steps between checkpoints; a failure never loses more than the whole stage."""
    steps = min(stage.checkpoint_every or assumed.checkpoint_every, stage.max_steps)
    return Quantity(steps, "checkpoint_every", "{:,.0f}")


def _interval(stage: CostStage, assumed: Assumptions) -> Quantity:
    """Seconds between two checkpoints."""
    interval = stage.terms["training"] * _checkpoint_steps(stage, assumed) / stage.steps
    return interval.named("interval", "{:,.1f}", " s")


def price_stage(
    stage: CostStage, price: Price, purchase: Purchase, assumed: Assumptions
) -> StageEstimate:
    """Estimate one stage with the closed formula, without a range."""
    terms = stage.terms | stage_seconds(stage, purchase, assumed)
    hourly = Quantity(
        price.usd_per_instance_hour,
        "price",
        "${:,.6f}",
        source=f"{price.source}, {price.date or 'undated'}",
    )
    instances = Quantity(stage.instances, "instances")
    terms["$/h"] = (instances * hourly).named("$/h", "${:,.4f}", source=hourly.source)
    dollars = {
        f"{part} $": computed(money, "{} × {} × {} ÷ 3600", terms[part], instances, hourly)
        for part in INSTANCE_PARTS
    }
    dollars |= _service_dollars(stage, terms["billable"], assumed)
    for name, amount in dollars.items():
        source = amount.source
        terms[name] = amount.named(name, "${:,.4f}", source=source)
    paid = [terms[name] for name, amount in dollars.items() if amount.value != 0]
    terms["cost"] = sum_of(paid or [terms["training $"]]).named("cost", "${:,.4f}")
    return StageEstimate(stage, price, terms)


def stage_cost(
    stage: CostStage, price: Price, purchase: Purchase, assumed: Assumptions
) -> tuple[float | None, Decimal | None]:
    """Return a stage's billable seconds and dollars."""
    priced = price_stage(stage, price, purchase, assumed)
    return priced.seconds.billable, priced.cost


def stage_seconds(
    stage: CostStage, purchase: Purchase, assumed: Assumptions
) -> dict[str, Quantity]:
    """Return the seconds by purpose and what they follow from; see :class:`Seconds`."""
    training, delay = stage.terms["training"], services.blocking(stage, assumed)
    start_up = _start(stage, assumed, "start_up")
    evaluation = _as_seconds("evaluation", assumed.quantity("evaluation_seconds"))
    count = rounded_down(stage.steps / _checkpoint_steps(stage, assumed)).named(
        "checkpoints written", "{:,}"
    )
    known = delay if delay.value is not None else Quantity(0.0, "0")
    checkpoints = (count * known).named("checkpoints", "{:,.1f}", " s", delay.source)
    rate, hour = _failure_rate(stage, purchase, assumed), Quantity(SECONDS_PER_HOUR, "3600")
    running = training + checkpoints + evaluation
    failures = (rate * stage.terms["GPUs"] * running / hour).named(
        "failures", "{:.3g}", source=rate.source
    )
    restart, interval = _start(stage, assumed, "restart"), _interval(stage, assumed)
    per_second = failures_per_second(stage, purchase, assumed)
    lost = computed(
        lambda seconds, between: lost_per_failure(seconds, between, per_second),
        "{} + {} ÷ 2, and repeated failures (Daly, 2006)",
        restart,
        interval,
    ).named("lost per failure", "{:,.1f}", " s", restart.source)
    restarts = (failures * lost).named("restarts", "{:,.1f}", " s")
    overhead = (start_up + checkpoints + evaluation + restarts).named("overhead", "{:,.1f}", " s")
    billable = (training + overhead).named("billable", "{:,.1f}", " s")
    days = (billable / Quantity(86400, "86,400", "{:,}")).named("days", "{:.4g}")
    warm_pool = Quantity(stage.keep_alive_seconds, "warm_pool", "{:,.1f}", " s", "run file")
    derived = [
        *(start_up, delay, count, checkpoints, evaluation, rate, failures, interval, lost),
        *(restarts, overhead, billable, days, warm_pool),
    ]
    return {term.name: term for term in derived}


def _start(stage: CostStage, assumed: Assumptions, name: str) -> Quantity:
    """Seconds until a job trains, from its ``start_up`` or a ``restart``, and compiles again."""
    start = assumed.quantity(f"{name}_seconds")
    if stage.compiled:
        total = start + assumed.quantity("compile_seconds")
        return total.named(name, "{:,.1f}", " s", start.source)
    return _as_seconds(name, start)


def _as_seconds(name: str, assumption: Quantity) -> Quantity:
    return Quantity(assumption.value, name, "{:,.1f}", " s", assumption.source, (assumption,))


def _service_dollars(
    stage: CostStage, billable: Quantity, assumed: Assumptions
) -> dict[str, Quantity]:
    """Return the cost of S3 and CloudWatch; parts that need an unknown model are left out."""
    dollars: dict[str, Quantity] = {}
    if stage.parameters is not None:
        dollars["storage $"] = services.checkpoint_storage(stage, billable)
        upload = services.upload_cost(stage, assumed)
        written = rounded_down(stage.steps / _checkpoint_steps(stage, assumed))
        dollars["uploads $"] = replace(upload * written, source=upload.source)
    if stage.images is not None:
        dollars["requests $"] = services.data_requests(stage, assumed)
    if not is_own_machine(stage.instance_type):
        dollars["logs $"] = services.logs(stage, assumed)
    return dollars


def checkpoint_interval(
    stage_estimate: StageEstimate, purchase: Purchase, assumed: Assumptions
) -> CheckpointInterval | None:
    """Compare the configured checkpoint interval with the best one.

    Both are judged by their waste: training × (c ÷ τ + failures per second × τ ÷ 2) for an interval
    τ and the seconds c that a checkpoint costs: its blocking, and what its upload costs in S3 as
    seconds of the cluster. The best one lasts until a checkpoint is complete, at least, and as long
    as the stage, at most. None without failures, blocking or a known speed.
    """
    stage, training = stage_estimate.stage, stage_estimate.seconds.training
    rate = failures_per_second(stage, purchase, assumed)
    blocking = services.blocking(stage, assumed).number
    if training is None or not rate or not blocking:
        return None
    cluster = _dollars_per_second(stage_estimate, stage_estimate.price.usd_per_instance_hour)
    upload = float(services.upload_cost(stage, assumed).usd or 0)
    cost = blocking + (upload / cluster if cluster else 0.0)

    def waste(interval: float) -> float:
        return training * (cost / interval + rate * interval / 2)

    configured: float = _interval(stage, assumed).value
    least = services.background_seconds(stage, assumed)
    best = min(max(daly_interval(cost, 1 / rate), least), training)
    steps = min(stage.max_steps, max(1, round(best / training * stage.max_steps)))
    extra = max(0.0, waste(configured) - waste(best))
    return CheckpointInterval(
        seconds=configured,
        best_seconds=best,
        best_steps=steps,
        extra=_dollars(extra, stage, stage_estimate.price),
    )


def _with_ranges(priced: list[StageEstimate], purchase: Purchase, assumed: Assumptions) -> Estimate:
    """Add ranges to the stages and to the total; None if a speed or a price is unknown."""
    risks = [_risk(stage_estimate, purchase, assumed) for stage_estimate in priced]
    known = [risk for risk in risks if risk is not None]
    if not known:
        return Estimate(tuple(priced), purchase, assumed, None, None, None)
    pairs = [
        (stage_estimate, risk)
        for stage_estimate, risk in zip(priced, risks, strict=True)
        if risk is not None
    ]
    high = [
        _dollars_per_second(stage_estimate, stage_estimate.price.most)
        for stage_estimate, _ in pairs
    ]
    low = [
        _dollars_per_second(stage_estimate, stage_estimate.price.least)
        for stage_estimate, _ in pairs
    ]
    total_range = ranges(known, low, high)
    seconds = iter(total_range.stages)
    ranged = tuple(
        stage_estimate if risk is None else _ranged(stage_estimate, next(seconds))
        for stage_estimate, risk in zip(priced, risks, strict=True)
    )
    if len(known) < len(priced) or any(stage_estimate.high is None for stage_estimate in ranged):
        return Estimate(ranged, purchase, assumed, None, None, None)
    fixed = sum((_fixed_dollars(stage_estimate) for stage_estimate in ranged), Decimal(0))
    return Estimate(
        ranged,
        purchase,
        assumed,
        total_range.seconds,
        Decimal(total_range.low) + fixed,
        Decimal(total_range.high) + fixed,
    )


def _risk(stage_estimate: StageEstimate, purchase: Purchase, assumed: Assumptions) -> Risk | None:
    stage, speed, seconds = stage_estimate.stage, stage_estimate.stage.speed, stage_estimate.seconds
    if speed is None or seconds.training is None:
        return None
    return Risk(
        training=seconds.training,
        slow_factor=speed.steps_per_second / speed.low,
        fast_factor=speed.steps_per_second / speed.high,
        basis=speed.basis,
        fixed=seconds.checkpoints + seconds.evaluation,
        start_up=seconds.start_up,
        start_up_spread=assumed.start_up_spread,
        failures_per_second=failures_per_second(stage, purchase, assumed),
        failure_spread=assumed.failure_spread,
        restart=_start(stage, assumed, "restart").value,
        interval=_interval(stage, assumed).value,
    )


def _ranged(stage_estimate: StageEstimate, seconds: Range) -> StageEstimate:
    fixed = _fixed_dollars(stage_estimate)
    low = money(seconds.low, stage_estimate.stage.instances, stage_estimate.price.least)
    high = money(seconds.high, stage_estimate.stage.instances, stage_estimate.price.most)
    return replace(
        stage_estimate,
        seconds_range=seconds,
        low=None if low is None else low + fixed,
        high=None if high is None else high + fixed,
    )


def _fixed_dollars(stage_estimate: StageEstimate) -> Decimal:
    """Dollars that the draws do not vary: warm pool and services."""
    names = ("warm_pool", *SERVICE_PARTS)
    return sum((stage_estimate.breakdown.get(name) or Decimal(0) for name in names), Decimal(0))


def _dollars_per_second(stage_estimate: StageEstimate, price: Decimal | None) -> float:
    return float(price or 0) * stage_estimate.stage.instances / SECONDS_PER_HOUR


def _dollars(seconds: float | None, stage: CostStage, price: Price) -> Decimal | None:
    return money(seconds, stage.instances, price.usd_per_instance_hour)


def money(
    seconds: float | None, instances: int, usd_per_instance_hour: Decimal | None
) -> Decimal | None:
    """Seconds × instances × dollars per hour ÷ 3600; None if one is unknown."""
    if seconds is None or usd_per_instance_hour is None:
        return None
    return Decimal(seconds) * instances * usd_per_instance_hour / SECONDS_PER_HOUR


def total(parts: Sequence[float | None]) -> float | None:
    """Return the sum, or None if a part is unknown."""
    known = [part for part in parts if part is not None]
    return sum(known) if len(known) == len(parts) else None


def total_money(parts: Sequence[Decimal | None]) -> Decimal | None:
    """Return the sum, or None if a part is unknown."""
    known = [part for part in parts if part is not None]
    return sum(known, Decimal(0)) if len(known) == len(parts) else None
