"""Actual cost of a run's jobs, by purpose, and the observations for the next estimate.

Billed dollars of a job = ``BillableTimeInSeconds`` × instances × price (SageMaker API reference,
DescribeTrainingJob).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from statistics import median
from typing import Any

from sm_train.cost.assumptions import Observed
from sm_train.cost.estimate import SECONDS_PER_HOUR, Estimate, money, total, total_money
from sm_train.cost.instances import instance_type
from sm_train.cost.json_document import usd
from sm_train.cost.prices import Price
from sm_train.cost.throughput import Measurement
from sm_train.cost.timeline import PARTS, Timeline

_MILLION = 10**6

_WATERFALL = (*PARTS, "warm_pool", "useful")
"""Purposes of billed dollars."""


@dataclass(frozen=True)
class FinishedJob:
    """One training job of a run.

    ``billable_seconds`` is None if unknown; of these a warm pool has kept the instances for
    ``retained_seconds`` after the job. ``timeline`` is None if the job's event lines are not
    available. ``infrastructure_failure`` is whether it failed because of hardware or AWS, and not
    of its own code or configuration.
    """

    name: str
    stage: str
    status: str
    instance_type: str
    instances: int
    billable_seconds: float | None
    price: Price
    timeline: Timeline | None
    infrastructure_failure: bool = False
    retained_seconds: float = 0.0

    @property
    def billed(self) -> Decimal | None:
        """Dollars."""
        return money(self.billable_seconds, self.instances, self.price.usd_per_instance_hour)

    @property
    def gpu_hours(self) -> float:
        gpus = instance_type(self.instance_type).accelerators * self.instances
        return (self.billable_seconds or 0.0) * gpus / SECONDS_PER_HOUR

    @property
    def waterfall(self) -> dict[str, Decimal | None]:
        """Billed dollars by purpose; they sum to :attr:`billed`. None is unknown."""
        if self.billable_seconds == 0:
            return dict.fromkeys(_WATERFALL, Decimal(0))
        if self.timeline is None:
            return dict.fromkeys(_WATERFALL)
        price, passed = self.price.usd_per_instance_hour, sum(self.timeline.seconds.values())
        # Spot bills fewer seconds than have passed: scale every part equally.
        seconds = (
            None
            if self.billable_seconds is None
            else (self.billable_seconds - self.retained_seconds)
        )
        share = seconds / passed if seconds and passed else 1.0
        parts = {
            name: money(self.timeline.seconds[name] * share, self.instances, price)
            for name in PARTS
        }
        parts["warm_pool"] = money(self.retained_seconds, self.instances, price)
        spent = [part for part in parts.values() if part is not None]
        billed = self.billed
        useful = None if billed is None else billed - sum(spent, Decimal(0))
        return {**parts, "useful": useful}


def as_document(
    jobs: Sequence[FinishedJob],
    expected: Mapping[str, Estimate],
    remaining: Mapping[str, float | None] | None = None,
) -> dict[str, Any]:
    """Return the document of ``cost --actual --json``.

    ``expected`` maps a stage to the estimate of the steps that its jobs have done, ``remaining``
    maps a stage to the dollars of the steps that remain.
    """
    remaining = remaining or {}
    stages = list(dict.fromkeys(job.stage for job in jobs))
    by_stage = [
        _stage(
            name,
            [job for job in jobs if job.stage == name],
            expected.get(name),
            remaining.get(name, 0.0),
        )
        for name in stages
    ]
    group = _group(jobs)
    left = total(list(remaining.values()))
    return {
        "jobs": [_job(job) for job in jobs],
        "stages": by_stage,
        "total": group
        | {
            "remaining_usd": left,
            "projected_usd": total([group["billed_usd"], left]),
            "estimate_usd": total([stage["estimate_usd"] for stage in by_stage]),
            "difference_usd": total([stage["difference_usd"] for stage in by_stage]),
        },
    }


def _job(job: FinishedJob) -> dict[str, Any]:
    return {
        "name": job.name,
        "stage": job.stage,
        "status": job.status,
        "instance_type": job.instance_type,
        "instances": job.instances,
        "billable_seconds": job.billable_seconds,
        "price_per_instance_hour_usd": usd(job.price.usd_per_instance_hour),
        "price_source": job.price.source,
        "billed_usd": usd(job.billed),
        "waterfall_usd": {name: usd(part) for name, part in job.waterfall.items()},
        "steps": job.timeline and job.timeline.last_step - job.timeline.first_step,
        "steps_per_second": job.timeline and job.timeline.steps_per_second,
        "restarts": job.timeline and job.timeline.restarts,
    }


def _stage(
    name: str, jobs: Sequence[FinishedJob], expected: Estimate | None, remaining: float | None
) -> dict[str, Any]:
    group = _group(jobs)
    estimate = None if expected is None else usd(expected.cost)
    billed = group["billed_usd"]
    reached = [job.timeline.last_step for job in jobs if job.timeline]
    return {
        "name": name,
        **group,
        "steps_reached": max(reached, default=None),
        "remaining_usd": remaining,
        "estimate_usd": estimate,
        "estimate_low_usd": None if expected is None else usd(expected.low),
        "estimate_high_usd": None if expected is None else usd(expected.high),
        "difference_usd": None if estimate is None or billed is None else billed - estimate,
    }


def _group(jobs: Sequence[FinishedJob]) -> dict[str, Any]:
    billed = total_money([job.billed for job in jobs])
    waterfall = {part: total_money([job.waterfall[part] for job in jobs]) for part in _WATERFALL}
    images = images_trained(jobs)
    useful = waterfall["useful"]
    return {
        "billable_seconds": total([job.billable_seconds for job in jobs]),
        "billed_usd": usd(billed),
        "billed_at_least_usd": float(sum((job.billed or Decimal(0) for job in jobs), Decimal(0))),
        "waterfall_usd": {part: usd(amount) for part, amount in waterfall.items()},
        "goodput": None if useful is None or not billed else float(useful / billed),
        "images": images,
        "per_million_images_usd": None
        if billed is None or not images
        else float(billed * _MILLION / images),
    }


def images_trained(jobs: Sequence[FinishedJob]) -> int | None:
    """Return the images the weights were trained on; recomputed work counts once."""
    images = 0
    for stage in dict.fromkeys(job.stage for job in jobs):
        lines = [job.timeline for job in jobs if job.stage == stage and job.billable_seconds != 0]
        known = [line for line in lines if line and line.effective_batch_size]
        if len(known) < len(lines):
            return None
        if not known:
            continue
        reached = max(line.last_step for line in known)
        images += (reached - min(line.first_step for line in known)) * (
            known[-1].effective_batch_size or 0
        )
    return images


def observed(jobs: Sequence[FinishedJob]) -> Observed:
    """Return the observations of the jobs for the next estimate.

    A failure is a restart within a job, which SageMaker makes after its own errors only, or a job
    that the infrastructure failed: a mistake in the code says nothing about the machines. Start-up,
    restart, checkpoint and compilation seconds are medians. An estimate adds the compilation to
    start-up and restarts, so they are observed without it.
    """
    lines = [job.timeline for job in jobs if job.timeline]
    trained = [line for line in lines if line.last_step]
    return Observed(
        jobs=len(jobs),
        gpu_hours=sum(job.gpu_hours for job in jobs),
        failures=sum(line.restarts for line in lines)
        + sum(job.infrastructure_failure for job in jobs),
        start_up_seconds=_median(
            [_without(line.seconds["start_up"], line.compile_seconds) for line in trained]
        ),
        restart_seconds=_median(
            [_without(line.restart_seconds, line.compile_seconds) for line in lines]
        ),
        checkpoint_blocking_seconds=_median([line.checkpoint_seconds for line in lines]),
        compile_seconds=_median([line.compile_seconds for line in lines]),
    )


def _without(seconds: float | None, compilation: float | None) -> float | None:
    return None if seconds is None else max(0.0, seconds - (compilation or 0.0))


def measurements(jobs: Sequence[FinishedJob]) -> list[Measurement]:
    """Return the measured speeds of the jobs; the last job of a stage and cluster counts."""
    latest = {
        (job.stage, job.instance_type, job.instances): Measurement(
            label=job.name,
            steps_per_second=job.timeline.steps_per_second,
            world_size=job.timeline.world_size
            or instance_type(job.instance_type).accelerators * job.instances,
            resolution=job.timeline.resolution,
            effective_batch_size=job.timeline.effective_batch_size,
            instance_type=job.instance_type,
            program=job.timeline.program,
        )
        for job in jobs
        if job.timeline and job.timeline.steps_per_second
    }
    return list(latest.values())


def _median(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return median(known) if known else None
