"""``sm-train status``: where a run is, what it has cost and what it will."""

from __future__ import annotations

from typing import Any

import click


@click.command()
@click.argument("run", metavar="RUN|JOB")
@click.option("--json", "as_json", is_flag=True, help="Print JSON on standard output.")
@click.pass_obj
def command(options: dict[str, Any], run: str, as_json: bool) -> None:
    """Show the stages of a run: a run file, a run's name, or the name of one of its jobs."""
    from sm_train.toolkit.runs.resolve import open_run, read_state
    from sm_train.toolkit.runs.status_view import as_document, show_status
    from sm_train.toolkit.terminal.console import stdout_console, write_json

    session, found = open_run(run, options)
    state = read_state(session, found)
    if as_json:
        write_json(as_document(state))
    else:
        show_status(state, stdout_console())
