"""``sm-train status``: the state of a run, what it has cost and what it will cost."""

from __future__ import annotations

from typing import Any

import click
from sm_train.toolkit.command_base.command import command as sm_train_command


@sm_train_command(
    "sm-train status my-model",
    "sm-train status local-runs/my-model",
    "sm-train status run.yaml --json",
)
@click.argument("run", metavar="RUN|JOB|FOLDER")
@click.pass_obj
def command(options: dict[str, Any], run: str, as_json: bool) -> None:
    """Show the stages of a run, given by its run file, its name, one of its jobs, or the folder of
    a local run.
    """
    from sm_train.toolkit.platforms.find_run import find_run
    from sm_train.toolkit.runs.run_status import read_status
    from sm_train.toolkit.runs.status_view import show_status
    from sm_train.toolkit.terminal.console import stdout_console, write_json

    found = find_run(run, options)
    if as_json:
        write_json(read_status(found).document)
    else:
        show_status(found, stdout_console())
