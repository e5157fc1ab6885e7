"""Stops a run: no work is lost, and no watcher restarts it."""

from __future__ import annotations

import time
from dataclasses import dataclass

from sm_train.toolkit.platforms.placed_run import PlacedRun
from sm_train.toolkit.records.run_job import RunJob

_POLL_SECONDS = 5.0


@dataclass(frozen=True)
class StopResult:
    """The job as it is after the stop; the document of ``stop --json``.

    ``status`` is one of SageMaker's, on every platform. ``warning`` says what was not recorded,
    ``cancelled_by`` is the command that took the job out of its platform's queue.
    """

    training_job_name: str
    stage: str
    status: str
    warning: str | None = None
    cancelled_by: str | None = None

    @property
    def live(self) -> bool:
        """Whether the job is still to save its checkpoint."""
        return self.status in ("InProgress", "Stopping")


def stop(run: PlacedRun, *, wait: bool, cancel: bool = False) -> StopResult:
    """Stop a run after a checkpoint, whichever of its jobs the user named.

    With ``cancel`` its platform also takes it out of the queue.

    Raises:
        UserError: the run has no job, or its platform cannot stop it from here.
    """
    command = run.leave_queue() if cancel else None
    if command is not None and not run.jobs():
        return StopResult(run.name, run.config.stages[0].name, "Stopped", cancelled_by=command)
    job, warning = run.request_stop()
    job = ended(run, job) if wait else job
    warning = warning if command is None else None
    return StopResult(job.name, job.stage, job.status, warning, command)


def pause_after_stage(run: PlacedRun) -> StopResult:
    """Turn off auto-advance: no stage follows the current one.

    Raises:
        UserError: the run has no job, or its stages do not follow each other automatically.
    """
    job = run.pause_after_stage()
    return StopResult(job.name, job.stage, job.status)


def ended(run: PlacedRun, job: RunJob | None = None) -> RunJob:
    """Wait until a job, else the one that the user named or the newest, has ended; return it.

    Raises:
        UserError: the run has no job, or what its platform knows cannot be read.
    """
    job = job or run.newest_job()
    while job.live:
        time.sleep(_POLL_SECONDS)
        job = run.refreshed_job(job)
    return job
