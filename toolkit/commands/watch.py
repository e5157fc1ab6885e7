"""``sm-train watch``: follows a run, starts it again by cause, minds the budget."""

from __future__ import annotations

from typing import Any

import click


@click.command()
@click.argument("run", metavar="RUN|JOB")
@click.option("--once", is_flag=True, help="Look once, as from cron.")
@click.option("--no-act", is_flag=True, help="Only look: start and stop nothing.")
@click.option("--interval", metavar="T", default="60s", show_default=True,
              help="Time between two looks.")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print a JSON object for each look.")
@click.pass_obj
def command(
    options: dict[str, Any], run: str, once: bool, no_act: bool, interval: str, as_json: bool
) -> int:
    """Follow a run until it is done, paused, or needs a person.

    A job that was lost to capacity, hardware, spot or a stall is followed by another, from the
    newest whole checkpoint, within the run file's recovery and budget; one that failed by its own
    fault is not. Several may watch the same run: a stage never has two jobs.
    """
    from sm_train.toolkit.durations import seconds
    from sm_train.toolkit.following import open_run
    from sm_train.toolkit.watch_view import shower
    from sm_train.toolkit.watching import look, once_code, watch

    pause = seconds("--interval", interval)
    session, found = open_run(run, options)
    show = shower(as_json=as_json)
    if once:
        seen = look(session, found, act=not no_act)
        show(seen)
        return once_code(seen.action, act=not no_act)
    return watch(session, found, act=not no_act, interval=pause, show=show)
