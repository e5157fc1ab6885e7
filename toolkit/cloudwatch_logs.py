"""Reads the CloudWatch logs of training jobs, without losing lines and without being throttled."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from sm_train.toolkit.aws import refusals_in_words

LOG_GROUP = "/aws/sagemaker/TrainingJobs"


def _client(session: Any) -> Any:
    """A client that slows down when told so: about 5 to 10 calls a second are allowed."""
    from botocore.config import Config

    return session.client("logs", config=Config(retries={"mode": "adaptive", "max_attempts": 10}))


def stream_names(session: Any, job: str) -> list[str]:
    """The job's streams; each instance has one, and a retry adds some.

    Found by the job's name and a slash: another job's name may begin with this one's.
    """
    pages = _client(session).get_paginator("describe_log_streams")
    found = []
    with refusals_in_words("DescribeLogStreams"), _no_group_is_no_log():
        for page in pages.paginate(logGroupName=LOG_GROUP, logStreamNamePrefix=f"{job}/"):
            found += [stream["logStreamName"] for stream in page["logStreams"]]
    return found


def read_stream(session: Any, name: str) -> Iterator[list[tuple[float, str]]]:
    """A stream from its beginning, in pages of (Unix seconds, message).

    An empty page is not the end: GetLogEvents ends when it answers with the token it was given.
    """
    client = _client(session)
    given: dict[str, str] = {}
    while True:
        with refusals_in_words("GetLogEvents"):
            page = client.get_log_events(
                logGroupName=LOG_GROUP, logStreamName=name, startFromHead=True, **given
            )
        yield [(event["timestamp"] / 1000, event["message"]) for event in page["events"]]
        token = page["nextForwardToken"]
        if token == given.get("nextToken"):
            return
        given = {"nextToken": token}


def search(session: Any, job: str, pattern: str) -> Iterator[str]:
    """The messages of all of a job's streams that match a CloudWatch filter pattern."""
    pages = (
        _client(session)
        .get_paginator("filter_log_events")
        .paginate(logGroupName=LOG_GROUP, logStreamNamePrefix=f"{job}/", filterPattern=pattern)
    )
    with refusals_in_words("FilterLogEvents"), _no_group_is_no_log():
        for page in pages:
            for entry in page["events"]:
                if entry["logStreamName"].startswith(f"{job}/"):
                    yield entry["message"]


@contextmanager
def _no_group_is_no_log() -> Iterator[None]:
    """No log group is there before the account's first job has said something."""
    from botocore.exceptions import ClientError

    try:
        yield
    except ClientError as error:
        if error.response["Error"]["Code"] != "ResourceNotFoundException":
            raise
