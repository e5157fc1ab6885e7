"""``sm-train logs``: the log of a run's job, from all nodes."""

from __future__ import annotations

from typing import Any

import click
from sm_train.toolkit.command_base.command import command as sm_train_command


@sm_train_command(
    "sm-train logs my-model --follow",
    "sm-train logs my-model --node 3 --since 30m",
    "sm-train logs local-runs/my-model",
)
@click.argument("run", metavar="RUN|JOB|FOLDER")
@click.option("--follow", "-f", is_flag=True, help="Keep printing until the job has ended.")
@click.option("--node", type=click.IntRange(1), metavar="N", help="Only the node algo-N.")
@click.option("--since", metavar="T", help="Only lines of the last 90s, 30m, 36h, 5d.")
@click.option("--raw", is_flag=True, help="Include the machine-readable event lines.")
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
    """Print the log of a job, of a run's newest job, or of a local run's newest stage.

    Lines of several nodes are in order of time.
    """
    import time
    from functools import partial

    from sm_train.toolkit.platforms.find_run import find_run
    from sm_train.toolkit.platforms.placed_run import LogOptions
    from sm_train.toolkit.runs.logs import print_line
    from sm_train.toolkit.terminal.console import stderr_console
    from sm_train.toolkit.terminal.formatting import parse_duration

    found = find_run(run, options)
    begin = time.time() - parse_duration("--since", since) if since else 0.0
    on_error = partial(stderr_console(shows_results=True).print, markup=False)
    for line in found.log_lines(found.newest_job(), LogOptions(begin, node, follow, on_error)):
        print_line(line, raw=raw, as_json=as_json, with_node=found.has_log_per_node)
