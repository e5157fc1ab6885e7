"""A job's log lines from CloudWatch, once or as they come."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from typing import Any

from sm_train.entrypoints.events import PREFIX
from sm_train.toolkit.cloudwatch_logs import Entry, search
from sm_train.toolkit.training_jobs import find_job

_ASK_SECONDS = 5.0
"""Between two questions: CloudWatch Logs allows an account about five FilterLogEvents a second."""

_LATE_SECONDS = 60.0
"""A line may become visible so much later than lines that are younger."""


def follow_log(session: Any, job: str, streams: str, since: float) -> Iterator[Entry]:
    """What the streams that begin with ``streams`` say, and what comes until the job has ended."""
    shown: dict[str, float] = {}
    while True:
        found = find_job(session, job)
        live = found is not None and found.live
        newest = since
        for line in search(session, streams, since=since):
            newest = max(newest, line.time)
            if line.id not in shown:
                shown[line.id] = line.time
                yield line
        if not live:
            return
        since = max(since, newest - _LATE_SECONDS)
        shown = {line: at for line, at in shown.items() if at >= since}
        time.sleep(_ASK_SECONDS)


def show_line(line: Entry, *, raw: bool, as_json: bool) -> None:
    """Print a line; events have a readable twin, so they are left out unless ``raw``."""
    text = line.message.rstrip("\n")
    if PREFIX + "{" in text and not raw:
        return
    node = line.stream.rpartition("/")[2].rpartition("-")[0]
    shown = f"{node} | {text}"
    if as_json:
        shown = json.dumps({"time": line.time, "node": node, "text": text})
    sys.stdout.write(shown + "\n")
    sys.stdout.flush()
