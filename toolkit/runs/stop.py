"""Stops a run: no work is lost, and no watcher restarts it."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from sm_train.toolkit.errors import UserError
from sm_train.toolkit.jobs.training_job import (
    AUTO_ADVANCE_TAG,
    STOPPED_TAG,
    TrainingJob,
    jobs_of_run,
    refresh,
    stop_job,
    tag_job,
)
from sm_train.toolkit.runs.remediation import USER
from sm_train.toolkit.runs.resolve import ResolvedRun

if TYPE_CHECKING:
    import boto3

_POLL_SECONDS = 5.0


def stop_run(session: boto3.Session, run: ResolvedRun, *, wait: bool) -> TrainingJob:
    """Stop the run and return its newest job as it is afterwards.

    If no job is live, because the last one failed or a stage is done, the newest job is tagged, so
    that no watcher starts the next.

    Raises:
        UserError: the run has no job, or AWS returns an error.
    """
    job = newest_job(session, run)
    if not job.live:
        tag_job(session, job, STOPPED_TAG, USER)
        tag_job(session, job, AUTO_ADVANCE_TAG, "off")
        # A watcher may have started a job just before.
        job = newest_job(session, run)
    # A job that is stopping already keeps its reason.
    if job.live and job.status != "Stopping":
        stop_job(session, job, USER)
    return wait_for_end(session, job) if wait else refresh(session, job)


def wait_for_end(session: boto3.Session, job: TrainingJob) -> TrainingJob:
    """Return the job as it is when it has ended."""
    while (current := refresh(session, job)).live:
        time.sleep(_POLL_SECONDS)
    return current


def pause_after_stage(session: boto3.Session, run: ResolvedRun) -> TrainingJob:
    """Turn off auto-advance: no stage follows the current one."""
    job = newest_job(session, run)
    tag_job(session, job, AUTO_ADVANCE_TAG, "off")
    return job


def newest_job(session: boto3.Session, run: ResolvedRun) -> TrainingJob:
    """Return the run's newest job.

    Raises:
        UserError: it has none.
    """
    return named_job(session, run, None)


def named_job(session: boto3.Session, run: ResolvedRun, name: str | None) -> TrainingJob:
    """Return the run's job called ``name``, or its newest.

    Raises:
        UserError: it has none.
    """
    jobs = jobs_of_run(session, run.name)
    if not jobs:
        raise UserError(f"{run.name}: has no job in {run.region}; `sm-train submit` starts one")
    return next((job for job in jobs if job.name == name), jobs[-1])
