"""Show the difference of two estimates: as a diff on the terminal, or as Markdown for a review."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import click
from sm_train.toolkit.terminal.formatting import (
    format_days,
    format_number,
    format_signed_usd,
    format_total_usd,
    format_usd,
    format_usd_range,
)
from sm_train.toolkit.terminal.text_table import terminal_width, text_table

Document = Mapping[str, Any]

_MARKS = {"added": "+", "removed": "-", "changed": "~"}
_COLORS = {"+": "green", "-": "red", "~": "yellow"}

_FIELDS: dict[str, tuple[str, Callable[[Any], str]]] = {
    "max_steps": ("max_steps", lambda steps: f"{steps:,}"),
    "effective_batch_size": ("effective batch", lambda images: f"{images:,}"),
    "steps_per_second": ("it/s", format_number),
    "billable_seconds": ("time", format_days),
    "price_per_instance_hour_usd": ("price of an instance-hour", format_usd),
}
"""Fields of a comparison that are not shown as they are in JSON: label and format."""


def show_comparison(document: Document) -> None:
    """Print the changed stages and what changed in each; the total comes last, as in a plan.

    ``document`` is that of ``cost --compare --json``.
    """
    difference = document["difference"]
    shown = [stage for stage in difference["stages"] if _change(stage) != "unchanged"]
    total = difference["total"]
    cells = [_cells(stage) for stage in shown]
    cells.append(("total", *_amounts(total["before_usd"], total["after_usd"], total)))
    lines = text_table(("", "before", "after", "difference"), cells, left=1, width=_width())
    header, *stages, last = lines
    click.echo(f"  {header}")
    for stage, line in zip(shown, stages, strict=True):
        mark = _MARKS[_change(stage)]
        click.echo(click.style(f"{mark} {line}", fg=_COLORS[mark]))
        for text in _field_lines(stage):
            click.echo(f"      {text}")
    unchanged = len(difference["stages"]) - len(shown)
    if unchanged:
        click.echo(f"  ({unchanged} unchanged)")
    click.echo(click.style(f"  {last}", bold=True))
    click.echo(f"  {_time_line(total)}")


def _width() -> int:
    return terminal_width() - 2


def comparison_markdown(document: Document, before: str, after: str) -> str:
    """Return the comparison as Markdown; ``before`` and ``after`` name the run files."""
    difference, priced = document["difference"], document["after"]
    total = difference["total"]
    rows = [
        f"| {_markdown_mark(stage)} | {_text(stage['name'])} | "
        f"{' | '.join(_amounts(stage['before_usd'], stage['after_usd'], stage))} |"
        for stage in difference["stages"]
    ]
    amounts = _amounts(total["before_usd"], total["after_usd"], total)
    changes = [
        f"- **{_text(stage['name'])}**: {_text(line)}"
        for stage in difference["stages"]
        for line in _field_lines(stage)
    ]
    details = ["", "<details><summary>What changed</summary>", "", *changes, "", "</details>"]
    lines = [
        f"### Training cost: {amounts[-1]}",
        "",
        "| | stage | before | after | difference |",
        "|---|---|--:|--:|--:|",
        *rows,
        f"| | **total** | {' | '.join(f'**{amount}**' for amount in amounts)} |",
        "",
        f"{_time_line(total)}.",
        *(details if changes else []),
        "",
        *_footer(priced),
        f"<sub>`sm-train cost {before} --compare {after}`</sub>",
    ]
    return "\n".join(lines) + "\n"


def estimate_markdown(document: Document, run: str) -> str:
    """Return an estimate as Markdown: the comment on a run file that did not exist before."""
    total = document["total"]
    rows = [
        f"| {_text(stage['name'])} | {stage['instances']} × {stage['instance_type']} | "
        f"{format_number(stage['steps_per_second'])} | {format_days(stage['billable_seconds'])} | "
        f"{format_usd(stage['cost_usd'])} |"
        for stage in document["stages"]
    ]
    lines = [
        f"### Training cost: {format_total_usd(total)}",
        "",
        "| stage | cluster | it/s | time | cost |",
        "|---|---|--:|--:|--:|",
        *rows,
        f"| **total** | | | **{format_days(total['wall_seconds'])}** | "
        f"**{format_total_usd(total)}** |",
        "",
        *_footer(document),
        f"<sub>`sm-train cost {run}`</sub>",
    ]
    return "\n".join(lines) + "\n"


def _markdown_mark(stage: Document) -> str:
    change = _change(stage)
    return "" if change == "unchanged" else f"`{_MARKS[change]}`"


def _footer(document: Document) -> Iterator[str]:
    """Yield the range of an estimate and its warnings, each followed by an empty line."""
    if interval := format_usd_range(document["total"]):
        yield f"P10 to P90: {interval}"
        yield ""
    for warning in document["warnings"]:
        yield f"> **Warning:** {_text(warning)}"
        yield ""


def _change(stage: Document) -> str:
    if stage["change"] != "kept":
        return str(stage["change"])
    moved = stage["fields"] or stage["difference_usd"]
    return "changed" if moved else "unchanged"


def _cells(stage: Document) -> tuple[str, ...]:
    return (stage["name"], *_amounts(stage["before_usd"], stage["after_usd"], stage))


def _amounts(before: float | None, after: float | None, document: Document) -> tuple[str, str, str]:
    """Return both costs and their difference, with its share of the cost before."""
    change = document.get("change", "kept")
    difference = document["difference_usd"]
    text = format_signed_usd(difference)
    if difference == 0:
        text = "no change"
    elif difference is not None and before and change == "kept":
        text += f" ({difference / before:+.1%})".replace("%", " %").replace("-", "−")
    return (
        "–" if change == "added" else format_usd(before),
        "–" if change == "removed" else format_usd(after),
        text,
    )


def _field_lines(stage: Document) -> list[str]:
    return [_field_line(field) for field in stage["fields"]]


def _field_line(field: Document) -> str:
    name, show = _FIELDS.get(field["field"], (field["field"], str))
    before, after = (_value(show, field[side]) for side in ("before", "after"))
    return f"{name}: {before} → {after}"


def _value(show: Callable[[Any], str], value: Any) -> str:
    return "unknown" if value is None else show(value)


def _time_line(total: Document) -> str:
    before, after = (format_days(total[f"{side}_seconds"]) for side in ("before", "after"))
    return f"Time: {before}" if before == after else f"Time: {before} → {after}"


_MARKDOWN = str.maketrans({mark: f"\\{mark}" for mark in "\\`*_{}[]<>#|!"})


def _text(value: str) -> str:
    """Return text with Markdown's marks escaped: names and warnings come from the run file."""
    return " ".join(value.translate(_MARKDOWN).split())
