"""Stops a run: no work is lost, and no watcher restarts it."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from sm_train.toolkit.errors import UserError
from sm_train.toolkit.jobs.training_job import (
    AUTO_ADVANCE_TAG,
    STOPPED_TAG,
    TrainingJob,
    refresh,
    stop_job,
    tag_job,
)
from sm_train.toolkit.runs.remediation import USER
from sm_train.toolkit.targets.resolved_run import ResolvedRun, newest_job

if TYPE_CHECKING:
    import boto3

_POLL_SECONDS = 5.0


@dataclass(frozen=True)
class StopResult:
    """The run's newest job as it is after the stop, and a warning if not all was recorded."""

    job: TrainingJob
    warning: str | None = None


def stop_run(session: boto3.Session, run: ResolvedRun, *, wait: bool) -> StopResult:
    """Stop the run.

    If no job is live, because the last one failed or a stage is done, the newest job is tagged, so
    that no watcher starts the next.

    Raises:
        UserError: the run has no job, or AWS returns an error.
    """
    run = replace(run, stage=None, job=None)  # the run stops, whichever of its jobs was named
    job, not_tagged = newest_job(session, run), None
    if not job.live:
        try:
            tag_job(session, job, STOPPED_TAG, USER)
            tag_job(session, job, AUTO_ADVANCE_TAG, "off")
        except UserError as error:
            not_tagged = error
        # A watcher may have started a job just before.
        job = newest_job(session, run)
    warning = None
    # A job that is stopping already keeps its reason.
    if job.live and job.status != "Stopping":
        warning = stop_job(session, job, USER)
    elif not_tagged is not None:
        raise not_tagged
    return StopResult(wait_for_end(session, job) if wait else refresh(session, job), warning)


def wait_for_end(session: boto3.Session, job: TrainingJob) -> TrainingJob:
    """Return the job as it is when it has ended."""
    while (current := refresh(session, job)).live:
        time.sleep(_POLL_SECONDS)
    return current


def pause_after_stage(session: boto3.Session, run: ResolvedRun) -> TrainingJob:
    """Turn off auto-advance: no stage follows the current one."""
    job = newest_job(session, replace(run, stage=None, job=None))
    tag_job(session, job, AUTO_ADVANCE_TAG, "off")
    return job
