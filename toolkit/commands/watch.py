"""``sm-train watch``: follows a run, restarts lost jobs and enforces the budget."""

from __future__ import annotations

from typing import Any

import click
from sm_train.toolkit.commands._command import command as sm_train_command


@sm_train_command(
    "sm-train watch my-model",
    "sm-train watch run.yaml --once --json",
    "sm-train watch local-runs/my-model",
)
@click.argument("run", metavar="RUN|JOB")
@click.option("--once", is_flag=True, help="Check once and exit (for cron).")
@click.option("--dry-run", is_flag=True, help="Report only; start and stop nothing.")
@click.option("--interval", metavar="T", default="60s", show_default=True, help="Polling interval.")
@click.option("--json", "as_json", is_flag=True, help="Print a JSON object for each poll.")
@click.pass_obj
def command(
    options: dict[str, Any], run: str, once: bool, dry_run: bool, interval: str, as_json: bool
) -> int:
    """Follow a run until it is done, is paused, or needs the user.

    Jobs lost to capacity, hardware, spot interruption or a stall are restarted from the latest
    complete checkpoint, within the run file's recovery and budget; jobs that failed because of
    their own code are not. Several watchers may follow the same run: a stage never has two jobs.

    On a terminal it is a live view that follows the job's log, otherwise a line for each poll.
    """
    from functools import partial

    from sm_train.toolkit.errors import ExitCode, UserError
    from sm_train.toolkit.runs.resolve import open_session_for, resolve_run
    from sm_train.toolkit.terminal.formatting import parse_duration
    from sm_train.toolkit.watch.controller import once_exit_code, reconcile, watch
    from sm_train.toolkit.watch.live_view import open_view, print_view
    from sm_train.toolkit.watch.output import print_json

    seconds = parse_duration("--interval", interval)
    session, region = open_session_for(run, options)
    find = partial(resolve_run, session, run, region)
    if once:
        result = reconcile(session, find(), dry_run=dry_run)
        (print_json if as_json else print_view)(session, result)
        return once_exit_code(result.action, dry_run=dry_run)
    try:
        with open_view(session, as_json=as_json) as view:
            return watch(session, find, dry_run=dry_run, interval=seconds, view=view)
    except KeyboardInterrupt:
        message = f"interrupted; the run itself continues: `sm-train watch {run}` follows it again"
        raise UserError(message, ExitCode.INTERRUPTED) from None
