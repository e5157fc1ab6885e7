"""Shows an estimate to a person, within 100 columns."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sm_train.toolkit.amounts import days, dollar_range, dollars, number, total_dollars

if TYPE_CHECKING:
    from rich.table import Table


def show_cost(document: dict[str, Any], region: str) -> None:
    """Print the ``cost --json`` document as a table with its assumptions, on standard output."""
    from sm_train.toolkit.output import result

    console = result()
    console.print(_table(document))
    console.print()
    for sentence in dict.fromkeys(_price(stage, region) for stage in document["stages"]):
        console.print(sentence, markup=False)
    console.print("Assumptions")
    for sentence in document["assumptions"]:
        console.print(f"  - {sentence}", markup=False)


def _price(stage: dict[str, Any], region: str) -> str:
    price, name = stage["price_per_instance_hour_usd"], stage["instance_type"]
    if price is None:
        return f"{name}: price unknown in {region}; {stage['price_source']}"
    return (
        f"{name}: ${price:,.4f} an instance-hour in {region}; {stage['price_source']}, "
        f"{stage['price_date'] or 'undated'}"
    )


def _per_hour(stage: dict[str, Any]) -> str:
    """Dollars an hour of the whole cluster."""
    price = stage["price_per_instance_hour_usd"]
    return dollars(None if price is None else price * stage["instances"])


def _table(document: dict[str, Any]) -> Table:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    table.add_column("stage", overflow="fold")
    table.add_column("cluster", overflow="fold")
    for name in ("it/s", "days", "$/h", "cost", "range"):
        table.add_column(name, justify="right", overflow="fold")
    total = document["total"]
    table.add_row(
        "[bold]total[/]", "", "", days(total["wall_seconds"]), "",
        f"[bold]{total_dollars(total)}[/]", dollar_range(total),
    )  # fmt: skip
    for stage in document["stages"]:
        table.add_row(
            stage["name"],
            f"{stage['instances']} × {stage['instance_type']}",
            number(stage["iterations_per_second"]),
            days(stage["billable_seconds"]),
            _per_hour(stage),
            dollars(stage["cost_usd"]),
            dollar_range(stage),
        )
    return table
