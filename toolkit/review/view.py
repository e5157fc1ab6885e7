"""A review as people read it in a terminal, and as a table for spreadsheets."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from sm_train.cost.timeline import PARTS
from sm_train.toolkit.review.model import SIGNS, Level, Review, Reviewed, part_label
from sm_train.toolkit.terminal.formatting import (
    format_duration,
    format_number,
    format_percent,
    format_usd,
)

if TYPE_CHECKING:
    from rich.console import Console

_STYLES: dict[Level, str] = {"good": "green", "warning": "yellow", "bad": "red", "unknown": "dim"}
_BAR = 60


def show(review: Review, console: Console) -> None:
    """Several jobs side by side first, then each with its verdicts."""
    if len(review.jobs) > 1:
        _compare(review.jobs, console)
    for job in review.jobs:
        _show_job(job, console)
    for note in review.notes:
        console.print(f"note: {note}", markup=False)


def _show_job(job: Reviewed, console: Console) -> None:
    from rich.markup import escape
    from rich.table import Table

    figures = job.figures
    told = [
        f"{figures.instances} × {figures.instance_type}" if figures.instance_type else "",
        format_duration(job.end - job.begin),
        _cost(job),
        _steps(job),
    ]
    console.print(f"[bold]{escape(job.name)}[/]  {escape(', '.join(one for one in told if one))}")
    if figures.seconds:
        _bar(job, console)
    table = Table(box=None, pad_edge=False, show_header=False)
    for verdict in job.verdicts:
        told = [escape(verdict.sentence)]
        if verdict.level in ("bad", "warning"):
            told += [f"[dim]{escape(one)}[/]" for one in verdict.evidence[:3]]
            told += [f"→ {escape(verdict.fix)}"] if verdict.fix else []
        table.add_row(_sign(verdict.level), escape(verdict.question), "\n".join(told))
    console.print(table)
    console.print()


def _cost(job: Reviewed) -> str:
    if job.figures.billed_usd is None:
        return ""
    # Without SageMaker's own figure the seconds are those in the log.
    about = "about " if job.figures.billable_seconds is None else ""
    return about + format_usd(job.figures.billed_usd)


def _sign(level: Level) -> str:
    return f"[{_STYLES[level]}]{SIGNS[level]}[/]"


def _steps(job: Reviewed) -> str:
    figures = job.figures
    if figures.last_step is None:
        return ""
    of = f" of {figures.max_steps:,}" if figures.max_steps else ""
    return f"step {figures.first_step or 0:,} to {figures.last_step:,}{of}"


def _bar(job: Reviewed, console: Console) -> None:
    """What the seconds went into, as a bar and in words."""
    from rich.text import Text

    colours = ("green", "yellow", "red", "magenta", "red", "cyan", "blue", "yellow", "white")
    seconds = job.figures.seconds
    whole = sum(seconds.values()) or 1.0
    bar, words = Text(), Text()
    for part, colour in zip(("useful", *PARTS), colours, strict=True):
        share = seconds[part] / whole
        bar.append("█" * round(share * _BAR), style=colour)
        if share >= 0.005:
            words.append(f"{part_label(part)} {format_percent(share)}  ", style=colour)
    console.print(bar)
    console.print(words)


_COMPARED = (
    ("it/s", "steps_per_second", format_number),
    ("images/s", "images_per_second", lambda value: f"{value:,.0f}"),
    ("goodput", "goodput", format_percent),
    ("GPUs", "gpu_utilization", format_percent),
    ("MFU", "mfu", format_percent),
    ("data wait", "data_wait_share", format_percent),
    ("loss", "loss", lambda value: f"{value:.4f}"),
    ("cost", "billed_usd", format_usd),
)


def _compare(jobs: Sequence[Reviewed], console: Console) -> None:
    from rich.markup import escape
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("")
    table.add_column("job")
    for title, _, _ in _COMPARED:
        table.add_column(title, justify="right")
    for job in jobs:
        values = [(getattr(job.figures, name), words) for _, name, words in _COMPARED]
        cells = ["unknown" if value is None else words(value) for value, words in values]
        table.add_row(_sign(job.level), escape(job.name), *cells)
    console.print(table)
    console.print()


def csv_table(review: Review) -> str:
    """A row for each job: its figures, the seconds by part, the level of each verdict."""
    rows = [_row(job) for job in review.jobs]
    names = list(dict.fromkeys(name for row in rows for name in row))
    text = io.StringIO()
    writer = csv.DictWriter(text, names, restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def _row(job: Reviewed) -> dict[str, object]:
    figures = asdict(job.figures)
    seconds = figures.pop("seconds")
    known = {name: "" if value is None else value for name, value in figures.items()}
    return {
        "name": job.name,
        "run": job.run or "",
        "stage": job.stage or "",
        "level": job.level,
        "begin": job.begin,
        "passed_seconds": job.end - job.begin,
        **known,
        **{f"{part}_seconds": seconds.get(part, "") for part in ("useful", *PARTS)},
        **{f"verdict_{verdict.code}": verdict.level for verdict in job.verdicts},
    }
