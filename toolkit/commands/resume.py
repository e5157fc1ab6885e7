"""``sm-train resume``: goes on with a run at the step where it ended."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
from sm_train.toolkit.errors import UserError


@click.command()
@click.argument("run", metavar="RUN|JOB")
@click.option("--stage", metavar="S", help="Another stage than the first that is not done.")
@click.option("--all", "chain", is_flag=True, help="Let `watch` start the stages after it.")
@click.option("--yes", "-y", is_flag=True, help="Start without asking.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON on standard output.")
@click.pass_obj
def command(
    options: dict[str, Any], run: str, stage: str | None, chain: bool, yes: bool, as_json: bool
) -> None:
    """Start the next job of a run, from its newest whole checkpoint.

    A run file takes its settings and the training code of this sm-train; a run's or a job's name
    runs the code that was submitted last, from any laptop.
    """
    from datetime import datetime

    from sm_train.toolkit.runs.resolve import is_run_file, open_run
    from sm_train.toolkit.submit.bundle import bundle_of, commit_of
    from sm_train.toolkit.submit.resume import resume_recorded, unfinished_stage
    from sm_train.toolkit.submit.submission import prepare
    from sm_train.toolkit.submit.submit import submit

    session, found = open_run(run, options)
    chosen = stage or unfinished_stage(session, found)
    if chosen not in [one.name for one in found.config.stages]:
        names = ", ".join(one.name for one in found.config.stages)
        raise UserError(f"--stage: {chosen!r} is not in the run; it has {names}")
    if is_run_file(run):
        base = Path(run).parent
        submission = prepare(
            found.config,
            chosen,
            bundle_of(found.config, base),
            found.region,
            datetime.now(),
            commit_of(base),
        )
        submit(
            submission, options["profile"], cause="resume", chain=chain, yes=yes, as_json=as_json
        )
    else:
        resume_recorded(session, found, chosen, chain=chain, yes=yes, as_json=as_json)
