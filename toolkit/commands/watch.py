"""``sm-train watch``: follows a run, restarts lost jobs and enforces the budget."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING, Any

import click
from sm_train.toolkit.command_base.command import command as sm_train_command

if TYPE_CHECKING:
    from collections.abc import Callable

    from sm_train.toolkit.runs.watch.controller import WatchResult


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

    A run on Kubernetes or Slurm is watched by what its nodes store: an alert is sent when their
    heartbeats cease, and its nodes are asked to stop at the budget. The platform restarts jobs.

    On a terminal it is a live view that follows the job's log, otherwise a line for each poll. The
    folder of a local run is followed until its process ends.
    """
    from sm_train.toolkit.runs.watch.controller import once_exit_code
    from sm_train.toolkit.runs.watch.live_view import print_view
    from sm_train.toolkit.runs.watch.output import print_json
    from sm_train.toolkit.terminal.formatting import parse_duration

    seconds = parse_duration("--interval", interval)
    if not once:
        return follow_run(run, options, dry_run=dry_run, interval=seconds, as_json=as_json)
    result = _poller(run, options, dry_run=dry_run)()
    (print_json if as_json else print_view)(result)
    return once_exit_code(result.action, dry_run=dry_run)


def follow_run(
    run: str, options: dict[str, Any], *, dry_run: bool, interval: float, as_json: bool
) -> int:
    """Follow the run until it needs no more watching; Ctrl-C leaves it running."""
    from sm_train.toolkit.base.errors import ExitCode, UserError
    from sm_train.toolkit.runs.watch.controller import watch
    from sm_train.toolkit.runs.watch.live_view import open_view

    poll = _poller(run, options, dry_run=dry_run)
    try:
        with open_view(as_json=as_json) as view:
            return watch(poll, dry_run=dry_run, interval=interval, view=view)
    except KeyboardInterrupt:
        again = f"`{shlex.join(['sm-train', *options.get('arguments', ('watch', run))])}`"
        again += " follows it again"
        message = f"interrupted; the run itself continues: {again}"
        raise UserError(message, ExitCode.INTERRUPTED) from None


def _poller(target: str, options: dict[str, Any], *, dry_run: bool) -> Callable[[], WatchResult]:
    """Return what finds the run again, since new code may have been submitted, and polls it."""
    from sm_train.toolkit.platforms.find_run import find_run
    from sm_train.toolkit.runs.watch.controller import poll_run

    kept = {**options, "sessions": {}}
    return lambda: poll_run(find_run(target, kept), dry_run=dry_run)
