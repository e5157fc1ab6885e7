"""``cost --html``: one self-contained page with the dollars, their range and what they rest on."""

from __future__ import annotations

import html
import io
from collections.abc import Iterable
from pathlib import Path
from string import Template
from typing import Any

from sm_train.entrypoints.files import write_whole
from sm_train.toolkit.amounts import days, dollar_range, dollars, number, total_dollars
from sm_train.toolkit.errors import UserError

Document = dict[str, Any]

_PAGE = Template("""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Cost of $name</title>
<style>
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem;
       color: #1b1f24; background: #fff; }
h1 { margin-bottom: 0; } .total { font-size: 1.6rem; margin-top: .25rem; }
.chart svg { width: 100%; height: auto; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; } caption { text-align: left; font-weight: 600; }
th, td { padding: .35rem .6rem; text-align: right; border-bottom: 1px solid #d7dce1; }
th:first-child, td:first-child { text-align: left; }
.warnings { border-left: 4px solid #b35900; padding-left: 1rem; }
</style>
</head>
<body>
<h1>Cost of $name</h1>
<p class="total"><strong>$total</strong> $range, $days in $region</p>
$warnings
<div class="chart">$chart</div>
<div class="scroll">$stages</div>
<h2>Assumptions</h2>
<ul>$assumptions</ul>
</body>
</html>
""")

_COLORS = {
    "training": "#2f6db5", "start_up": "#e08b2c", "checkpoints": "#7a5ba6",
    "evaluation": "#4c9f70", "restarts": "#c0453b", "warm_pool": "#8a8f98",
    "storage": "#c9a227", "requests": "#5fb3b3", "logs": "#a3718f",
}  # fmt: skip


def write_report(path: Path, name: str, document: Document, region: str) -> None:
    """Write the page of a ``cost --json`` document to ``path``, whole or not at all.

    Raises:
        UserError: matplotlib is not installed, or the folder is not there.
    """
    total = document["total"]
    span = dollar_range(total)
    page = _PAGE.substitute(
        name=html.escape(name),
        region=html.escape(region),
        total=total_dollars(total),
        range=f"(8 of 10 outcomes: {span})" if span else "",
        days=f"{days(total['wall_seconds'])}"
        + (" days" if (total["wall_seconds"] or 0) >= 86400 else ""),
        warnings=_warnings(document["warnings"]),
        chart=_chart(document["stages"]),
        stages=_table(document),
        assumptions=_items(document["assumptions"]),
    )
    try:
        write_whole(path, page.encode())
    except FileNotFoundError:
        raise UserError(f"--html: {path.parent}: no such folder; make it first") from None


def _warnings(sentences: list[str]) -> str:
    return f'<ul class="warnings">{_items(sentences)}</ul>' if sentences else ""


def _items(sentences: Iterable[str]) -> str:
    return "".join(f"<li>{html.escape(sentence)}</li>" for sentence in sentences)


def _table(document: Document) -> str:
    head = ("stage", "cluster", "it/s", "it/s by", "days", "cost", "P10 to P90")
    rows = [
        (
            stage["name"],
            f"{stage['instances']} × {stage['instance_type']}",
            number(stage["iterations_per_second"]),
            stage["throughput_basis"],
            days(stage["billable_seconds"]),
            dollars(stage["cost_usd"]),
            dollar_range(stage) or "unknown",
        )
        for stage in document["stages"]
    ]
    header = "".join(f'<th scope="col">{cell}</th>' for cell in head)
    body = "".join(
        "<tr>" + "".join(f"<td>{html.escape(str(cell))}</td>" for cell in row) + "</tr>"
        for row in rows
    )
    return (
        f"<table><caption>Stages</caption><thead><tr>{header}</tr></thead>"
        f"<tbody>{body}</tbody></table>"
    )


def _chart(stages: list[Document]) -> str:
    """A stacked bar for each stage, its range as a line across the end; SVG."""
    try:
        import matplotlib as mpl
    except ModuleNotFoundError:
        raise UserError(
            '--html: needs matplotlib; pip install "sm-train[report]" brings it'
        ) from None
    mpl.use("Agg")
    # Reproducible identifiers and no date: the same estimate gives the same page.
    mpl.rcParams["svg.hashsalt"] = "sm-train"
    from matplotlib import pyplot as plt
    from matplotlib.ticker import FuncFormatter

    figure, axes = plt.subplots(figsize=(9, 1.4 + 0.7 * len(stages)), layout="constrained")
    names = [stage["name"] for stage in stages]
    start = [0.0] * len(stages)
    for part, color in _COLORS.items():
        widths = [stage["breakdown_usd"].get(part) or 0.0 for stage in stages]
        if any(width > 0 for width in widths):
            axes.barh(names, widths, left=start, color=color, label=part.replace("_", " "))
            start = [one + width for one, width in zip(start, widths, strict=True)]
    for place, stage in enumerate(stages):
        if stage["cost_low_usd"] is not None and stage["cost_high_usd"] is not None:
            axes.plot(
                [stage["cost_low_usd"], stage["cost_high_usd"]], [place, place],
                color="#1b1f24", marker="|", markersize=14, linewidth=2,
                label="P10 to P90" if place == 0 else None,
            )  # fmt: skip
    axes.invert_yaxis()
    axes.set_xlim(left=0)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda amount, _: f"${amount:,.0f}"))
    axes.set_xlabel("dollars")
    if start and max(start) > 0:
        figure.legend(loc="outside lower center", ncols=5, frameon=False)
    text = io.StringIO()
    figure.savefig(
        text, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type"))
    )
    plt.close(figure)
    svg = text.getvalue()
    return svg[svg.index("<svg") :].replace(
        "<svg", '<svg role="img" aria-label="Dollars by stage"', 1
    )
