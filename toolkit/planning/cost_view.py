"""Print estimates on the terminal, within its width."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import click
from sm_train.cost.instances import is_own_machine
from sm_train.cost.speed import FIRM
from sm_train.toolkit.terminal.console import write_line, write_list, write_wrapped
from sm_train.toolkit.terminal.csv_text import format_csv
from sm_train.toolkit.terminal.formatting import (
    format_days,
    format_number,
    format_signed_usd,
    format_total_usd,
    format_usd,
)
from sm_train.toolkit.terminal.text_table import narrowest, terminal_width, text_table

if TYPE_CHECKING:
    from sm_train.cost.explain import Term
    from sm_train.toolkit.planning.run_price import StageLimit

Document = dict[str, Any]

_STAGE_COLUMNS = (
    "name instance_type instances world_size resolution effective_batch_size max_steps "
    "steps_per_second throughput_basis training_seconds overhead_seconds billable_seconds "
    "instance_hours price_per_instance_hour_usd price_status price_source price_date cost_usd "
    "cost_low_usd cost_high_usd"
).split()


_PLATFORM_NOTE = (
    "HyperPod and EKS: the same hours at the on-demand price of HyperPod and of EC2, EKS with its "
    "control plane. A cluster is billed while it is idle, too; a training job is not."
)

_ALTERNATIVES_SHOWN = 20
_MOVES_SHOWN = 3
"""Assumptions on the default screen, those that move the total most."""


def show_cost(document: Document, run: str | None, scope: Iterable[tuple[str, str]] = ()) -> None:
    """Print the total, the stages, what moves the total most, one warning and the next command.

    ``run`` is the run file as given, and ``scope`` what
    :func:`~sm_train.toolkit.planning.scope.scope_rows` says of it. Everything else is under
    ``--explain``.
    """
    header, total, *stages = _stage_table(document, terminal_width())
    click.echo(click.style(header, bold=True))
    click.echo(click.style(total, bold=True))
    _print(stages)
    click.echo()
    moves = document["sensitivity"][:_MOVES_SHOWN]
    if moves:
        write_line("What moves the total most")
        _print(
            f"  {line}"
            for line in text_table(
                ("", ""),
                [
                    (_move_label(move, document), format_signed_usd(move["cost_delta_usd"]))
                    for move in moves
                ],
                left=1,
                width=terminal_width() - 2,
            )[1:]
        )
        click.echo()
    for label, text in scope:
        write_wrapped(f"{label.capitalize()}: {text}")
    for label in document.get("measured", []):
        write_wrapped(f"Speed: {label}")
    warnings = document["warnings"]
    if warnings:
        more = f" (and {len(warnings) - 1} more: --explain)" if len(warnings) > 1 else ""
        write_wrapped(f"Warning: {warnings[0]}{more}")
    write_wrapped(f"Next: {_after_estimate(document, run)}")


def _stage_table(document: Document, width: int) -> list[str]:
    """Return the table; columns that do not fit are left out, the least important first."""
    rows = [_total_row(document["total"]), *map(_stage_row, document["stages"])]
    header = ("stage", "cluster", "it/s", "time", "cost", "P10 to P90")
    for left_out in ((), (2,), (2, 5)):
        kept = [index for index in range(len(header)) if index not in left_out]
        names = [header[index] for index in kept]
        cells = [[row[index] for index in kept] for row in rows]
        if narrowest(names, cells, left=2) <= width:
            break
    return text_table(names, cells, left=2, width=width)


def _move_label(move: Document, document: Document) -> str:
    """Name an assumption, its value where it has one, and the change."""
    name = move["assumption"]
    if name == "it/s":
        bases = dict.fromkeys(stage["throughput_basis"] for stage in document["stages"])
        name = f"it/s ({', '.join(_basis_words(basis) for basis in bases)})"
    elif name == "price":
        statuses = dict.fromkeys(stage["price_status"] for stage in document["stages"])
        name = f"price ({', '.join(statuses)})"
    return f"{name} {move['change']}"


def _basis_words(basis: str) -> str:
    return "not measured" if basis in ("predicted", "unknown") else basis


def _after_estimate(document: Document, run: str | None) -> str:
    if run is None:
        return "sm-train init run.yaml describes the whole run, and is priced with its model"
    measured = document.get("measured")
    loose = [stage for stage in document["stages"] if stage["throughput_basis"] not in FIRM]
    if is_own_machine(document["stages"][0]["instance_type"]):
        return f"sm-train check {run}, or sm-train manifest {run} --to trainjob"
    if loose and not measured:
        stage = "" if loose[0] is document["stages"][0] else f" --stage {loose[0]['name']}"
        return f"sm-train measure {run}{stage} --dry-run, to measure a stage marked ~"
    return f"sm-train check {run}, or sm-train cost {run} --alternatives"


def show_explanation(
    document: Document,
    region: str,
    terms: Iterable[Term],
    limits: Iterable[StageLimit | None],
) -> None:
    """Print each number with its formula, then limits, prices, warnings and assumptions."""
    show_terms(terms)
    click.echo()
    write_list(
        "What limits each stage",
        [f"{limit.describe()}; {limit.describe_change()}" for limit in limits if limit],
    )
    prices = dict.fromkeys(_price_sentence(stage, region) for stage in document["stages"])
    write_list("\nPrices", list(prices))
    write_list("Warnings", document["warnings"])
    write_list("Assumptions", document["assumptions"])


def show_terms(terms: Iterable[Term]) -> None:
    """Print each number with its formula, inputs and source."""
    stage = None
    for term in terms:
        if term.stage != stage:
            click.echo(click.style(f"\n{term.stage}", bold=True))
            stage = term.stage
        write_wrapped(f"{term.name} = {term.value}", "  ")
        if term.formula not in (term.name, term.figures):
            write_wrapped(f"= {term.formula}", "      ")
        write_wrapped(f"= {term.figures}   [{term.source}]", "      ")


def show_alternatives(document: Document, summary: str) -> None:
    """Print the run's own cluster, the first alternatives, break-even points and batch splits."""
    shown = document["alternatives"][:_ALTERNATIVES_SHOWN]
    clusters = [document["own"], *shown]
    plans = [
        kind
        for kind in dict.fromkeys(
            kind for cluster in clusters for kind in cluster["purchase_options"]
        )
        if kind not in ("on-demand", "spot")
    ]
    header = [
        "cluster",
        "time",
        "on demand",
        "HyperPod",
        "EKS",
        "spot",
        *plans,
        "cheapest region",
        "memory",
        "it/s by",
    ]
    table = [
        [
            ("yours: " if cluster["own_cluster"] else "")
            + f"{'/'.join(map(str, dict.fromkeys(cluster['stage_instances'])))} × "
            + cluster["instance_type"],
            format_days(cluster["wall_seconds"]),
            _option(cluster, "on-demand"),
            *(_platform_usd(cluster, platform) for platform in ("hyperpod", "eks")),
            *(_option(cluster, kind) for kind in ("spot", *plans)),
            _region_words(cluster["cheapest_region"]),
            {True: "fits", False: "too small", None: "not planned"}[cluster["fits_memory"]],
            _basis_words(_least_reliable(cluster["throughput_basis"])),
        ]
        for cluster in clusters
    ]
    width = terminal_width()
    # Cheapest region, memory and basis are left out where the terminal is narrow.
    while narrowest(header, table, left=1) > width and len(header) > 5:
        header, table = header[:-1], [row[:-1] for row in table]
    _print(text_table(header, table, left=1, width=width))
    click.echo()
    write_wrapped(summary)
    omitted = len(document["alternatives"]) - len(shown)
    if omitted:
        write_line(f"{omitted:,} more; --json prints all")
    write_wrapped(_PLATFORM_NOTE)
    write_list("Break-even", [threshold["sentence"] for threshold in document["break_even"]])
    splits = [split for split in document["batch_splits"] if not split["own"]]
    if splits:
        click.echo(click.style("Batch per GPU × accumulation, at the same batch", bold=True))
    for split in splits:
        fits = "fits" if split["fits_memory"] else "does not fit in memory"
        write_wrapped(
            f"- {split['stage']}: {split['per_device_batch_size']} × "
            f"{split['gradient_accumulation_steps']}: ~{split['speedup']:.2f} × the speed, "
            f"{format_signed_usd(split['difference_usd'])}, {fits}",
            "  ",
        )


def _option(document: Document, kind: str) -> str:
    option = document["purchase_options"].get(kind)
    if option is None or option["cost_usd"] is None:
        return "unknown"
    return ("≥ " if option["at_least"] else "") + format_usd(option["cost_usd"])


def _platform_usd(document: Document, platform: str) -> str:
    [priced] = [priced for priced in document["platforms"] if priced["platform"] == platform]
    return "unknown" if priced["cost_usd"] is None else format_usd(priced["cost_usd"])


def _region_words(cheapest: Document | None) -> str:
    if cheapest is None:
        return "unknown"
    saved = 1 - cheapest["price_share"]
    return f"{cheapest['region']} −{saved:.0%}" if saved >= 0.005 else "this one"


def show_regions(rows: Sequence[Document]) -> None:
    """Print the cost in each region, cheapest first."""
    table = [
        (
            row["region"] + (" (yours)" if row["own_region"] else ""),
            row["price_status"],
            format_usd(row["price_per_instance_hour_usd"]),
            format_usd(row["cost_usd"]),
            format_compact_range(row),
            "" if row["own_region"] else format_signed_usd(row["difference_usd"]),
        )
        for row in rows
    ]
    header = ("region", "price", "$/instance-h", "cost", "P10 to P90", "difference")
    _print(text_table(header, table, left=2, width=terminal_width()))
    click.echo()
    write_wrapped(
        "Regions where EC2 offered the instance family in 2026-01; SageMaker may not offer it in "
        "all of them. The shards must be in the region: S3 charges $0.02 per GB between regions."
    )


def _least_reliable(bases: Sequence[str]) -> str:
    """Return the least reliable of the stages' throughput bases."""
    order = ("predicted", "other hardware", "other resolution", "scaled", "scaling fit")
    return next((basis for basis in order if basis in bases), bases[0])


def as_csv(document: Document) -> str:
    """Return the stages and, last, the total as CSV; unknown values are empty."""
    return format_csv(_STAGE_COLUMNS, [*document["stages"], {"name": "total", **document["total"]}])


def _total_row(total: Document) -> tuple[str, ...]:
    return (
        "total",
        "",
        "",
        format_days(total["wall_seconds"]),
        format_total_usd(total),
        format_compact_range(total),
    )


def format_compact_range(priced: Document) -> str:
    """Format the range with three significant digits; empty if either end is unknown."""
    low, high = priced["cost_low_usd"], priced["cost_high_usd"]
    return "" if low is None or high is None else f"{_compact_usd(low)}–{_compact_usd(high)}"


def _compact_usd(amount: float) -> str:
    for unit, size in (("M", 1e6), ("k", 1e3)):
        if amount >= 0.9995 * size:
            return f"${amount / size:#.3g}{unit}".replace(f".{unit}", unit)
    return format_usd(amount)


def _stage_row(stage: Document) -> tuple[str, ...]:
    firm = stage["throughput_basis"] in FIRM
    speed = stage["steps_per_second"]
    return (
        stage["name"],
        f"{stage['instances']} × {stage['instance_type']}",
        "not measured" if speed is None else ("" if firm else "~") + format_number(speed),
        format_days(stage["billable_seconds"]),
        format_total_usd(stage),
        format_compact_range(stage),
    )


def _price_sentence(stage: Document, region: str) -> str:
    price, name = stage["price_per_instance_hour_usd"], stage["instance_type"]
    if price is None:
        return f"{name}: price unknown in {region}; {stage['price_source']}"
    return (
        f"{name}: ${price:,.4f} per instance-hour in {region}; {stage['price_source']}, "
        f"{stage['price_date'] or 'undated'}"
    )


def _print(lines: Iterable[str]) -> None:
    for line in lines:
        write_line(line)
