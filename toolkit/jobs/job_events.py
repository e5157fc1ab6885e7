"""The training jobs of a run, as SageMaker and their event lines tell of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import datetime
from typing import Any

from sm_train.cost.actual_cost import FinishedJob
from sm_train.cost.estimate import Purchase, hourly_price
from sm_train.cost.prices import PriceTable
from sm_train.cost.timeline import Timeline, timeline
from sm_train.toolkit.aws.cloudwatch_logs import search
from sm_train.toolkit.aws.session import for_region
from sm_train.toolkit.jobs.events import Event, parse_events
from sm_train.toolkit.jobs.training_job import TrainingJob


def read_jobs(
    session: Any, jobs: Sequence[TrainingJob], prices: PriceTable, now: datetime
) -> list[FinishedJob]:
    """Each job with its billed seconds up to ``now``, its price and what its lines account for."""
    read: list[FinishedJob] = []
    reached: dict[str, int] = {}
    for one in jobs:
        line = _timeline(for_region(session, one.region), one, reached.get(one.stage), now)
        if line is not None:
            reached[one.stage] = max(line.last_step, reached.get(one.stage, 0))
        machine, count = one.machines
        read.append(
            FinishedJob(
                name=one.name,
                stage=one.stage,
                status=one.status,
                instance_type=machine,
                instances=count,
                billable_seconds=one.billable_seconds(now),
                price=hourly_price(machine, Purchase(one.region, one.capacity), prices),
                timeline=line,
            )
        )
    return read


def _timeline(
    session: Any, one: TrainingJob, previous_step: int | None, now: datetime
) -> Timeline | None:
    if not one.billable_seconds(now):
        return None
    events = list(job_events(session, one.name))
    if not events:
        return None
    return timeline(events, *one.window(now), previous_step)


def job_events(session: Any, name: str) -> Iterator[Event]:
    """The event lines of a job's first rank, from all of its log streams."""
    said = search(session, f"{name}/", pattern='"SMT "')
    return (event for event in parse_events(one.message for one in said) if event["rank"] == 0)
