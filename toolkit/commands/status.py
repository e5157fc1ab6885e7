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
    from datetime import UTC, datetime

    from sm_train.toolkit.following import open_run, read_state
    from sm_train.toolkit.output import result, write_json
    from sm_train.toolkit.status_view import as_document, show_status

    session, found = open_run(run, options)
    now = datetime.now(UTC)
    state = read_state(session, found, now)
    if as_json:
        write_json(as_document(state, now))
    else:
        show_status(state, now, result())
