"""Diagnoses what a user names: a job on SageMaker, log files, or a local run's folder."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from sm_train.toolkit.aws.session import open_session, resolve_region
from sm_train.toolkit.diagnose.diagnosis import Diagnosis, diagnose
from sm_train.toolkit.diagnose.job_logs import diagnose_job
from sm_train.toolkit.diagnose.log_files import attempts, log_files
from sm_train.toolkit.errors import UserError
from sm_train.toolkit.jobs.training_job import is_valid_job_name
from sm_train.toolkit.run_file import RUN_FILE_ENDINGS


def diagnose_targets(
    targets: Sequence[str], *, region: str | None, profile: str | None
) -> Diagnosis:
    """Diagnose one job, or the logs of one job's nodes.

    Raises:
        UserError: a file does not exist or holds no log, or AWS returns an error.
    """
    for target in targets:
        if target.endswith(RUN_FILE_ENDINGS):
            raise UserError(
                f"{target}: is a run file; name a job, its logs or a local run's folder"
            )
    [name] = targets if len(targets) == 1 else [None]
    if name is not None and not Path(name).exists() and is_valid_job_name(name):
        return diagnose_job(open_session(profile, resolve_region(region, None, profile)), name)
    *earlier, last = attempts(log_files([Path(target) for target in targets]))
    return diagnose(last, earlier)
