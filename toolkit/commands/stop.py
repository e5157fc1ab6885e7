"""``sm-train stop``: stops a run after a checkpoint; nothing is billed until it is resumed."""

from __future__ import annotations

from typing import Any

import click
from sm_train.toolkit.commands._command import command as sm_train_command


@sm_train_command(
    "sm-train stop my-model",
    "sm-train stop run.yaml --after-stage",
)
@click.argument("run", metavar="RUN|JOB")
@click.option("--after-stage", is_flag=True, help="Finish the current stage and start no other.")
@click.option("--wait", is_flag=True, help="Return when the job has ended.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON on standard output.")
@click.pass_obj
def command(
    options: dict[str, Any], run: str, after_stage: bool, wait: bool, as_json: bool
) -> None:
    """Stop a run's live job after it has saved a checkpoint; `resume` continues at that step.

    SageMaker grants 120 seconds for the checkpoint. With --after-stage, a run that was started
    with `submit --auto-advance` pauses between two stages.
    """
    from sm_train.toolkit.runs.resolve import open_run
    from sm_train.toolkit.runs.stop import pause_after_stage, stop_run
    from sm_train.toolkit.terminal.console import note, write_json

    session, resolved = open_run(run, options)
    if after_stage:
        job = pause_after_stage(session, resolved)
        message = f"{job.name} continues to the end of {job.stage}; no other stage starts"
    else:
        job = stop_run(session, resolved, wait=wait)
        outcome = "saves a checkpoint and ends" if job.live else "has ended; no other job starts"
        message = f"{job.name} {outcome}"
    if as_json:
        write_json({"training_job_name": job.name, "stage": job.stage, "status": job.status})
    note(f"{message}. To continue: sm-train resume {resolved.name}")
