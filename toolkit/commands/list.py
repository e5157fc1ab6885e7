"""``sm-train list``: the runs of this account and region, or those in a folder or a bucket."""

from __future__ import annotations

from typing import Any

import click
from sm_train.toolkit.command_base.command import command as sm_train_command


@sm_train_command(
    "sm-train list",
    "sm-train list --days 90 --region us-west-2",
    "sm-train list s3://my-bucket /fsx/sm-train",
)
@click.argument("places", metavar="[PLACE]...", nargs=-1)
@click.option(
    "--days",
    type=click.IntRange(1),
    default=30,
    show_default=True,
    metavar="N",
    help="Include jobs created in the last N days.",
)
@click.pass_obj
def command(options: dict[str, Any], places: tuple[str, ...], days: int, as_json: bool) -> None:
    """List the runs that had jobs recently, whichever laptop started them.

    A run on SageMaker is known by the tags of its jobs; no state is kept on this machine. PLACE is
    a bucket, or a folder that nodes share: the runs of Kubernetes and Slurm that store their
    checkpoints there are listed instead.
    """
    from datetime import UTC, datetime, timedelta

    from sm_train.toolkit.aws.session import resolve_region
    from sm_train.toolkit.runs.listing import list_runs, listed_jobs, show_runs
    from sm_train.toolkit.terminal.console import stdout_console, write_json

    now = datetime.now(UTC)
    region = None if places else resolve_region(options["region"], None, options["profile"])
    runs = list_runs(listed_jobs(places, options, now - timedelta(days=days)), now)
    if as_json:
        write_json({"region": region, "runs": runs})
    else:
        show_runs(runs, region, region or ", ".join(places), stdout_console())
