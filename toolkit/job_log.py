"""A job's log lines from CloudWatch, once or as they come."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from sm_train.entrypoints.events import PREFIX
from sm_train.toolkit.aws import refusals_in_words
from sm_train.toolkit.live_events import LOG_GROUP
from sm_train.toolkit.training_jobs import find_job

_ASK_SECONDS = 5.0
"""Between two questions: CloudWatch Logs allows an account about five FilterLogEvents a second."""

_LATE_SECONDS = 60.0
"""A line may become visible so much later than lines that are younger."""


@dataclass(frozen=True)
class Line:
    """One line; ``time`` is in Unix seconds, ``node`` is ``algo-1`` and so on."""

    time: float
    node: str
    text: str
    id: str


def read_log(session: Any, job: str, stream: str, since: float) -> Iterator[Line]:
    """The lines there are now of the streams that begin with ``stream``, since ``since``.

    An empty page is not the end, and a retry adds streams: both are CloudWatch's to say.
    """
    from botocore.exceptions import ClientError

    pages = (
        session.client("logs")
        .get_paginator("filter_log_events")
        .paginate(
            logGroupName=LOG_GROUP, logStreamNamePrefix=stream, startTime=max(0, int(since * 1000))
        )
    )
    with refusals_in_words("FilterLogEvents"):
        try:
            for page in pages:
                for entry in page["events"]:
                    name = entry["logStreamName"].removeprefix(f"{job}/")
                    node = name.rpartition("-")[0] or name
                    text = entry["message"].rstrip("\n")
                    yield Line(entry["timestamp"] / 1000, node, text, entry["eventId"])
        except ClientError as error:
            if error.response["Error"]["Code"] != "ResourceNotFoundException":
                raise


def follow_log(session: Any, job: str, stream: str, since: float) -> Iterator[Line]:
    """As :func:`read_log`, and what comes until the job has ended."""
    shown: dict[str, float] = {}
    while True:
        found = find_job(session, job)
        live = found is not None and found.live
        newest = since
        for line in read_log(session, job, stream, since):
            newest = max(newest, line.time)
            if line.id not in shown:
                shown[line.id] = line.time
                yield line
        if not live:
            return
        since = max(since, newest - _LATE_SECONDS)
        shown = {line: at for line, at in shown.items() if at >= since}
        time.sleep(_ASK_SECONDS)


def show_line(line: Line, *, raw: bool, as_json: bool) -> None:
    """Print a line; events have a readable twin, so they are left out unless ``raw``."""
    import json

    if PREFIX + "{" in line.text and not raw:
        return
    text = f"{line.node} | {line.text}"
    if as_json:
        text = json.dumps({"time": line.time, "node": line.node, "text": line.text})
    sys.stdout.write(text + "\n")
    sys.stdout.flush()
