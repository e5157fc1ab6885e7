"""Diagnoses what a user names: a run or job on SageMaker, log files, or a local run's folder."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from sm_train.toolkit.aws.session import session_in_region
from sm_train.toolkit.clusters.cluster_run import ClusterRun
from sm_train.toolkit.diagnose.diagnosis import Diagnosis, diagnose, succeeded
from sm_train.toolkit.diagnose.job_logs import diagnose_job, log_streams, platform_streams
from sm_train.toolkit.diagnose.log_files import attempts, log_files
from sm_train.toolkit.errors import UserError
from sm_train.toolkit.jobs.local_folder import LocalRunFolder
from sm_train.toolkit.jobs.training_job import describe_job
from sm_train.toolkit.targets.resolved_run import find_run, newest_job, open_session_for
from sm_train.toolkit.targets.target import Kind, Target, log_target


def diagnose_targets(targets: Sequence[str], options: dict[str, Any]) -> Diagnosis:
    """Diagnose one job, or the logs of one job's nodes; ``options`` are the global ones.

    A run stands for its newest job, a stage for the newest of its jobs.

    Raises:
        UserError: a file does not exist or holds no log, or AWS returns an error.
    """
    parsed = [log_target(target) for target in targets]
    for target in parsed:
        if len(parsed) > 1 and target.kind is Kind.NAME:
            raise UserError(f"{target.text}: no such file or folder; name a run or job alone")
        if len(parsed) > 1 and target.kind is Kind.RUN_FILE:
            raise UserError(f"{target.text}: names a run; name it alone, or log files")
    if parsed[0].on_sagemaker or parsed[0].root is not None:
        return _diagnose_run(parsed[0], options)
    *earlier, last = attempts(log_files([target.path for target in parsed]))
    return diagnose(last, earlier)


def _diagnose_run(target: Target, options: dict[str, Any]) -> Diagnosis:
    """Diagnose a job, also one that sm-train has not started, or the newest job of a run."""
    if target.kind is Kind.NAME and target.root is None:
        session, _ = open_session_for(target.text, options)
        if describe_job(session, target.text) is not None:
            return diagnose_job(session, target.text)
    found = find_run(target.address, options)
    assert not isinstance(found, LocalRunFolder)
    if isinstance(found, ClusterRun):
        return diagnose_attempts(found)
    job = newest_job(found.session, found.run)
    return diagnose_job(session_in_region(found.session, job.region), job.name)


def diagnose_attempts(run: ClusterRun, name: str | None = None) -> Diagnosis:
    """Diagnose the newest attempt of a run on a cluster, or the one called ``name``.

    Raises:
        UserError: the place of its checkpoints cannot be read, or there is no attempt.
    """
    jobs = run.newest_jobs(time.time())
    number = next((index for index, job in enumerate(jobs) if job.name == name), len(jobs) - 1)
    last = jobs[number]
    if last.status == "Completed":
        return succeeded()
    *earlier, streams = [
        [*log_streams(run, job), *platform_streams(job)]
        for job in jobs[: number + 1]
        if job.stage == last.stage
    ]
    return diagnose(streams, earlier)
