"""``sm-train stop``: stops a run after a checkpoint; nothing is billed until it is resumed."""

from __future__ import annotations

from typing import Any

import click
from sm_train.toolkit.command_base.command import command as sm_train_command


@sm_train_command(
    "sm-train stop my-model",
    "sm-train stop run.yaml --after-stage",
    "sm-train stop local-runs/my-model --wait",
)
@click.argument("run", metavar="RUN|JOB|FOLDER")
@click.option("--after-stage", is_flag=True, help="Finish the current stage and start no other.")
@click.option(
    "--cancel",
    is_flag=True,
    help="Also take the job out of the queue of Slurm (scancel) or Kubernetes (kubectl delete).",
)
@click.option("--wait", is_flag=True, help="Return when the job has ended.")
@click.pass_obj
def command(
    options: dict[str, Any],
    run: str,
    after_stage: bool,
    cancel: bool,
    wait: bool,
    as_json: bool,
) -> None:
    """Stop a run's live job after it has saved a checkpoint; `resume` continues at that step.

    SageMaker grants 120 seconds for the checkpoint. With --after-stage, a run that was started
    with `submit --auto-advance` pauses between two stages. A local run stops as with Ctrl-C. Nodes
    of Kubernetes or Slurm get the request through the storage of their checkpoints.
    """
    from sm_train.toolkit.base.errors import UserError
    from sm_train.toolkit.platforms.find_run import find_run
    from sm_train.toolkit.runs.stop import pause_after_stage, stop
    from sm_train.toolkit.terminal.console import note, write_json
    from sm_train.toolkit.terminal.json_record import record_document

    found = find_run(run, options)
    if after_stage and cancel:
        raise UserError("--cancel: ends the job, and --after-stage lets it finish; give one")
    result = pause_after_stage(found) if after_stage else stop(found, wait=wait, cancel=cancel)
    if after_stage:
        outcome = f"continues to the end of {result.stage}; no other stage starts"
    elif result.live:
        outcome = f"saves a checkpoint and ends{found.platform.on_stop}"
    else:
        outcome = "has ended; no other job starts" if found.starts_jobs else "has ended"
    if as_json:
        write_json(record_document(result))
    if result.cancelled_by is not None:
        note(f"ran {result.cancelled_by}")
    if result.warning is not None:
        note(f"warning: {result.warning}")
    is_done = result.status == "Completed" and result.stage == found.config.stages[-1].name
    continued = "" if is_done else f". To continue: {found.resume_command}"
    note(f"{result.training_job_name} {outcome}{continued}")
