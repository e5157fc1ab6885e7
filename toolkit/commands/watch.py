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
@click.argument("run", metavar="RUN|JOB|FOLDER")
@click.option("--once", is_flag=True, help="Check once and exit (for cron).")
@click.option("--dry-run", is_flag=True, help="Report only; start and stop nothing.")
@click.option("--interval", metavar="T", default="60s", show_default=True, help="Polling interval.")
@click.pass_obj
def command(
    options: dict[str, Any], run: str, once: bool, dry_run: bool, interval: str, as_json: bool
) -> int:
    """Follow a run until it is done, is paused, or needs the user.

    Jobs lost to capacity, hardware, spot interruption or a stall are restarted from the latest
    complete checkpoint, within the run file's recovery and budget; jobs that failed because of
    their own code are not. Several watchers may follow the same run: a stage never has two jobs.

    On a terminal it is a live view that follows the job's log, otherwise a line for each poll. The
    folder of a local run is followed until its process ends.
    """
    from sm_train.toolkit.targets.resolved_run import open_session_for, resolve_run
    from sm_train.toolkit.targets.target import run_target
    from sm_train.toolkit.terminal.formatting import parse_duration
    from sm_train.toolkit.watch.controller import once_exit_code, reconcile
    from sm_train.toolkit.watch.live_view import print_view
    from sm_train.toolkit.watch.output import print_json

    seconds = parse_duration("--interval", interval)
    if (local := run_target(run).local) is not None:
        from sm_train.toolkit.runs.local_watch import watch_local
        from sm_train.toolkit.terminal.console import stderr_console

        console = stderr_console(shows_results=True)
        pause = min(seconds, _LOCAL_SECONDS)
        return watch_local(local, console, once=once, interval=pause, as_json=as_json)
    if not once:
        return follow_run(run, options, dry_run=dry_run, interval=seconds, as_json=as_json)
    session, region = open_session_for(run, options)
    result = reconcile(session, resolve_run(session, run, region), dry_run=dry_run)
    (print_json if as_json else print_view)(session, result)
    return once_exit_code(result.action, dry_run=dry_run)


_LOCAL_SECONDS = 2.0
"""Longest interval between two lines about a local run, whose log is read from a disk."""


def follow_run(
    run: str, options: dict[str, Any], *, dry_run: bool, interval: float, as_json: bool
) -> int:
    """Follow the run until it needs no more watching; Ctrl-C leaves it running."""
    from functools import partial

    from sm_train.toolkit.errors import ExitCode, UserError
    from sm_train.toolkit.runs.next_command import watch_command
    from sm_train.toolkit.targets.resolved_run import open_session_for, resolve_run
    from sm_train.toolkit.watch.controller import watch
    from sm_train.toolkit.watch.live_view import open_view

    session, region = open_session_for(run, options)
    find = partial(resolve_run, session, run, region)
    try:
        with open_view(session, as_json=as_json) as view:
            return watch(session, find, dry_run=dry_run, interval=interval, view=view)
    except KeyboardInterrupt:
        again = f"`{watch_command(run)}` follows it again"
        message = f"interrupted; the run itself continues: {again}"
        raise UserError(message, ExitCode.INTERRUPTED) from None
