"""What a job has said lately: its newest event lines, without reading weeks of log."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from sm_train.toolkit.aws import refusals_in_words
from sm_train.toolkit.event_log import Event, parse_event

LOG_GROUP = "/aws/sagemaker/TrainingJobs"

_WINDOW_SECONDS = 1800.0
"""How far before its newest line a job's last words are looked for: several logging intervals."""


@dataclass(frozen=True)
class LastWords:
    """Of one job, by its own clock in Unix seconds; None where it has not said that yet.

    ``sign`` is when any of its processes last took a step, saved, evaluated or started.
    """

    step: int | None = None
    iterations_per_second: float | None = None
    loss: float | None = None
    sign: float | None = None
    ended: str | None = None
    """Why training ended, once it has."""


def last_words(session: Any, job: str) -> LastWords:
    """Read the job's newest lines.

    Raises:
        UserError: AWS refuses.
    """
    newest = newest_line(session, job)
    if newest is None:
        return LastWords()
    return digest(events_since(session, job, newest - _WINDOW_SECONDS))


def digest(events: Iterator[Event]) -> LastWords:
    """The state that ``events``, in any order, come to."""
    step = speed = loss = sign = ended = None
    at = -1.0
    for event in events:
        kind, moment = event["kind"], float(event["time"])
        if kind in ("start", "step", "checkpoint", "eval", "end", "epoch"):
            sign = max(sign or moment, moment)
        elif kind == "heartbeat" and event["seconds_since_step"] is not None:
            # A heartbeat goes on while training hangs: what counts is the step it tells of.
            sign = max(sign or 0.0, moment - float(event["seconds_since_step"]))
        if kind == "step" and moment >= at:
            at, step = moment, int(event["step"])
            speed, loss = event["iterations_per_second"], event["loss"]
        if kind == "end":
            ended = str(event["reason"])
            step = max(step or 0, int(event["step"]))
    return LastWords(step, speed, loss, sign, ended)


def newest_line(session: Any, job: str) -> float | None:
    """When the job last said anything, in Unix seconds; None before its first line."""
    from botocore.exceptions import ClientError

    client = session.client("logs")
    with refusals_in_words("DescribeLogStreams"):
        try:
            pages = client.get_paginator("describe_log_streams").paginate(
                logGroupName=LOG_GROUP, logStreamNamePrefix=f"{job}/"
            )
            moments = [
                stream["lastEventTimestamp"]
                for page in pages
                for stream in page["logStreams"]
                if "lastEventTimestamp" in stream
            ]
        except ClientError as error:
            if error.response["Error"]["Code"] != "ResourceNotFoundException":
                raise
            return None
    return max(moments) / 1000 if moments else None


def events_since(session: Any, job: str, moment: float) -> Iterator[Event]:
    """The event lines of all streams of the job since ``moment`` (Unix seconds)."""
    pages = (
        session.client("logs")
        .get_paginator("filter_log_events")
        .paginate(
            logGroupName=LOG_GROUP,
            logStreamNamePrefix=f"{job}/",
            filterPattern='"SMT "',
            startTime=int(moment * 1000),
        )
    )
    with refusals_in_words("FilterLogEvents"):
        for page in pages:
            for entry in page["events"]:
                event = parse_event(entry["message"])
                if event is not None:
                    yield event
