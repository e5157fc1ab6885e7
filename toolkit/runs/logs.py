"""Reads the log of a run's job, once or continuously."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from sm_train.toolkit.aws.cloudwatch_logs import LogEntry, search
from sm_train.toolkit.jobs.log_tail import follow_log, streams_of
from sm_train.toolkit.targets.resolved_run import ResolvedRun, newest_job

if TYPE_CHECKING:
    import boto3

_LOGGER = logging.getLogger("sm_train")


def read_logs(
    session: boto3.Session,
    run: ResolvedRun,
    *,
    since: float = 0.0,
    node: int | None = None,
    follow: bool = False,
    on_error: Callable[[str], None] = _LOGGER.warning,
) -> Iterator[LogEntry]:
    """Return the lines of the job that the user named, or of the newest, since a Unix time.

    ``on_error`` is called with each failed poll of ``follow``.

    Raises:
        UserError: the run has no job, or AWS returns an error.
    """
    job = newest_job(session, run)
    if follow:
        return follow_log(session, job, since, on_error, node=node)
    return iter(search(session, streams_of(job, node), region=job.region, since=since))
