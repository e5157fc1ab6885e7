"""``cost --html``: a self-contained page with costs, ranges and assumptions."""

from __future__ import annotations

import html
from collections.abc import Iterable
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING, Any

from sm_train.toolkit.report_html.html_page import STATIC_PAGE_POLICY, template, write_html
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

_PAGE = Template("""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="$policy">
<title>Cost of $name</title>
<style>
$style
.total { font-size: 1.6rem; margin-top: .25rem; }
.wide svg { min-width: 36rem; }
</style>
</head>
<body>
<h1>Cost of $name</h1>
<p class="total"><strong>$total</strong> $range, $days in $region</p>
$warnings
<div class="scroll wide" role="region" tabindex="0" aria-label="Dollars by stage">$chart</div>
<div class="scroll" role="region" tabindex="0" aria-labelledby="stages">$stages</div>
<h2>Assumptions</h2>
<ul>$assumptions</ul>
</body>
</html>
""")

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
    page = _PAGE.substitute(
        policy=STATIC_PAGE_POLICY,
        style=template("page.css"),
        name=html.escape(name),
        region=html.escape(region),
        total=format_total_usd(total),
        range=f"(P10 to P90: {cost_range})" if cost_range else "",
        days=f"{format_days(total['wall_seconds'])}"
        + (" days" if (total["wall_seconds"] or 0) >= 86400 else ""),
        warnings=_warnings(document["warnings"]),
        chart=_chart(document["stages"]),
        stages=_table(document),
        assumptions=_items(document["assumptions"]),
    )
    write_html(path, page)


def _warnings(sentences: list[str]) -> str:
    return f'<ul class="warnings">{_items(sentences)}</ul>' if sentences else ""


def _items(sentences: Iterable[str]) -> str:
    return "".join(f"<li>{html.escape(sentence)}</li>" for sentence in sentences)


def _table(document: Document) -> str:
    head = ("stage", "cluster", "it/s", "it/s by", "time", "cost", "P10 to P90")
    rows = [
        (
            stage["name"],
            f"{stage['instances']} × {stage['instance_type']}",
            format_number(stage["steps_per_second"]),
            stage["throughput_basis"],
            format_days(stage["billable_seconds"]),
            format_usd(stage["cost_usd"]),
            format_usd_range(stage) or "unknown",
        )
        for stage in document["stages"]
    ]
    header = "".join(f'<th scope="col">{cell}</th>' for cell in head)
    body = "".join(
        "<tr>" + "".join(f"<td>{html.escape(str(cell))}</td>" for cell in row) + "</tr>"
        for row in rows
    )
    return (
        f'<table><caption id="stages">Stages</caption>'
        f"<thead><tr>{header}</tr></thead>"
        f"<tbody>{body}</tbody></table>"
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
