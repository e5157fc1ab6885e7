"""The cost of a run: dollars spent, dollars that remain, and their sum, for every command.

What remains is an estimate of the steps that are left, at the newest speed that the stage's jobs
have shown, else at one that `sm-train measure` recorded, else at the plan's. A live job continues
at its step; any other stage starts at its newest stored checkpoint, as the steps after it are lost,
and pays a start-up.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from decimal import Decimal
from typing import TypedDict

from sm_train.cost.estimate import Estimate, money
from sm_train.cost.instances import instance_type
from sm_train.cost.json_document import usd
from sm_train.cost.prices import PriceTable
from sm_train.cost.throughput import Measurement, StageMeasurement
from sm_train.estimators.config.placement import Placement, unique_placements
from sm_train.estimators.config.schema import RunConfig
from sm_train.estimators.config.stage import StageSection
from sm_train.toolkit.planning.price_table import price_table
from sm_train.toolkit.planning.run_price import estimate_steps
from sm_train.toolkit.records.run_job import RunJob
from sm_train.toolkit.records.stage_state import StageState
from sm_train.toolkit.terminal.formatting import format_projection, format_usd


def job_usd(job: RunJob, prices: PriceTable, seconds: float) -> float | None:
    """Return the dollars of ``seconds`` on the job's instances; None if their price is unknown."""
    return _dollars(job, seconds, job.price(prices).usd_per_instance_hour)


def usd_per_hour(job: RunJob) -> float | None:
    """Return the dollars of an hour of a job; None if their price is unknown."""
    return job_usd(job, price_table(), 3600.0)


def job_at_most_usd(job: RunJob, prices: PriceTable, seconds: float) -> float | None:
    """Return the dollars as :func:`job_usd`, or the most they can be if that is all that is known.

    None if the price has no upper bound.
    """
    price = job.price(prices)
    known = price.usd_per_instance_hour
    return _dollars(job, seconds, price.most if known is None else known)


def _dollars(job: RunJob, seconds: float, usd_per_hour: Decimal | None) -> float | None:
    cost = money(seconds, job.instances[1], usd_per_hour)
    return None if cost is None else float(cost)


def spent_usd(jobs: Iterable[RunJob], prices: PriceTable, now: datetime) -> float | None:
    """Return the dollars billed so far; None if a price is unknown."""
    return sum_if_known(job_usd(job, prices, job.billable_seconds(now)) for job in jobs)


def spent_at_most_usd(jobs: Iterable[RunJob], prices: PriceTable, now: datetime) -> float | None:
    """Return the most that was billed so far; None if a price is unknown and has no bound."""
    return sum_if_known(job_at_most_usd(job, prices, job.billable_seconds(now)) for job in jobs)


def counted_usd(jobs: Iterable[RunJob], prices: PriceTable, now: datetime) -> float:
    """Return what counts against a budget: the most of each job whose price has an upper end."""
    amounts = (job_at_most_usd(job, prices, job.billable_seconds(now)) for job in jobs)
    return sum(amount for amount in amounts if amount is not None)


def known_spent_usd(jobs: Iterable[RunJob], prices: PriceTable, now: datetime) -> float:
    """Return the dollars billed so far for the jobs whose price is known."""
    amounts = (job_usd(job, prices, job.billable_seconds(now)) for job in jobs)
    return sum(amount for amount in amounts if amount is not None)


def sum_if_known(amounts: Iterable[float | None]) -> float | None:
    """Return the sum; None if an amount is unknown."""
    values = list(amounts)
    return None if None in values else sum(value for value in values if value is not None)


class ProjectionDocument(TypedDict):
    """A :class:`Projection` in JSON documents; null is unknown."""

    spent_usd: float | None
    remaining_usd: float | None
    projected_usd: float | None


@dataclass(frozen=True)
class Projection:
    """Dollars of a run at one moment; None is unknown.

    ``known_spent_usd`` is the part of ``spent_usd`` with a known price. ``spent_at_most_usd`` is
    ``spent_usd`` with the upper end of each price of which only a range is known, and
    ``counted_usd``, which counts against the budget, is the part of it that is known. ``stages`` is
    what remains of each stage, and ``estimates`` the estimate behind it, for those not yet done.
    """

    spent_usd: float | None
    known_spent_usd: float
    spent_at_most_usd: float | None
    counted_usd: float
    stages: Mapping[str, float | None]
    estimates: Mapping[str, Estimate] = field(default_factory=dict)

    @property
    def remaining_usd(self) -> float | None:
        return sum_if_known(self.stages.values())

    @property
    def total_usd(self) -> float | None:
        return sum_if_known([self.spent_usd, self.remaining_usd])

    @property
    def spent(self) -> str:
        """What was spent, in words."""
        if self.spent_usd is None and self.spent_at_most_usd is not None:
            return f"at most {format_usd(self.spent_at_most_usd)}"
        return format_usd(self.spent_usd)

    def as_dict(self) -> ProjectionDocument:
        return {
            "spent_usd": self.spent_usd,
            "remaining_usd": self.remaining_usd,
            "projected_usd": self.total_usd,
        }

    def __str__(self) -> str:
        return format_projection(self.spent, self.remaining_usd, self.total_usd)


def project(
    config: RunConfig,
    region: str,
    stages: Sequence[StageState],
    now: datetime,
    recorded: Sequence[StageMeasurement] = (),
) -> Projection:
    """Project the cost of a run whose stages are in these states.

    ``now`` is the time by AWS's clock, and ``recorded`` are the speeds that `sm-train measure`
    recorded. The newest speed that a stage's jobs have shown takes precedence, and is carried to
    stages that have no job yet.

    Raises:
        UserError: a figure of the run file is implausible.
    """
    jobs = sorted((job for stage in stages for job in stage.jobs), key=lambda job: job.created)
    prices = price_table()
    measured = list(recorded)
    measured += [speed for stage in stages if (speed := _shown_speed(config, stage)) is not None]
    newest = jobs[-1].placement if jobs else 0
    estimates = {
        stage.name: _remaining(config, region, stage, newest, measured)
        for stage in stages
        if stage.state != "done"
    }
    return Projection(
        spent_usd(jobs, prices, now),
        known_spent_usd(jobs, prices, now),
        spent_at_most_usd(jobs, prices, now),
        counted_usd(jobs, prices, now),
        {
            stage.name: usd(estimates[stage.name].cost) if stage.name in estimates else 0.0
            for stage in stages
        },
        estimates,
    )


def _remaining(
    config: RunConfig,
    region: str,
    stage: StageState,
    placement: int,
    measured: Sequence[StageMeasurement],
) -> Estimate:
    """Estimate what is left of a stage, at its live job's cluster or else at ``placement``."""
    job = stage.job if stage.job is not None and stage.job.live else None
    where = _placement(
        config,
        region,
        placement if job is None else job.placement,
        None if job is None else job.instances[0],
    )
    step = stage.resumes_from if job is None else stage.step
    return estimate_steps(
        where.config,
        where.region,
        where.stage(stage.name),
        max(1, stage.max_steps - step),
        stated=config,
        measured=measured,
        is_running=job is not None and job.started is not None,
    )


def _placement(config: RunConfig, region: str, number: int, type_name: str | None) -> Placement:
    """Return the placement of this number, with the instance type that a job got there."""
    choices = unique_placements(config, region)
    same = [choice for choice in choices if choice.number == number] or [choices[0]]
    matching = (job for job in same if job.config.cluster.instance_type == type_name)
    return next(matching, same[0])


def _shown_speed(config: RunConfig, stage: StageState) -> StageMeasurement | None:
    """Return the newest speed that the stage's jobs have shown; None if it has shown none."""
    shown = stage.shown
    if shown is None:
        return None
    job, (name, count) = shown.job, shown.job.instances
    planned = _planned(config, stage.name)
    world_size = count * instance_type(name).accelerators
    return StageMeasurement(
        stage.name,
        Measurement(
            label=job.name,
            steps_per_second=shown.steps_per_second,
            world_size=world_size,
            resolution=planned.resolution,
            # A job of other instances keeps the effective batch.
            effective_batch_size=planned.per_device_batch_size
            * planned.gradient_accumulation_steps
            * planned.instances
            * instance_type(config.cluster.instance_type).accelerators,
            instance_type=name,
        ),
    )


def _planned(config: RunConfig, name: str) -> StageSection:
    [planned] = [stage for stage in config.stages if stage.name == name]
    return planned
