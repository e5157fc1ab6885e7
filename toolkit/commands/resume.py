"""``sm-train resume``: continues a run at the step where it ended."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
from sm_train.toolkit.commands._command import command as sm_train_command
from sm_train.toolkit.errors import UserError


@sm_train_command(
    "sm-train resume my-model",
    "sm-train resume run.yaml --stage 512px",
)
@click.argument("run", metavar="RUN|JOB")
@click.option("--stage", metavar="S", help="A stage other than the first unfinished one.")
@click.option(
    "--auto-advance",
    is_flag=True,
    help="Let `sm-train watch` start each later stage when the previous one is done.",
)
@click.option(
    "--take-over",
    is_flag=True,
    help="Continue from the checkpoints of a job on Kubernetes or Slurm that has ended.",
)
@click.option("--yes", "-y", is_flag=True, help="Start without asking.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON on standard output.")
@click.pass_obj
def command(
    options: dict[str, Any],
    run: str,
    stage: str | None,
    auto_advance: bool,
    take_over: bool,
    yes: bool,
    as_json: bool,
) -> None:
    """Start the next job of a run, from its newest complete checkpoint.

    Given a run file, the job uses its settings and this sm-train's training code. Given a run's or
    a job's name, it uses the code that was submitted last, from any laptop.
    """
    from datetime import datetime

    from sm_train.toolkit.submit.resume import resume_recorded, unfinished_stage
    from sm_train.toolkit.submit.run_bundle import bundle_of, commit_of
    from sm_train.toolkit.submit.submission import prepare
    from sm_train.toolkit.submit.submit import submit
    from sm_train.toolkit.targets.resolved_run import open_run
    from sm_train.toolkit.targets.target import Kind, run_target

    session, resolved = open_run(run, options)
    chosen = stage or unfinished_stage(session, resolved)
    if chosen not in [one.name for one in resolved.config.stages]:
        names = ", ".join(one.name for one in resolved.config.stages)
        raise UserError(f"--stage: {chosen!r} is not in the run; it has {names}")
    if run_target(run).kind is Kind.RUN_FILE:
        base = Path(run).parent
        submission = prepare(
            resolved.config,
            chosen,
            bundle_of(resolved.config, base),
            resolved.region,
            datetime.now(),
            commit_of(base),
        )
        submit(
            submission,
            options["profile"],
            cause="resume",
            auto_advance=auto_advance,
            yes=yes,
            as_json=as_json,
            take_over=take_over,
        )
    else:
        resume_recorded(
            session,
            resolved,
            chosen,
            auto_advance=auto_advance,
            yes=yes,
            as_json=as_json,
            take_over=take_over,
        )
