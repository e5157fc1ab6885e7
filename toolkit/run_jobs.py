"""The training jobs of a run, as SageMaker and their event lines tell of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import datetime
from typing import Any

from sm_train.cost.actual import Job
from sm_train.cost.estimate import Purchase, hourly_price
from sm_train.cost.prices import PriceTable
from sm_train.cost.timeline import Timeline, timeline
from sm_train.toolkit.aws import refusals_in_words
from sm_train.toolkit.event_log import Event, parse_event
from sm_train.toolkit.live_events import LOG_GROUP
from sm_train.toolkit.training_jobs import TrainingJob


def read_jobs(
    session: Any, jobs: Sequence[TrainingJob], region: str, prices: PriceTable, now: datetime
) -> list[Job]:
    """Each job with its billed seconds up to ``now``, its price and what its lines account for."""
    read: list[Job] = []
    reached: dict[str, int] = {}
    for one in jobs:
        line = _timeline(session, one, reached.get(one.stage), now)
        if line is not None:
            reached[one.stage] = max(line.last_step, reached.get(one.stage, 0))
        machine, count = one.machines
        read.append(
            Job(
                name=one.name,
                stage=one.stage,
                status=one.status,
                instance_type=machine,
                instances=count,
                billable_seconds=one.billable_seconds(now),
                price=hourly_price(machine, Purchase(region, one.capacity), prices),
                timeline=line,
            )
        )
    return read


def _timeline(
    session: Any, one: TrainingJob, previous_step: int | None, now: datetime
) -> Timeline | None:
    billable = one.billable_seconds(now)
    if not billable:
        return None
    events = list(job_events(session, one.name))
    if not events:
        return None
    end = (one.ended or now).timestamp()
    begin = end - billable
    if one.spot and one.started is not None:
        begin = one.started.timestamp()
    return timeline(events, begin, end, previous_step)


def job_events(session: Any, name: str) -> Iterator[Event]:
    """The event lines of a job's first rank, from all of its log streams.

    Streams are found by the job's prefix, since a retry adds some; an empty page is not the end.
    """
    from botocore.exceptions import ClientError

    client = session.client("logs")
    pages = client.get_paginator("filter_log_events").paginate(
        logGroupName=LOG_GROUP,
        logStreamNamePrefix=f"{name}/",
        filterPattern='"SMT "',
    )
    with refusals_in_words("FilterLogEvents"):
        try:
            for page in pages:
                for entry in page["events"]:
                    if not entry["logStreamName"].startswith(f"{name}/"):
                        continue
                    event = parse_event(entry["message"])
                    if event is not None and event["rank"] == 0:
                        yield event
        except ClientError as error:
            if error.response["Error"]["Code"] != "ResourceNotFoundException":
                raise
