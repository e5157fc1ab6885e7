"""Searches the offerings of training plans for a run, and shows them."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from math import ceil
from typing import TYPE_CHECKING, Any

from sm_train.cost.json_document import as_document
from sm_train.estimators.config.schema import RunConfig
from sm_train.toolkit.aws.session import open_session, resolve_region
from sm_train.toolkit.base.errors import UserError
from sm_train.toolkit.planning.price_table import price_table
from sm_train.toolkit.planning.run_price import estimate_run
from sm_train.toolkit.planning.training_plans import PlanOffering, search_offerings
from sm_train.toolkit.platforms.find_run import open_config
from sm_train.toolkit.terminal.formatting import format_usd
from sm_train.toolkit.terminal.rich_table import rich_table

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

_COUNTS = (1, 2, 4, 8, 16, 32, 64)
_MOST_DAYS = 182
"""Numbers of instances and days that plans have (SageMaker developer guide, Search training plan
offerings, 2026-11)."""

_DAY = 86400.0


@dataclass(frozen=True)
class FoundOfferings:
    """What was asked for, and the offerings, cheapest first.

    ``on_demand_usd`` is the on-demand price of an instance-hour.
    """

    run: str
    region: str
    instance_type: str
    instances: int
    days: int
    on_demand_usd: float | None
    offerings: tuple[PlanOffering, ...]
    profile: str | None = None

    def command(self, offering: PlanOffering) -> str:
        """Return the AWS command that buys an offering."""
        return (
            f"aws sagemaker create-training-plan --region {self.region}"
            + ("" if self.profile is None else f" --profile {shlex.quote(self.profile)}")
            + f" --training-plan-name {self.run} --training-plan-offering-id {offering.identifier}"
        )

    def document(self) -> dict[str, Any]:
        """Return the document of ``plans --json``."""
        return {
            "region": self.region,
            "instance_type": self.instance_type,
            "instances": self.instances,
            "days": self.days,
            "on_demand_usd_per_instance_hour": self.on_demand_usd,
            "offerings": [
                {
                    "id": each.identifier,
                    "instance_type": each.instance_type,
                    "instances": each.instances,
                    "start": None if each.start is None else each.start.isoformat(),
                    "end": None if each.end is None else each.end.isoformat(),
                    "hours": each.seconds / 3600,
                    "fee_usd": None if each.fee is None else float(each.fee),
                    "usd_per_instance_hour": each.usd_per_instance_hour,
                    "command": self.command(each),
                }
                for each in self.offerings
            ],
        }


def search_plans(
    target: str, options: dict[str, Any], days: int | None, after: datetime | None
) -> FoundOfferings:
    """Search plans for the largest stage of a run; ``options`` are the global ones.

    Raises:
        UserError: there is no such run, its time is unknown, or AWS refuses the request.
    """
    config = open_config(target, (), options).config
    if config.cluster.is_own_machine:
        raise UserError(f"{config.cluster.instance_type}: AWS sells no plans of your own machines")
    region = resolve_region(options["region"], config.region, options["profile"])
    instances = max(stage.instances for stage in config.stages)
    offered = next((count for count in _COUNTS if count >= instances), None)
    if offered is None:
        raise UserError(f"stages: {instances} instances; a training plan has {_COUNTS[-1]} at most")
    name = config.cluster.instance_type
    wanted = days or _days(config, region)
    begin = datetime.now(UTC) if after is None else after.replace(tzinfo=UTC)
    session = open_session(options["profile"], region)
    offerings = search_offerings(session, name, offered, 24 * wanted, begin)
    on_demand = price_table().price(name, region).usd_per_instance_hour
    return FoundOfferings(
        config.name,
        region,
        name,
        offered,
        wanted,
        None if on_demand is None else float(on_demand),
        tuple(offerings),
        options["profile"],
    )


def _days(config: RunConfig, region: str) -> int:
    """Return the whole days that the run takes by its estimate."""
    seconds = as_document(estimate_run(config, region))["total"]["wall_seconds"]
    if seconds is None:
        raise UserError("--days: the run's time is unknown; give it, or state steps_per_second")
    return min(_MOST_DAYS, max(1, ceil(float(seconds) / _DAY)))


def show_offerings(found: FoundOfferings, console: Console) -> None:
    """Print a table of the offerings, and the command that buys the cheapest."""
    days = "1 day" if found.days == 1 else f"{found.days} days"
    wanted = f"{found.instances} × {found.instance_type} for {days} in {found.region}"
    if not found.offerings:
        console.print(f"No offering: {wanted}. Try --days or --after.", markup=False)
        return
    console.print(f"Offerings: {wanted}\n", markup=False)
    console.print(_table(found.offerings))
    price = format_usd(found.on_demand_usd)
    console.print(f"\nOn demand an instance-hour costs {price}. To buy the first:", markup=False)
    console.print(found.command(found.offerings[0]), markup=False, soft_wrap=True)


def _table(offerings: Sequence[PlanOffering]) -> Table:
    columns = ("instances", "from", "to", "hours", "fee", "an hour")
    table = rich_table(columns, right=("hours", "fee", "an hour"))
    for each in offerings:
        table.add_row(
            f"{each.instances} × {each.instance_type}",
            *("" if at is None else f"{at:%Y-%m-%d %H:%M}" for at in (each.start, each.end)),
            f"{each.seconds / 3600:,.0f}",
            format_usd(None if each.fee is None else float(each.fee)),
            format_usd(each.usd_per_instance_hour),
        )
    return table
