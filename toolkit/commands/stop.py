"""``sm-train stop``: stops a run after a checkpoint; nothing is billed until it is resumed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click
from sm_train.toolkit.commands._command import command as sm_train_command

if TYPE_CHECKING:
    from sm_train.toolkit.jobs.local_folder import LocalRunFolder


@sm_train_command(
    "sm-train stop my-model",
    "sm-train stop run.yaml --after-stage",
    "sm-train stop local-runs/my-model --wait",
)
@click.argument("run", metavar="RUN|JOB|FOLDER")
@click.option("--after-stage", is_flag=True, help="Finish the current stage and start no other.")
@click.option("--wait", is_flag=True, help="Return when the job has ended.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON on standard output.")
@click.pass_obj
def command(
    options: dict[str, Any], run: str, after_stage: bool, wait: bool, as_json: bool
) -> None:
    """Stop a run's live job after it has saved a checkpoint; `resume` continues at that step.

    SageMaker grants 120 seconds for the checkpoint. With --after-stage, a run that was started
    with `submit --auto-advance` pauses between two stages. A local run stops as with Ctrl-C.
    """
    from sm_train.toolkit.jobs.local_folder import find_local_run
    from sm_train.toolkit.runs.next_command import resume_command
    from sm_train.toolkit.runs.stop import pause_after_stage, stop_run
    from sm_train.toolkit.targets.resolved_run import open_run
    from sm_train.toolkit.terminal.console import note, write_json

    if (local := find_local_run(run)) is not None:
        _stop_local(local, after_stage=after_stage, wait=wait, as_json=as_json)
        return
    session, resolved = open_run(run, options)
    warning = None
    if after_stage:
        job = pause_after_stage(session, resolved)
        message = f"{job.name} continues to the end of {job.stage}; no other stage starts"
    else:
        result = stop_run(session, resolved, wait=wait)
        job, warning = result.job, result.warning
        outcome = "saves a checkpoint and ends" if job.live else "has ended; no other job starts"
        message = f"{job.name} {outcome}"
    if as_json:
        document = {"training_job_name": job.name, "stage": job.stage, "status": job.status}
        write_json(document | {"warning": warning})
    if warning is not None:
        note(f"warning: {warning}")
    note(f"{message}. To continue: {resume_command(resolved)}")


def _stop_local(run: LocalRunFolder, *, after_stage: bool, wait: bool, as_json: bool) -> None:
    from sm_train.toolkit.runs.local_view import reject_options, stop_local
    from sm_train.toolkit.terminal.console import note, write_json

    reject_options(run, after_stage=after_stage)
    status = stop_local(run, wait=wait)
    if as_json:
        stage = run.stages[-1].name
        document = {"training_job_name": None, "stage": stage, "status": status, "warning": None}
        write_json(document)
    outcome = "saves a checkpoint and ends" if status == "Stopping" else "has ended"
    then = "" if status == "Completed" else f". To continue: {run.start_command}"
    note(f"{run.target} {outcome}{then}")
