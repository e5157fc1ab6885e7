"""Stops a run: no work is lost, and no watcher restarts it."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from sm_train.toolkit.clusters.cluster_job import ClusterJob
from sm_train.toolkit.clusters.cluster_run import ClusterRun
from sm_train.toolkit.costing.spent import usd_per_hour
from sm_train.toolkit.errors import UserError
from sm_train.toolkit.jobs.local_folder import LocalRunFolder, read_stages
from sm_train.toolkit.jobs.run_job import RunJob
from sm_train.toolkit.jobs.stage_state import current
from sm_train.toolkit.jobs.training_job import (
    AUTO_ADVANCE_TAG,
    STOPPED_TAG,
    refresh,
    stop_job,
    tag_job,
)
from sm_train.toolkit.runs.logs import reject_options
from sm_train.toolkit.runs.remediation import USER
from sm_train.toolkit.targets.resolved_run import FoundRun, ResolvedRun, RunOnSageMaker, newest_job

if TYPE_CHECKING:
    import boto3

_POLL_SECONDS = 5.0


@dataclass(frozen=True)
class StopResult:
    """The job or local stage as it is after the stop; the document of ``stop --json``.

    ``status`` is SageMaker's, also for a local run. ``warning`` says what was not recorded.
    """

    training_job_name: str | None
    stage: str
    status: str
    warning: str | None = None

    @property
    def live(self) -> bool:
        """Whether the job is still to save its checkpoint."""
        return self.status in ("InProgress", "Stopping")


@dataclass(frozen=True)
class EndedJob:
    """What a job or a local run ended as: its name, SageMaker's status and the reason, if any."""

    name: str
    status: str
    reason: str | None


def stop(run: FoundRun, *, wait: bool) -> StopResult:
    """Stop a run after a checkpoint; a local one as Ctrl-C does.

    Nodes of a cluster receive a stored request with their next heartbeat.

    Raises:
        UserError: the run has no job, AWS returns an error, or a local run's process cannot be
            interrupted from here.
    """
    if isinstance(run, LocalRunFolder):
        run.interrupt()
        if wait:
            run.wait()
        return StopResult(None, run.stages[-1].name, _local_status(run))
    if isinstance(run, ClusterRun):
        return _stop_on_cluster(run, wait=wait)
    return _stop_on_sagemaker(run.session, run.run, wait=wait)


def _stop_on_cluster(run: ClusterRun, *, wait: bool) -> StopResult:
    job, warning = run.newest_jobs(time.time())[-1], None
    if job.live and job.status != "Stopping":
        run.request_stop(job.stage, "sm-train stop")
        job = _refreshed(run, job)
    elif job.may_start_again:
        run.request_stop(job.stage, "sm-train stop")
        command = run.command("cancel") or run.command("stop")
        # Whether it waits in a queue, only the platform knows.
        warning = f"it may still wait in the platform's queue: `{command}` takes it out of it"
    while wait and job.live:
        time.sleep(_POLL_SECONDS)
        job = _refreshed(run, job)
    return StopResult(job.name, job.stage, job.status, warning)


def _refreshed(run: ClusterRun, job: ClusterJob) -> ClusterJob:
    """Return the newest attempt of the job's stage, as it is now stored."""
    return run.refreshed().jobs(job.stage, time.time())[-1]


def pause_after_stage(run: FoundRun) -> StopResult:
    """Turn off auto-advance: no stage follows the current one.

    Raises:
        UserError: the run has no job, AWS returns an error, or it is not on SageMaker.
    """
    if not isinstance(run, RunOnSageMaker):
        reject_options(run, after_stage=True)
        raise AssertionError
    job = newest_job(run.session, replace(run.run, stage=None, job=None))
    tag_job(run.session, job, AUTO_ADVANCE_TAG, "off")
    return StopResult(job.name, job.stage, job.status)


def wait_for_end(run: FoundRun) -> EndedJob:
    """Wait until the job that the user named, or the newest, has ended.

    Raises:
        UserError: the run has no job, or AWS returns an error.
    """
    if isinstance(run, LocalRunFolder):
        run.wait()
        return EndedJob(str(run.target), _local_status(run), "failed; diagnose() returns the cause")
    if isinstance(run, ClusterRun):
        attempt = run.newest_jobs(time.time())[-1]
        while attempt.live:
            time.sleep(_POLL_SECONDS)
            attempt = _refreshed(run, attempt)
        return EndedJob(attempt.name, attempt.status, attempt.failure_reason)
    job = _ended(run.session, newest_job(run.session, run.run))
    return EndedJob(job.name, job.status, job.failure_reason)


def _local_status(run: LocalRunFolder) -> str:
    """Return "Stopping" while the run trains, then "Completed", "Failed" or "Stopped"."""
    if run.is_training():
        return "Stopping"
    stage = current(read_stages(run))
    if stage is None:
        return "Completed"
    return "Failed" if stage.state == "failed" else "Stopped"


def _stop_on_sagemaker(session: boto3.Session, run: ResolvedRun, *, wait: bool) -> StopResult:
    """Stop the run.

    If no job is live, because the last one failed or a stage is done, the newest job is tagged, so
    that no watcher starts the next.

    Raises:
        UserError: the run has no job, or AWS returns an error.
    """
    run = replace(run, stage=None, job=None)  # the run stops, whichever of its jobs was named
    job: RunJob = newest_job(session, run)
    not_tagged = None
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
        warning = stop_job(session, job, USER, usd_per_hour=usd_per_hour(job))
    elif not_tagged is not None:
        raise not_tagged
    job = _ended(session, job) if wait else refresh(session, job)
    return StopResult(job.name, job.stage, job.status, warning)


def _ended(session: boto3.Session, job: RunJob) -> RunJob:
    """Return the job as it is when it has ended."""
    while (current := refresh(session, job)).live:
        time.sleep(_POLL_SECONDS)
    return current
