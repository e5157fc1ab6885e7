"""Reads the CloudWatch logs of training jobs: no line is lost, none belongs to another job.

``region`` is the session's unless given.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sm_train.toolkit.aws.aws_errors import translate_aws_errors

if TYPE_CHECKING:
    import boto3
    from types_boto3_logs.type_defs import LogStreamTypeDef

LOG_GROUP = "/aws/sagemaker/TrainingJobs"


@dataclass(frozen=True)
class LogEntry:
    """One message; ``time`` is in Unix seconds, ``id`` is CloudWatch's unique event ID."""

    time: float
    stream: str
    message: str
    id: str

    @property
    def node(self) -> str:
        """The node's name: ``algo-1`` of ``JOB/algo-1-1795260000``."""
        return self.stream.rpartition("/")[2].rpartition("-")[0]


def stream_names(session: boto3.Session, job: str, *, region: str | None = None) -> list[str]:
    """Return the job's log streams: one for each instance, and more after a retry."""
    return [stream["logStreamName"] for stream in _streams(session, job, region)]


def newest_line(session: boto3.Session, job: str, *, region: str | None = None) -> float | None:
    """Return the time of the job's newest log line in Unix seconds; None before the first."""
    times = [
        stream["lastEventTimestamp"]
        for stream in _streams(session, job, region)
        if "lastEventTimestamp" in stream
    ]
    return max(times) / 1000 if times else None


def _streams(session: boto3.Session, job: str, region: str | None) -> list[LogStreamTypeDef]:
    client = session.client("logs", region_name=region)
    pages = client.get_paginator("describe_log_streams")
    streams: list[LogStreamTypeDef] = []
    with translate_aws_errors("DescribeLogStreams"), _missing_group_is_empty():
        # With the slash: another job's name may begin with this one's.
        for page in pages.paginate(logGroupName=LOG_GROUP, logStreamNamePrefix=f"{job}/"):
            streams += page["logStreams"]
    return streams


def read_stream(
    session: boto3.Session, name: str, *, region: str | None = None
) -> Iterator[list[tuple[float, str]]]:
    """Yield a stream from its beginning, in pages of (Unix seconds, message).

    An empty page is not the end: GetLogEvents ends by returning the token it was given.
    """
    client = session.client("logs", region_name=region)
    continuation: dict[str, str] = {}
    while True:
        with translate_aws_errors("GetLogEvents"):
            page = client.get_log_events(
                logGroupName=LOG_GROUP,
                logStreamName=name,
                startFromHead=True,
                **continuation,  # type: ignore[arg-type]  # a single optional argument
            )
        yield [(event["timestamp"] / 1000, event["message"]) for event in page["events"]]
        token = page["nextForwardToken"]
        if token == continuation.get("nextToken"):
            return
        continuation = {"nextToken": token}


def search(
    session: boto3.Session,
    streams: str,
    *,
    region: str | None = None,
    pattern: str | None = None,
    since: float = 0.0,
) -> Iterator[LogEntry]:
    """Yield the entries since a time (Unix seconds) of the streams whose names begin with
    ``streams``.

    ``pattern`` is a CloudWatch filter pattern. Within a page, entries of several streams are in
    order of time.
    """
    filters: dict[str, Any] = {"filterPattern": pattern} if pattern else {}
    pages = (
        session.client("logs", region_name=region)
        .get_paginator("filter_log_events")
        .paginate(
            logGroupName=LOG_GROUP,
            logStreamNamePrefix=streams,
            startTime=max(0, int(since * 1000)),
            **filters,
        )
    )
    with translate_aws_errors("FilterLogEvents"), _missing_group_is_empty():
        for page in pages:
            for event in sorted(page["events"], key=lambda logged: logged["timestamp"]):
                if event["logStreamName"].startswith(streams):
                    yield LogEntry(
                        event["timestamp"] / 1000,
                        event["logStreamName"],
                        event["message"],
                        event["eventId"],
                    )


@contextmanager
def _missing_group_is_empty() -> Iterator[None]:
    """Treat a missing log group as empty: the account's first job has logged nothing yet."""
    from botocore.exceptions import ClientError

    try:
        yield
    except ClientError as error:
        if error.response["Error"]["Code"] != "ResourceNotFoundException":
            raise
