"""Reads the event lines of training jobs, and accounts for their billed time by them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, TypeVar

from sm_train.cost.actual_cost import FinishedJob
from sm_train.cost.prices import PriceTable
from sm_train.cost.timeline import Timeline, timeline
from sm_train.toolkit.aws.cloudwatch_logs import search
from sm_train.toolkit.jobs.event_lines import Event, parse_events
from sm_train.toolkit.jobs.run_job import RunJob

if TYPE_CHECKING:
    import boto3

_Job = TypeVar("_Job", bound=RunJob)


def read_jobs(
    jobs: Sequence[_Job],
    events_of: Callable[[_Job], Iterable[Event]],
    prices: PriceTable,
    now: datetime,
    failed_on_infrastructure: Callable[[_Job], bool],
) -> list[FinishedJob]:
    """Return each job with its billed seconds up to ``now``, its price and its timeline.

    ``events_of`` reads the events of a job's rank 0, and ``failed_on_infrastructure`` diagnoses a
    failed job.
    """
    finished: list[FinishedJob] = []
    last_steps: dict[str, int] = {}
    """Stage → its last step so far: the timeline counts steps up to it as repeated."""
    for job in jobs:
        line = _timeline(events_of, job, last_steps.get(job.stage), now)
        if line is not None:
            last_steps[job.stage] = max(line.last_step, last_steps.get(job.stage, 0))
        instance_type, count = job.instances
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
                infrastructure_failure=job.status == "Failed" and failed_on_infrastructure(job),
            )
        )
    return finished


def _timeline(
    events_of: Callable[[_Job], Iterable[Event]],
    job: _Job,
    previous_step: int | None,
    now: datetime,
) -> Timeline | None:
    if not job.billable_seconds(now):
        return None
    events = list(events_of(job))
    if not events:
        return None
    return timeline(events, *job.billed_interval(now), previous_step)


def job_events(session: boto3.Session, name: str, region: str | None = None) -> Iterator[Event]:
    """Yield the events of a job's rank 0 from all of its log streams; ``region`` is the session's
    unless given.
    """
    entries = search(session, f"{name}/", region=region, pattern='"SMT "')
    events = parse_events(entry.message for entry in entries)
    return (event for event in events if event["rank"] == 0)
