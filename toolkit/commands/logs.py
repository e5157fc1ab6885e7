"""``sm-train logs``: what a run's jobs said, of all machines."""

from __future__ import annotations

from typing import Any

import click


@click.command()
@click.argument("run", metavar="RUN|JOB")
@click.option("--follow", "-f", is_flag=True, help="Go on until the job has ended.")
@click.option("--node", type=click.IntRange(1), help="Only the machine algo-N.")
@click.option("--since", metavar="T", help="Only what is younger: 90s, 30m, 36h, 5d.")
@click.option("--raw", is_flag=True, help="With the event lines that programs read.")
@click.option("--json", "as_json", is_flag=True, help="Print a JSON object for each line.")
@click.pass_obj
def command(
    options: dict[str, Any],
    run: str,
    follow: bool,
    node: int | None,
    since: str | None,
    raw: bool,
    as_json: bool,
) -> None:
    """Print the log of a job, or of a run's newest one.

    Lines of several machines come in the order of their time.
    """
    import time
    from functools import partial

    from sm_train.toolkit.aws.cloudwatch_logs import search
    from sm_train.toolkit.aws.session import for_region
    from sm_train.toolkit.jobs.log_tail import follow_log, show_line
    from sm_train.toolkit.runs.resolve import open_run
    from sm_train.toolkit.runs.stop import named_job
    from sm_train.toolkit.terminal.console import stderr_console
    from sm_train.toolkit.terminal.durations import parse_duration

    session, found = open_run(run, options)
    begin = time.time() - parse_duration("--since", since) if since else 0.0
    job = named_job(session, found, run)
    session = for_region(session, job.region)
    streams = f"{job.name}/algo-{node}-" if node else f"{job.name}/"
    if follow:
        tell = partial(stderr_console().print, markup=False)
        lines = follow_log(session, job.name, streams, begin, tell)
    else:
        lines = search(session, streams, since=begin)
    for line in lines:
        show_line(line, raw=raw, as_json=as_json)
