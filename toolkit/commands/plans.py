"""``sm-train plans``: offerings of training plans for a run."""

from __future__ import annotations

from typing import Any

import click
from sm_train.toolkit.command_base.command import command as sm_train_command


@sm_train_command(
    "sm-train plans run.yaml",
    "sm-train plans run.yaml --days 14 --after 2027-01-01",
)
@click.argument("run", metavar="RUN")
@click.option(
    "--days",
    type=click.IntRange(1, 182),
    metavar="N",
    help="Days to reserve. [default: those of the estimate]",
)
@click.option(
    "--after",
    type=click.DateTime(["%Y-%m-%d"]),
    metavar="YYYY-MM-DD",
    help="First day of the reservation. [default: today]",
)
@click.pass_obj
def command(options: dict[str, Any], run: str, days: int | None, after: Any, as_json: bool) -> None:
    """Search offerings of training plans for a run.

    A training plan reserves instances of SageMaker for a number of days, for an upfront fee. Each
    offering for the largest stage of the run is printed with its fee, its start and end, and its
    price per instance-hour, and the AWS command that buys the cheapest. sm-train buys nothing.
    Plans have 1, 2, 4, 8, 16, 32 or 64 instances: the number is rounded up. The search needs the
    permission sagemaker:SearchTrainingPlanOfferings.
    """
    from sm_train.toolkit.planning.plan_search import search_plans, show_offerings
    from sm_train.toolkit.terminal.console import stdout_console, write_json

    found = search_plans(run, options, days, after)
    if as_json:
        write_json(found.document())
    else:
        show_offerings(found, stdout_console())
