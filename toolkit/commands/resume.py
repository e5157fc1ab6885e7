"""``sm-train resume``: continues a run at the step where it ended."""

from __future__ import annotations

from functools import partial
from typing import Any

import click
from sm_train.toolkit.command_base.command import command as sm_train_command
from sm_train.toolkit.command_base.options import accept_components_option, unproven_option


@sm_train_command(
    "sm-train resume my-model",
    "sm-train resume run.yaml --stage 512px",
)
@click.argument("run", metavar="RUN|JOB")
@click.option("--stage", metavar="S", help="A stage other than the first unfinished one.")
@click.option(
    "--auto-advance/--no-auto-advance",
    default=None,
    help="Let `sm-train watch` start each later stage when the previous one is done; default: as "
    "when the run was started last, also after `stop --after-stage`.",
)
@click.option(
    "--take-over",
    is_flag=True,
    help="Continue from the checkpoints of a job on Kubernetes or Slurm that has ended.",
)
@accept_components_option
@unproven_option
@click.option("--yes", "-y", is_flag=True, help="Start without asking.")
@click.pass_obj
def command(
    options: dict[str, Any],
    run: str,
    stage: str | None,
    auto_advance: bool | None,
    take_over: bool,
    accept_components: bool,
    unproven: bool,
    yes: bool,
    as_json: bool,
) -> None:
    """Start the next job of a run, from its newest complete checkpoint.

    Given a run file, the job uses its settings and this sm-train's training code. Given a run's or
    a job's name, it uses the code that was submitted last, from any laptop.
    """
    from sm_train.toolkit.submit.proven_path import require_proven
    from sm_train.toolkit.submit.resume import resume

    resume(
        run,
        stage,
        options,
        auto_advance=auto_advance,
        yes=yes,
        as_json=as_json,
        take_over=take_over,
        accept_components=accept_components,
        before_start=partial(require_proven, unproven=unproven, target=run),
    )
