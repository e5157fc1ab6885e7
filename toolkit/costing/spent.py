"""What a run's jobs have cost so far."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime
from decimal import Decimal

from sm_train.cost.estimate import money
from sm_train.cost.prices import PriceTable
from sm_train.toolkit.costing.price_table import price_table
from sm_train.toolkit.jobs.run_job import RunJob


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
