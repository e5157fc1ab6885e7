"""``sm-train diagnose``: why a job failed, and which rank failed first."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from sm_train.toolkit.commands._command import command as sm_train_command

if TYPE_CHECKING:
    from sm_train.toolkit.diagnose.diagnosis import Diagnosis


@sm_train_command(
    "sm-train diagnose my-model-512px-2",
    "sm-train diagnose logs/",
    "sm-train diagnose local-runs/my-model",
)
@click.argument("targets", metavar="JOB|FILES...", nargs=-1, required=True)
@click.option("--json", "as_json", is_flag=True, help="Print JSON on standard output.")
@click.pass_obj
def command(options: dict[str, Any], targets: tuple[str, ...], as_json: bool) -> None:
    """Find out why a job failed: cause, first failing rank, evidence and suggested fix.

    FILES are the nodes' logs, one per node (.gz is supported), folders of logs, or a local run's
    folder. JOB is a training job: its log streams and its status are read from AWS.
    """
    from sm_train.toolkit.diagnose import view
    from sm_train.toolkit.jobs.local_folder import local_path
    from sm_train.toolkit.jobs.training_job import is_valid_job_name
    from sm_train.toolkit.terminal.console import write_json

    targets = tuple(local_path(target) for target in targets)
    [name] = targets if len(targets) == 1 else [None]
    if name is not None and not Path(name).exists() and is_valid_job_name(name):
        diagnosis = _diagnose_job(name, options["region"], options["profile"])
    else:
        diagnosis = _diagnose_files([Path(target) for target in targets])
    if as_json:
        write_json(view.document(diagnosis))
    else:
        view.show(diagnosis)


def _diagnose_files(paths: list[Path]) -> Diagnosis:
    from sm_train.toolkit.diagnose.diagnosis import diagnose
    from sm_train.toolkit.diagnose.log_files import attempts, log_files

    *earlier, last = attempts(log_files(paths))
    return diagnose(last, earlier)


def _diagnose_job(name: str, region: str | None, profile: str | None) -> Diagnosis:
    from sm_train.toolkit.aws.session import open_session, resolve_region
    from sm_train.toolkit.diagnose.job_logs import diagnose_job

    return diagnose_job(open_session(profile, resolve_region(region, None, profile)), name)
