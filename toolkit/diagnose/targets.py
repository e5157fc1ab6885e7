"""Diagnoses what a user names: a run or job on SageMaker, log files, or a local run's folder."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sm_train.toolkit.aws.session import session_in_region
from sm_train.toolkit.diagnose.diagnosis import Diagnosis, diagnose
from sm_train.toolkit.diagnose.job_logs import diagnose_job
from sm_train.toolkit.diagnose.log_files import attempts, log_files
from sm_train.toolkit.errors import UserError
from sm_train.toolkit.jobs.training_job import describe_job
from sm_train.toolkit.targets.resolved_run import newest_job, open_run, open_session_for
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
    if parsed[0].on_sagemaker:
        return _diagnose_on_sagemaker(parsed[0], options)
    *earlier, last = attempts(log_files([target.path for target in parsed]))
    return diagnose(last, earlier)


def _diagnose_on_sagemaker(target: Target, options: dict[str, Any]) -> Diagnosis:
    """Diagnose a job, also one that sm-train has not started, or the newest job of a run."""
    session, _ = open_session_for(target.text, options)
    if target.kind is Kind.NAME and describe_job(session, target.text) is not None:
        return diagnose_job(session, target.text)
    session, run = open_run(target.text, options)
    job = newest_job(session, run)
    return diagnose_job(session_in_region(session, job.region), job.name)
