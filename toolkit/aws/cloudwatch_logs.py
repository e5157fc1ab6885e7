"""Reads the CloudWatch logs of training jobs: no line is lost, none is another job's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from sm_train.toolkit.aws.session import translate_aws_errors

LOG_GROUP = "/aws/sagemaker/TrainingJobs"


@dataclass(frozen=True)
class Entry:
    """One message; ``time`` is in Unix seconds, ``id`` is CloudWatch's own and unique."""

    time: float
    stream: str
    message: str
    id: str

    @property
    def host(self) -> str:
        """The machine's name: ``algo-1`` of ``JOB/algo-1-1795260000``."""
        return self.stream.rpartition("/")[2].rpartition("-")[0]


def stream_names(session: Any, job: str) -> list[str]:
    """The job's streams; each instance has one, and a retry adds some."""
    return [stream["logStreamName"] for stream in _streams(session, job)]


def newest_line(session: Any, job: str) -> float | None:
    """When the job last said anything, in Unix seconds; None before its first line."""
    moments = [
        stream["lastEventTimestamp"]
        for stream in _streams(session, job)
        if "lastEventTimestamp" in stream
    ]
    return max(moments) / 1000 if moments else None


def _streams(session: Any, job: str) -> list[dict[str, Any]]:
    """Found by the job's name and a slash: another job's name may begin with this one's."""
    pages = session.client("logs").get_paginator("describe_log_streams")
    found: list[dict[str, Any]] = []
    with translate_aws_errors("DescribeLogStreams"), _no_group_is_no_log():
        for page in pages.paginate(logGroupName=LOG_GROUP, logStreamNamePrefix=f"{job}/"):
            found += page["logStreams"]
    return found


def read_stream(session: Any, name: str) -> Iterator[list[tuple[float, str]]]:
    """A stream from its beginning, in pages of (Unix seconds, message).

    An empty page is not the end: GetLogEvents ends when it answers with the token it was given.
    """
    client = session.client("logs")
    given: dict[str, str] = {}
    while True:
        with translate_aws_errors("GetLogEvents"):
            page = client.get_log_events(
                logGroupName=LOG_GROUP, logStreamName=name, startFromHead=True, **given
            )
        yield [(event["timestamp"] / 1000, event["message"]) for event in page["events"]]
        token = page["nextForwardToken"]
        if token == given.get("nextToken"):
            return
        given = {"nextToken": token}


def search(
    session: Any, streams: str, *, pattern: str | None = None, since: float = 0.0
) -> Iterator[Entry]:
    """What the streams whose names begin with ``streams`` have said since a moment (Unix seconds).

    ``pattern`` is CloudWatch's filter pattern. Of several streams a page is in order of time.
    """
    asked = {"filterPattern": pattern} if pattern else {}
    pages = (
        session.client("logs")
        .get_paginator("filter_log_events")
        .paginate(
            logGroupName=LOG_GROUP,
            logStreamNamePrefix=streams,
            startTime=max(0, int(since * 1000)),
            **asked,
        )
    )
    with translate_aws_errors("FilterLogEvents"), _no_group_is_no_log():
        for page in pages:
            for one in sorted(page["events"], key=lambda one: one["timestamp"]):
                if one["logStreamName"].startswith(streams):
                    yield Entry(
                        one["timestamp"] / 1000,
                        one["logStreamName"],
                        one["message"],
                        one["eventId"],
                    )


@contextmanager
def _no_group_is_no_log() -> Iterator[None]:
    """No log group is there before the account's first job has said something."""
    from botocore.exceptions import ClientError

    try:
        yield
    except ClientError as error:
        if error.response["Error"]["Code"] != "ResourceNotFoundException":
            raise
