"""``sm-train instances``: instance types with their GPUs, network and prices."""

from __future__ import annotations

from typing import Any

import click
from sm_train.toolkit.command_base.command import command as sm_train_command


@sm_train_command(
    "sm-train instances",
    "sm-train instances --gpu H100 --region us-west-2",
    "sm-train instances --gpu p5.48xlarge --regions",
)
@click.option("--gpu", metavar="TEXT", help="Only types whose GPU or name contains this.")
@click.option("--regions", is_flag=True, help="Show each type's price in every region.")
@click.pass_obj
def command(options: dict[str, Any], gpu: str | None, regions: bool, as_json: bool) -> None:
    """List the instance types that can train: GPUs, their memory, EFA and on-demand price.

    Prices come from the same table as those of `cost`; `cost --refresh` updates it.
    """
    from sm_train.toolkit.aws.session import price_region
    from sm_train.toolkit.planning.instance_table import (
        list_instances,
        show_instances,
        show_prices_by_region,
    )
    from sm_train.toolkit.planning.price_table import price_table
    from sm_train.toolkit.terminal.console import write_json

    region = price_region(options["region"])
    documents = list_instances(gpu, region, price_table())
    if as_json:
        write_json({"region": region, "instances": documents})
    elif regions:
        show_prices_by_region(documents)
    else:
        show_instances(documents, region)
