"""Diagnoses what a user names: a run or a job on any platform, or log files."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sm_train.toolkit.analysis.diagnose.diagnosis import Diagnosis, diagnose, diagnose_logs
from sm_train.toolkit.analysis.diagnose.log_files import log_files
from sm_train.toolkit.base.errors import UserError
from sm_train.toolkit.platforms.adapters import adapters
from sm_train.toolkit.platforms.find_run import find_run, log_target
from sm_train.toolkit.platforms.target import Kind, Target
from sm_train.toolkit.records.job_logs import attempts


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
    if not parsed[0].is_read_as_files:
        return _diagnose_run(parsed[0], options)
    *earlier, last = attempts(log_files([target.path for target in parsed]))
    return diagnose(last, earlier)


def _diagnose_run(target: Target, options: dict[str, Any]) -> Diagnosis:
    """Diagnose the newest job of a run, or a job of which no run is known."""
    try:
        found = find_run(target.address, options)
    except UserError:
        names = [target.text] * (target.kind is Kind.NAME)
        jobs = (adapter.logs_of_job(name, options) for name in names for adapter in adapters())
        if (logs := next(filter(None, jobs), None)) is None:
            raise
        return diagnose_logs(logs)
    return diagnose_logs(found.job_logs(found.newest_job()))
