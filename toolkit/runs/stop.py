"""Ends a run's live job so that nothing is lost and nobody starts it again by mistake."""

from __future__ import annotations

import time
from typing import Any

from sm_train.toolkit.errors import UserError
from sm_train.toolkit.jobs.training_job import (
    CHAIN_TAG,
    STOPPED_TAG,
    TrainingJob,
    again,
    jobs_of_run,
    stop_job,
    tag_job,
)
from sm_train.toolkit.runs.remediation import USER
from sm_train.toolkit.runs.resolve import Run

_ASK_SECONDS = 5.0


def stop_run(session: Any, run: Run, *, wait: bool) -> TrainingJob:
    """Stop the run; returns its newest job as it is then.

    Where no job is live, because the last one failed or a stage is done, the newest is marked, so
    that no watcher starts the next.

    Raises:
        UserError: the run has no job, or AWS refuses.
    """
    job = newest_job(session, run)
    if not job.live:
        tag_job(session, job, STOPPED_TAG, USER)
        tag_job(session, job, CHAIN_TAG, "off")
        # A watcher may have been quicker by a moment.
        job = newest_job(session, run)
    # One that is stopping already keeps its reason.
    if job.live and job.status != "Stopping":
        stop_job(session, job, USER)
    after = again(session, job)
    while wait and after.live:
        time.sleep(_ASK_SECONDS)
        after = again(session, job)
    return after


def pause_after_stage(session: Any, run: Run) -> TrainingJob:
    """Let no stage follow the one that runs."""
    job = newest_job(session, run)
    tag_job(session, job, CHAIN_TAG, "off")
    return job


def newest_job(session: Any, run: Run) -> TrainingJob:
    """The run's newest job.

    Raises:
        UserError: it has none.
    """
    return named_job(session, run, None)


def named_job(session: Any, run: Run, name: str | None) -> TrainingJob:
    """The run's job of that name, or its newest.

    Raises:
        UserError: it has none.
    """
    jobs = jobs_of_run(session, run.name)
    if not jobs:
        raise UserError(f"{run.name}: has no job in {run.region}; `sm-train submit` starts one")
    return next((job for job in jobs if job.name == name), jobs[-1])
