"""Presents a review in the terminal and as CSV."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from sm_train.cost.timeline import PARTS
from sm_train.toolkit.analysis.review.comparison_table import short_names
from sm_train.toolkit.analysis.review.review_model import (
    SYMBOLS,
    JobReview,
    Level,
    Review,
    part_label,
)
from sm_train.toolkit.terminal.console import escaped
from sm_train.toolkit.terminal.csv_text import format_csv
from sm_train.toolkit.terminal.formatting import (
    format_duration,
    format_number,
    format_percent,
    format_projection,
    format_usd,
)
from sm_train.toolkit.terminal.rich_table import rich_table

if TYPE_CHECKING:
    from rich.console import Console

_STYLES: dict[Level, str] = {"good": "green", "warning": "yellow", "bad": "red", "unknown": "dim"}
_BAR_WIDTH = 60


def show(review: Review, console: Console) -> None:
    """Print the comparison of several jobs first, then each job with its verdicts."""
    if len(review.jobs) > 1:
        _compare(review.jobs, console)
    for job in review.jobs:
        _show_job(job, console)
    for name, run in review.runs.items():
        amounts = (run["spent_usd"], run["remaining_usd"], run["projected_usd"])
        console.print(f"{name}: {format_projection(*amounts)}", markup=False)
    for warning in review.warnings:
        console.print(f"warning: {warning}", markup=False)


def _show_job(job: JobReview, console: Console) -> None:
    figures = job.figures
    facts = [
        f"{figures.instances} × {figures.instance_type}" if figures.instance_type else "",
        format_duration(job.passed_seconds),
        _cost(job),
        _steps(job),
    ]
    console.print(
        f"[bold]{escaped(job.name)}[/]  {escaped(', '.join(fact for fact in facts if fact))}"
    )
    if figures.seconds:
        _bar(job, console)
    table = rich_table()
    for verdict in job.verdicts:
        answer = [escaped(verdict.sentence)]
        if verdict.level in ("bad", "warning"):
            answer += [f"[dim]{escaped(sentence)}[/]" for sentence in verdict.evidence[:3]]
            answer += [f"→ {escaped(verdict.fix)}"] if verdict.fix else []
        table.add_row(_symbol(verdict.level), escaped(verdict.question), "\n".join(answer))
    console.print(table)
    console.print()


def _cost(job: JobReview) -> str:
    if job.figures.billed_usd is None:
        return ""
    # Without a bill, the cost is that of the log's seconds.
    about = "about " if job.figures.billable_seconds is None else ""
    return about + format_usd(job.figures.billed_usd)


def _symbol(level: Level) -> str:
    return f"[{_STYLES[level]}]{SYMBOLS[level]}[/]"


def _steps(job: JobReview) -> str:
    figures = job.figures
    if figures.last_step is None:
        return ""
    planned = f" of {figures.max_steps:,}" if figures.max_steps else ""
    return f"step {figures.first_step or 0:,} to {figures.last_step:,}{planned}"


def _bar(job: JobReview, console: Console) -> None:
    """Print the parts of the job's seconds as a bar and as text."""
    from rich.text import Text

    colors = ("green", "yellow", "red", "magenta", "red", "cyan", "blue", "yellow", "white")
    seconds = job.figures.seconds or {}
    total = sum(seconds.values()) or 1.0
    bar, labels = Text(), Text()
    for part, color in zip(("useful", *PARTS), colors, strict=True):
        share = seconds.get(part, 0.0) / total
        bar.append("█" * round(share * _BAR_WIDTH), style=color)
        if share >= 0.005:
            labels.append(f"{part_label(part)} {format_percent(share)}  ", style=color)
    console.print(bar)
    console.print(labels)


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


def _compare(jobs: Sequence[JobReview], console: Console) -> None:
    figures = [title for title, _, _ in _COMPARED]
    table = rich_table(["", "job", *figures], right=figures)
    names = short_names([job.name for job in jobs])
    for job, name in zip(jobs, names, strict=True):
        values = [(getattr(job.figures, name), text) for _, name, text in _COMPARED]
        cells = ["unknown" if value is None else text(value) for value, text in values]
        table.add_row(_symbol(job.level), escaped(name), *cells)
    console.print(table)
    console.print()


def csv_table(review: Review) -> str:
    """Return one row per job: its figures, its seconds by part, the level of each verdict."""
    rows = [_row(job) for job in review.jobs]
    names = list(dict.fromkeys(name for row in rows for name in row))
    return format_csv(names, rows)


def _row(job: JobReview) -> dict[str, object]:
    figures = asdict(job.figures)
    seconds = figures.pop("seconds")
    known = {name: "" if value is None else value for name, value in figures.items()}
    return {
        "name": job.name,
        "run": job.run or "",
        "stage": job.stage or "",
        "level": job.level,
        "begin": job.begin,
        "passed_seconds": job.passed_seconds,
        **known,
        **{f"{part}_seconds": seconds.get(part, "") for part in ("useful", *PARTS)},
        **{f"verdict_{verdict.code}": verdict.level for verdict in job.verdicts},
    }
