"""Print estimates on the terminal, within 100 columns."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import click
from sm_train.cost.explain import signed_dollars
from sm_train.cost.speed import FIRM
from sm_train.toolkit.terminal.csv_text import format_csv
from sm_train.toolkit.terminal.formatting import (
    format_days,
    format_number,
    format_percent,
    format_total_usd,
    format_usd,
    format_usd_range,
)
from sm_train.toolkit.terminal.text_table import WIDTH, text_table

if TYPE_CHECKING:
    from sm_train.cost.explain import Term

Document = dict[str, Any]

_STAGE_COLUMNS = (
    "name instance_type instances world_size resolution effective_batch_size max_steps "
    "steps_per_second throughput_basis training_seconds overhead_seconds billable_seconds "
    "instance_hours price_per_instance_hour_usd price_status price_source price_date cost_usd "
    "cost_low_usd cost_high_usd"
).split()


def show_cost(document: Document, region: str) -> None:
    """Print the ``cost --json`` document as a table with its assumptions, on standard output."""
    header, total, *stages = text_table(
        ("stage", "cluster", "it/s", "days", "$/h", "cost", "P10 to P90"),
        [_total_row(document["total"]), *map(_stage_row, document["stages"])],
        left=2,
    )
    click.echo(click.style(header, bold=True))
    click.echo(click.style(total, bold=True))
    _print(stages)
    click.echo()
    for sentence in dict.fromkeys(_price_sentence(stage, region) for stage in document["stages"]):
        _echo(sentence)
    _list("Warnings", document["warnings"])
    _list("Assumptions", document["assumptions"])


def show_terms(terms: Iterable[Term]) -> None:
    """Print each number with its formula, inputs and source."""
    stage = None
    for term in terms:
        if term.stage != stage:
            click.echo(click.style(f"\n{term.stage}", bold=True))
            stage = term.stage
        _echo(f"{term.name} = {term.value}", "  ")
        _echo(f"= {term.formula}", "      ")
        _echo(f"= {term.figures}   [{term.source}]", "      ")


def show_comparison(document: Document) -> None:
    """Print the differences between two estimates and their effect on the cost."""
    rows = []
    for stage in document["stages"]:
        rows.append(
            (
                stage["name"],
                stage["change"],
                format_usd(stage["before_usd"]),
                format_usd(stage["after_usd"]),
                format_signed_usd(stage["difference_usd"]),
            )
        )
    total = document["total"]
    total_row = (
        "total",
        "",
        format_usd(total["before_usd"]),
        format_usd(total["after_usd"]),
        format_signed_usd(total["difference_usd"]),
    )
    _print(text_table(("stage", "", "before", "after", "difference"), [total_row, *rows], left=2))
    for stage in document["stages"]:
        for field in stage["fields"]:
            _echo(f"{stage['name']}: {field['field']}: {field['before']} → {field['after']}", "  ")


def show_actual(document: Document) -> None:
    """Print the jobs' actual cost, its breakdown, and the estimate."""
    total = document["total"]
    rows = [
        _actual_row("total", total),
        *(_actual_row(stage["name"], stage) for stage in document["stages"]),
    ]
    header = ("stage", "billed", "estimate", "difference", "goodput", "images", "$/M images")
    _print(text_table(header, rows, left=1))
    click.echo()
    _print(text_table(("breakdown", "$", "share"), list(_breakdown_rows(total)), left=1))
    if total["remaining_usd"]:
        _echo(
            f"remaining: {format_usd(total['remaining_usd'])} at the speed measured so far; "
            f"total at completion: {format_usd(total['projected_usd'])}"
        )
    for job in document["jobs"]:
        _echo(
            f"{job['name']}: {job['status']}, {format_days(job['billable_seconds'])}, "
            f"{job['instances']} × {job['instance_type']}, {format_usd(job['billed_usd'])}"
        )
    _list("Warnings", document["warnings"])


def show_alternatives(rows: Sequence[Document], omitted: int, summary: str) -> None:
    """Print alternative clusters, the cheapest first; ``*`` marks Pareto-optimal ones."""
    table = [
        (
            "*" if row["pareto"] else "",
            f"{row['instances']} × {row['instance_type']}",
            row["capacity"] if row["purchase"] == "on-demand" else row["purchase"],
            format_days(row["wall_seconds"]),
            ("≤ " if row["capacity"] == "spot" else "") + format_usd(row["cost_usd"]),
            format_usd_range(row),
            {True: "fits", None: "unknown"}[row["fits_memory"]],
            _least_reliable(row["throughput_basis"]),
        )
        for row in rows
    ]
    header = ("", "cluster", "bought", "days", "cost", "P10 to P90", "memory", "it/s by")
    _print(text_table(header, table, left=3))
    click.echo()
    _echo(summary)
    if omitted:
        click.echo(f"{omitted:,} more; --rows shows them, --json prints all")


def _least_reliable(bases: Sequence[str]) -> str:
    """Return the least reliable of the stages' throughput bases."""
    order = ("predicted", "other hardware", "other resolution", "scaled", "scaling fit")
    return next((basis for basis in order if basis in bases), bases[0])


def as_csv(document: Document) -> str:
    """Return the stages and, last, the total as CSV; unknown values are empty."""
    return format_csv(_STAGE_COLUMNS, [*document["stages"], {"name": "total", **document["total"]}])


def format_signed_usd(amount: float | None) -> str:
    """Format a difference in dollars with its sign."""
    if amount is None:
        return "unknown"
    return signed_dollars(amount)


def _total_row(total: Document) -> tuple[str, ...]:
    return (
        "total",
        "",
        "",
        format_days(total["wall_seconds"]),
        "",
        format_total_usd(total),
        format_usd_range(total),
    )


def _stage_row(stage: Document) -> tuple[str, ...]:
    price = stage["price_per_instance_hour_usd"]
    firm = stage["throughput_basis"] in FIRM
    return (
        stage["name"],
        f"{stage['instances']} × {stage['instance_type']}",
        format_number(stage["steps_per_second"]) + ("" if firm else "~"),
        format_days(stage["billable_seconds"]),
        format_usd(None if price is None else price * stage["instances"]),
        format_usd(stage["cost_usd"]),
        format_usd_range(stage),
    )


def _actual_row(name: str, figures: Document) -> tuple[str, ...]:
    goodput, images = figures["goodput"], figures["images"]
    billed = figures["billed_usd"]
    return (
        name,
        format_usd(billed)
        if billed is not None
        else f"≥ {format_usd(figures['billed_at_least_usd'])}",
        format_usd(figures["estimate_usd"]),
        format_signed_usd(figures["difference_usd"]),
        "unknown" if goodput is None else format_percent(goodput),
        "unknown" if images is None else f"{images:,}",
        format_usd(figures["per_million_images_usd"]),
    )


def _breakdown_rows(total: Document) -> Iterable[tuple[str, str, str]]:
    billed = total["billed_usd"]
    yield "billed", format_usd(billed), "100.0%" if billed else ""
    for part, amount in total["waterfall_usd"].items():
        share = "" if amount is None or not billed else format_percent(amount / billed)
        yield f"  {part.replace('_', ' ')}", format_usd(amount), share


def _price_sentence(stage: Document, region: str) -> str:
    price, name = stage["price_per_instance_hour_usd"], stage["instance_type"]
    if price is None:
        return f"{name}: price unknown in {region}; {stage['price_source']}"
    return (
        f"{name}: ${price:,.4f} per instance-hour in {region}; {stage['price_source']}, "
        f"{stage['price_date'] or 'undated'}"
    )


def _list(title: str, sentences: Sequence[str]) -> None:
    if sentences:
        click.echo(click.style(title, bold=True))
    for sentence in sentences:
        _echo(f"- {sentence}", "  ")


def _print(lines: Iterable[str]) -> None:
    for line in lines:
        click.echo(line)


def _echo(text: str, indent: str = "") -> None:
    hanging = indent + ("  " if text.startswith("- ") else "")
    for line in textwrap.wrap(text, WIDTH, initial_indent=indent, subsequent_indent=hanging):
        click.echo(line)
