"""Accounts for the billed time of a run's jobs by their events."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

from sm_train.cost.actual_cost import FinishedJob
from sm_train.cost.prices import PriceTable
from sm_train.cost.timeline import Timeline, timeline
from sm_train.toolkit.platforms.placed_run import PlacedRun
from sm_train.toolkit.records.run_job import RunJob


def read_jobs(
    run: PlacedRun, jobs: Sequence[RunJob], prices: PriceTable, now: datetime
) -> list[FinishedJob]:
    """Return each job with its billed seconds up to ``now``, its price and its timeline.

    Raises:
        UserError: what the run's platform knows cannot be read.
    """
    finished: list[FinishedJob] = []
    last_steps: dict[str, int] = {}
    """Stage → its last step so far: the timeline counts steps up to it as repeated."""
    for job in jobs:
        line = _timeline(run, job, last_steps.get(job.stage), now)
        if line is not None:
            last_steps[job.stage] = max(line.last_step, last_steps.get(job.stage, 0))
        instance_type, count = job.instances
        failed = job.status == "Failed"
        finished.append(
            FinishedJob(
                name=job.name,
                stage=job.stage,
                status=job.status,
                instance_type=instance_type,
                instances=count,
                billable_seconds=job.billable_seconds(now),
                retained_seconds=job.retained_seconds(now),
                price=job.price(prices),
                timeline=line,
                infrastructure_failure=failed and run.failed_on_infrastructure(job),
            )
        )
    return finished


def _timeline(
    run: PlacedRun, job: RunJob, previous_step: int | None, now: datetime
) -> Timeline | None:
    if not job.billable_seconds(now):
        return None
    events = list(run.rank_0_events(job))
    return timeline(events, *job.billed_interval(now), previous_step) if events else None
