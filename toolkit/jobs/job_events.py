"""Reads the event lines of a training job from CloudWatch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from sm_train.toolkit.aws.cloudwatch_logs import search
from sm_train.toolkit.jobs.event_lines import Event, parse_events

if TYPE_CHECKING:
    import boto3


def job_events(session: boto3.Session, name: str, region: str | None = None) -> Iterator[Event]:
    """Yield the events of a job's rank 0 from all of its log streams; ``region`` is the session's
    unless given.
    """
    entries = search(session, f"{name}/", region=region, pattern='"SMT "')
    events = parse_events(entry.message for entry in entries)
    return (event for event in events if event["rank"] == 0)
