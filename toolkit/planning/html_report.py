"""``cost --html``: a self-contained page with costs, ranges and assumptions."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from sm_train.toolkit.report_html.html_page import render, write_html
from sm_train.toolkit.report_html.svg import css_color, inline_svg
from sm_train.toolkit.terminal.formatting import (
    format_days,
    format_number,
    format_total_usd,
    format_usd,
    format_usd_range,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Document = dict[str, Any]

_COLUMNS = ("stage", "cluster", "it/s", "it/s by", "time", "cost", "P10 to P90")

_BREAKDOWN = (
    "training",
    "start_up",
    "checkpoints",
    "evaluation",
    "restarts",
    "warm_pool",
    "storage",
    "uploads",
    "requests",
    "logs",
)


def write_report(path: Path, name: str, document: Document, region: str) -> None:
    """Write the page of a ``cost --json`` document to ``path``, atomically.

    Raises:
        UserError: matplotlib is not installed, or the folder does not exist.
    """
    total = document["total"]
    cost_range = format_usd_range(total)
    days = format_days(total["wall_seconds"])
    page = render(
        "cost.html",
        name=name,
        region=region,
        total=format_total_usd(total),
        range=f"(P10 to P90: {cost_range})" if cost_range else "",
        days=days + (" days" if (total["wall_seconds"] or 0) >= 86400 else ""),
        warnings=document["warnings"],
        chart=_chart(document["stages"]),
        header=_COLUMNS,
        rows=[_row(stage) for stage in document["stages"]],
        assumptions=document["assumptions"],
    )
    write_html(path, page)


def _row(stage: Document) -> tuple[str, ...]:
    return (
        stage["name"],
        f"{stage['instances']} × {stage['instance_type']}",
        format_number(stage["steps_per_second"]),
        stage["throughput_basis"],
        format_days(stage["billable_seconds"]),
        format_usd(stage["cost_usd"]),
        format_usd_range(stage) or "unknown",
    )


def _chart(stages: list[Document]) -> str:
    """Return an SVG with a stacked bar for each stage and its range as a line across the end."""
    size = (9, 1.4 + 0.7 * len(stages))
    return inline_svg("stages", "Dollars by stage", size, lambda axes: _plot(axes, stages))


def _plot(axes: Axes, stages: list[Document]) -> None:
    from matplotlib.ticker import FuncFormatter

    names = [stage["name"] for stage in stages]
    # The left edge of the next part in each stage's bar.
    left = [0.0] * len(stages)
    for part in _BREAKDOWN:
        widths = [stage["breakdown_usd"].get(part) or 0.0 for stage in stages]
        if any(width > 0 for width in widths):
            label = part.replace("_", " ")
            axes.barh(names, widths, left=left, color=css_color(f"part-{part}"), label=label)
            left = [edge + width for edge, width in zip(left, widths, strict=True)]
    for row, stage in enumerate(stages):
        if stage["cost_low_usd"] is not None and stage["cost_high_usd"] is not None:
            axes.plot(
                [stage["cost_low_usd"], stage["cost_high_usd"]],
                [row, row],
                color=css_color("text"),
                marker="|",
                markersize=14,
                linewidth=2,
                label="P10 to P90" if row == 0 else None,
            )
    axes.invert_yaxis()
    axes.set_xlim(left=0)
    axes.grid(visible=False, axis="y")
    axes.xaxis.set_major_formatter(FuncFormatter(lambda amount, _: f"${amount:,.0f}"))
    axes.set_xlabel("dollars")
    if left and max(left) > 0:
        axes.figure.legend(loc="outside lower center", ncols=5, frameon=False)
