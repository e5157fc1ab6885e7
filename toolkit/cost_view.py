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
    for stage in document["stages"]:
        if stage["price_per_instance_hour_usd"] is not None:
            console.print(
                f"{stage['name']}: ${stage['price_per_instance_hour_usd']:,.4f} an instance-hour "
                f"in {region}; {stage['price_source']}, {stage['price_date'] or 'undated'}",
                markup=False,
            )
    console.print("Assumptions")
    for sentence in document["assumptions"]:
        console.print(f"  - {sentence}", markup=False)


def _table(document: dict[str, Any]) -> Table:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    table.add_column("stage", overflow="fold")
    table.add_column("cluster")
    for name in ("iterations", "it/s", "days", "cost", "range"):
        table.add_column(name, justify="right")
    total = document["total"]
    table.add_row(
        "[bold]total[/]", "", "", "", days(total["wall_seconds"]),
        f"[bold]{total_dollars(total)}[/]", dollar_range(total),
    )  # fmt: skip
    for stage in document["stages"]:
        table.add_row(
            stage["name"],
            f"{stage['instances']} × {stage['instance_type']}",
            f"{stage['iterations']:,}",
            number(stage["iterations_per_second"]),
            days(stage["billable_seconds"]),
            dollars(stage["cost_usd"]),
            dollar_range(stage),
        )
    return table
