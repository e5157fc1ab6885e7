"""Prints a result of the doctor."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sm_train.toolkit.terminal.console import escaped
from sm_train.toolkit.terminal.formatting import format_quantity, format_usd
from sm_train.toolkit.terminal.rich_table import rich_table

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

_STYLES = {"ok": "green", "warn": "yellow", "fail": "red"}


def show_result(document: dict[str, Any], console: Console) -> None:
    """Print figures, bandwidths between nodes, findings with their advice, and the sentence."""

    verdict, cluster = document["verdict"], document["measurements"]
    figures = ("measured", "expected", "share", "")
    table = rich_table(("part", *figures), right=figures)
    for part in verdict["parts"]:
        share = part["share"]
        table.add_row(
            escaped(part["name"]),
            format_quantity(part["measured"], part["unit"]),
            "" if part["expected"] is None else format_quantity(part["expected"], part["unit"]),
            "" if share is None else f"{share:.0%}",
            f"[{_STYLES[part['level']]}]{part['level']}[/]",
        )
    console.print(table)
    if len(cluster["nodes"]) > 2:
        console.print(_matrix(cluster))
    for finding in verdict["findings"]:
        style = _STYLES[finding["level"]]
        console.print(f"[{style}]{finding['level']}[/]  {escaped(finding['message'])}")
        console.print(f"      {escaped(finding['advice'])}")
    prediction = verdict["prediction"]
    if prediction:
        speed = prediction["predicted_steps_per_second"]
        text = f"predicted: {speed:.3g} it/s"
        if prediction["expected_steps_per_second"]:
            text += f" (expected {prediction['expected_steps_per_second']:.3g})"
        if prediction["predicted_usd"] is not None:
            text += f", {format_usd(prediction['predicted_usd'])} for the stage's training"
        console.print(f"{text}; from {prediction['basis']}", markup=False)
    console.print(verdict["sentence"], style=_STYLES[verdict["level"]], markup=False)


def _matrix(cluster: dict[str, Any]) -> Table:
    """Return a table of GB/s between nodes, in each direction."""
    sums: dict[tuple[int, int], float] = {}
    for pair in cluster["pairs"]:
        nodes = (pair["nodes"][0], pair["nodes"][1])
        sums[nodes] = sums.get(nodes, 0.0) + pair["bandwidth"]
    node_names = cluster["nodes"]
    header = ["", *map(escaped, node_names)]
    table = rich_table(header, right=header, title="GB/s between nodes")
    for row, name in enumerate(node_names):
        cells = []
        for column in range(len(node_names)):
            value = sums.get((min(row, column), max(row, column)))
            cells.append("" if value is None else f"{value / 1e9:.3g}")
        table.add_row(escaped(name), *cells)
    return table
