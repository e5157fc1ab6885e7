"""``sm-train stop``: lets a run checkpoint and end; nothing is billed until it is resumed."""

from __future__ import annotations

from typing import Any

import click


@click.command()
@click.argument("run", metavar="RUN|JOB")
@click.option("--after-stage", is_flag=True, help="Let this stage end and start no other.")
@click.option("--wait", is_flag=True, help="Return when the job has ended.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON on standard output.")
@click.pass_obj
def command(
    options: dict[str, Any], run: str, after_stage: bool, wait: bool, as_json: bool
) -> None:
    """Stop a run's live job: it saves a checkpoint first, and `resume` goes on at that step.

    SageMaker grants 120 seconds for that. With --after-stage a run that was started with `submit
    --all` pauses between two stages.
    """
    from sm_train.toolkit.runs.resolve import open_run
    from sm_train.toolkit.runs.stop import pause_after_stage, stop_run
    from sm_train.toolkit.terminal.console import write_json

    session, found = open_run(run, options)
    if after_stage:
        job = pause_after_stage(session, found)
        said = f"{job.name} goes on to the end of {job.stage}; no other stage follows by itself"
    else:
        job = stop_run(session, found, wait=wait)
        ends = "saves a checkpoint and ends" if job.live else "has ended; none follows by itself"
        said = f"{job.name} {ends}"
    if as_json:
        write_json({"training_job_name": job.name, "stage": job.stage, "status": job.status})
    click.echo(f"{said}. To go on: sm-train resume {found.name}", err=True)
