"""What a run has cost so far and will have cost at its end, by the live it/s."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import datetime

from sm_train.cost.estimate import Purchase, hourly_price, money
from sm_train.cost.json_document import as_document
from sm_train.cost.prices import PriceTable
from sm_train.estimators.config.placement import Placement
from sm_train.toolkit.costing.run_price import estimate_run
from sm_train.toolkit.jobs.stage_state import StageState
from sm_train.toolkit.jobs.training_job import TrainingJob


def _job_usd(job: TrainingJob, prices: PriceTable, seconds: float) -> float | None:
    """Dollars of ``seconds`` on the job's machines; None where their price is unknown."""
    machine, count = job.machines
    rate = hourly_price(machine, Purchase(job.region, job.capacity), prices)
    cost = money(seconds, count, rate.usd_per_instance_hour)
    return None if cost is None else float(cost)


def spent_usd(jobs: Iterable[TrainingJob], prices: PriceTable, now: datetime) -> float | None:
    """Billed so far; None where a price is unknown."""
    return _sum(_job_usd(job, prices, job.billable_seconds(now)) for job in jobs)


def known_spent_usd(jobs: Iterable[TrainingJob], prices: PriceTable, now: datetime) -> float:
    """Billed so far at least: the jobs whose price is known."""
    amounts = (_job_usd(job, prices, job.billable_seconds(now)) for job in jobs)
    return sum(amount for amount in amounts if amount is not None)


def projected_usd(
    places: Sequence[Placement],
    stages: Sequence[StageState],
    prices: PriceTable,
    now: datetime,
) -> float | None:
    """At completion: what is spent, what is left at the live it/s of the stage that runs, and the
    estimate of those after it, at the place of ``places`` where the newest job is.
    """
    jobs = sorted((job for stage in stages for job in stage.jobs), key=lambda job: job.created)
    place = places[(jobs[-1].place if jobs else 0) % len(places)]
    left = (_left_usd(places, place, stage, prices) for stage in stages if stage.state != "done")
    return _sum([spent_usd(jobs, prices, now), *left])


def _left_usd(
    places: Sequence[Placement], place: Placement, stage: StageState, prices: PriceTable
) -> float | None:
    seconds = stage.remaining_seconds
    if stage.job is not None and seconds is not None:
        return _job_usd(stage.job, prices, seconds)
    [planned] = [one for one in place.config.stages if one.name == stage.name]
    priced = estimate_run(place.config, place.region, (planned,), stated=places[0].config)
    whole = as_document(priced)["stages"][0]["cost_usd"]
    return None if whole is None else float(whole) * (1.0 - stage.step / stage.max_steps)


def _sum(amounts: Iterable[float | None]) -> float | None:
    known = list(amounts)
    return None if None in known else sum(amount for amount in known if amount is not None)
