"""``sm-train watch``: follows a run, starts it again by cause, minds the budget."""

from __future__ import annotations

from typing import Any

import click


@click.command()
@click.argument("run", metavar="RUN|JOB")
@click.option("--once", is_flag=True, help="Look once, as from cron.")
@click.option("--no-act", is_flag=True, help="Only look: start and stop nothing.")
@click.option(
    "--interval", metavar="T", default="60s", show_default=True, help="Time between two looks."
)
@click.option("--json", "as_json", is_flag=True, help="Print a JSON object for each look.")
@click.pass_obj
def command(
    options: dict[str, Any], run: str, once: bool, no_act: bool, interval: str, as_json: bool
) -> int:
    """Follow a run until it is done, paused, or needs a person.

    A job that was lost to capacity, hardware, spot or a stall is followed by another, from the
    newest whole checkpoint, within the run file's recovery and budget; one that failed by its own
    fault is not. Several may watch the same run: a stage never has two jobs.

    On a terminal it is a view that follows the job's log, elsewhere a line for each look.
    """
    from functools import partial

    from sm_train.toolkit.errors import ExitCode, UserError
    from sm_train.toolkit.runs.resolve import open_session_for, resolve_run
    from sm_train.toolkit.terminal.durations import parse_duration
    from sm_train.toolkit.watch.controller import once_code, reconcile, watch
    from sm_train.toolkit.watch.live_view import showing, view_of
    from sm_train.toolkit.watch.output import show_json

    pause = parse_duration("--interval", interval)
    session, region = open_session_for(run, options)
    find = partial(resolve_run, session, run, region)
    if once:
        seen = reconcile(session, find(), act=not no_act)
        (show_json if as_json else view_of)(session, seen)
        return once_code(seen.action, act=not no_act)
    try:
        with showing(session, as_json=as_json) as shower:
            return watch(session, find, act=not no_act, interval=pause, shower=shower)
    except KeyboardInterrupt:
        message = f"interrupted; the run itself goes on: `sm-train watch {run}` looks again"
        raise UserError(message, ExitCode.INTERRUPTED) from None
