"""``sm-train watch``: follows a run, restarts lost jobs and enforces the budget."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click
from sm_train.toolkit.commands._command import command as sm_train_command

if TYPE_CHECKING:
    from collections.abc import Callable

    import boto3
    from sm_train.toolkit.watch.controller import WatchResult


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
    from sm_train.toolkit.targets.target import run_target
    from sm_train.toolkit.terminal.formatting import parse_duration
    from sm_train.toolkit.watch.controller import once_exit_code
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
    session, poll = _poller(run, options, dry_run=dry_run)
    result = poll()
    (print_json if as_json else print_view)(session, result)
    return once_exit_code(result.action, dry_run=dry_run)


_LOCAL_SECONDS = 2.0
"""Longest interval between two lines about a local run, whose log is read from a disk."""


def follow_run(
    run: str, options: dict[str, Any], *, dry_run: bool, interval: float, as_json: bool
) -> int:
    """Follow the run until it needs no more watching; Ctrl-C leaves it running."""
    from sm_train.toolkit.errors import ExitCode, UserError
    from sm_train.toolkit.runs.next_command import watch_command
    from sm_train.toolkit.watch.controller import watch
    from sm_train.toolkit.watch.live_view import open_view

    session, poll = _poller(run, options, dry_run=dry_run)
    try:
        with open_view(session, as_json=as_json) as view:
            return watch(poll, dry_run=dry_run, interval=interval, view=view)
    except KeyboardInterrupt:
        again = f"`{watch_command(run)}` follows it again"
        message = f"interrupted; the run itself continues: {again}"
        raise UserError(message, ExitCode.INTERRUPTED) from None


def _poller(
    target: str, options: dict[str, Any], *, dry_run: bool
) -> tuple[boto3.Session | None, Callable[[], WatchResult]]:
    """Return a session, if the run may be on SageMaker, and what polls the run once.

    The run is found again for each poll, since new code may have been submitted.
    """
    from sm_train.toolkit.clusters.cluster_run import ClusterRun
    from sm_train.toolkit.targets.resolved_run import (
        RunOnSageMaker,
        find_run,
        may_be_on_sagemaker,
        open_session_for,
    )
    from sm_train.toolkit.watch.cluster_watch import check_once
    from sm_train.toolkit.watch.controller import reconcile

    session = open_session_for(target, options)[0] if may_be_on_sagemaker(target) else None

    def poll() -> WatchResult:
        found = find_run(target, options, session)
        if isinstance(found, ClusterRun):
            return check_once(found, dry_run=dry_run)
        assert isinstance(found, RunOnSageMaker)
        return reconcile(found.session, found.run, dry_run=dry_run)

    return session, poll
