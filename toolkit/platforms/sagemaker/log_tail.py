"""Reads a job's log lines from CloudWatch, once or continuously."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from sm_train.toolkit.aws.cloudwatch_logs import LogEntry, search
from sm_train.toolkit.base.errors import TRANSIENT, UserError
from sm_train.toolkit.records.run_job import RunJob
from sm_train.toolkit.records.training_job import find_job

if TYPE_CHECKING:
    import boto3

_POLL_SECONDS = 5.0
"""Between polls: CloudWatch Logs allows an account about five FilterLogEvents a second."""

_MAX_POLL_SECONDS = 120.0
"""Longest interval between polls after errors."""

_LATE_SECONDS = 60.0
"""How much later than younger lines a line may become visible and still be read.

Later lines are missed. GetLogEvents with the previous token misses some as well
(github.com/aws/aws-sdk-cpp/issues/1073), takes no filter, and needs a call for each node every
time: DescribeLogStreams may report a stream's last event an hour late (CloudWatch Logs API
reference, LogStream; November 2026).
"""


class LogFollower:
    """Polls the new lines of a job since a time (Unix seconds), each line once, also of streams
    that appear later.

    After a transient error ``error`` is set and ``pause``, the seconds until the next poll, grows.
    """

    def __init__(
        self,
        session: boto3.Session,
        job: RunJob,
        since: float,
        *,
        node: int | None = None,
        pattern: str | None = None,
    ) -> None:
        self._session, self._region, self._pattern = session, job.region, pattern
        self._streams = streams_of(job, node)
        self._since = since
        self._seen: dict[str, float] = {}
        """Time of each entry since ``_since`` that was yielded, by its ID."""
        self.pause = _POLL_SECONDS
        self.error: UserError | None = None

    def poll(self) -> Iterator[LogEntry]:
        """Yield the new lines.

        Raises:
            UserError: AWS returns an error that is not transient.
        """
        newest = self._since
        try:
            for entry in search(
                self._session,
                self._streams,
                region=self._region,
                pattern=self._pattern,
                since=self._since,
            ):
                newest = max(newest, entry.time)
                if entry.id not in self._seen:
                    self._seen[entry.id] = entry.time
                    yield entry
        except UserError as error:
            if error.exit_code not in TRANSIENT:
                raise
            # Later pages were not read, so the next poll starts at the same time.
            if self.error is not None:
                self.pause = min(2 * self.pause, _MAX_POLL_SECONDS)
            self.error = error
            return
        self.error, self.pause = None, _POLL_SECONDS
        self._since = max(self._since, newest - _LATE_SECONDS)
        self._seen = {entry: at for entry, at in self._seen.items() if at >= self._since}


def streams_of(job: RunJob, node: int | None = None) -> str:
    """Return the prefix of the job's log streams, or of those of one node."""
    return f"{job.name}/algo-{node}-" if node else f"{job.name}/"


def follow_log(
    session: boto3.Session,
    job: RunJob,
    since: float,
    on_error: Callable[[str], None],
    *,
    node: int | None = None,
) -> Iterator[LogEntry]:
    """Yield the job's lines until it has ended; report failed polls to ``on_error``."""
    follower = LogFollower(session, job, since, node=node)
    while True:
        live = _is_live(session, job)
        yield from follower.poll()
        if follower.error is not None:
            on_error(f"{follower.error}; retrying in {follower.pause:.0f} s")
        elif not live:
            return
        time.sleep(follower.pause)


def _is_live(session: boto3.Session, job: RunJob) -> bool:
    """Return whether the job may still write lines."""
    try:
        newest = find_job(session, job.name, job.region)
    except UserError as error:
        if error.exit_code not in TRANSIENT:
            raise
        return True
    return newest is not None and newest.live
