"""``sm-train list``: the runs of this account and region."""

from __future__ import annotations

from typing import Any

import click
from sm_train.toolkit.commands._command import command as sm_train_command


@sm_train_command(
    "sm-train list",
    "sm-train list --days 90 --region us-west-2",
)
@click.option(
    "--days",
    type=click.IntRange(1),
    default=30,
    show_default=True,
    metavar="N",
    help="Include jobs created in the last N days.",
)
@click.pass_obj
def command(options: dict[str, Any], days: int, as_json: bool) -> None:
    """List the runs that had jobs recently, whichever laptop started them.

    A run is known by the tags of its jobs; no state is kept on this machine.
    """
    from datetime import UTC, datetime, timedelta

    from sm_train.toolkit.aws.session import open_session, resolve_region
    from sm_train.toolkit.runs.listing import list_runs, show_runs
    from sm_train.toolkit.terminal.console import stdout_console, write_json

    region = resolve_region(options["region"], None, options["profile"])
    session = open_session(options["profile"], region)
    now = datetime.now(UTC)
    runs = list_runs(session, now - timedelta(days=days), now)
    if as_json:
        write_json({"region": region, "runs": runs})
    else:
        show_runs(runs, region, stdout_console())
