"""Renders ``review --html``: a self-contained page of a review."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from sm_train.toolkit.analysis.review import comparison_table, waterfall
from sm_train.toolkit.analysis.review.charts import (
    PROGRESS,
    RenderedChart,
    render_chart,
    step_axis,
    steps_at,
    time_axis,
)
from sm_train.toolkit.analysis.review.review_model import (
    LEVELS,
    SYMBOLS,
    Chart,
    JobReview,
    Level,
    Mark,
    MarkKind,
    Review,
    part_label,
)
from sm_train.toolkit.analysis.review.series import lines_with_values
from sm_train.toolkit.analysis.review.setting_differences import differences
from sm_train.toolkit.base.extras import require_extra
from sm_train.toolkit.planning.spent import ProjectionDocument
from sm_train.toolkit.report_html.html_page import render, write_html
from sm_train.toolkit.terminal.formatting import (
    format_duration,
    format_percent,
    format_projection,
    format_usd,
    plural,
)

_LEVEL_LABELS: dict[Level, str] = {
    "good": "Good",
    "warning": "Warning",
    "bad": "Problem",
    "unknown": "Unknown",
}

_INTERRUPTIONS = ("stall", "error", "start")
_ROUTINE: tuple[MarkKind, ...] = ("checkpoint", "evaluation")
_MAX_EVENTS = 50
_MAX_LENGTH_RATIO = 5
"""Jobs whose durations differ by more are overlaid by progress instead of time."""


@dataclass(frozen=True)
class _Interruption:
    number: str
    kind: str
    after: str
    duration: str
    label: str


@dataclass(frozen=True)
class _JobSection:
    """The values of a job that the template renders."""

    anchor: str
    review: JobReview
    began: str
    run_and_stage: str
    unknown: str
    waterfall: list[waterfall.WaterfallBar]
    charts: list[RenderedChart]
    interruptions: list[_Interruption]
    more_interruptions: int
    routine: str


def write_page(path: Path, review: Review) -> None:
    """Write the page of a review to ``path`` atomically.

    Raises:
        UserError: matplotlib is not installed, or the folder does not exist.
    """
    write_html(path, page(review))


def page(review: Review) -> str:
    """Return the HTML, which is deterministic for a review.

    Raises:
        UserError: matplotlib is not installed.
    """
    require_extra("report", "matplotlib", purpose="a page with charts")
    jobs = review.jobs
    anchors = [f"job-{index + 1}" for index in range(len(jobs))]
    return render(
        "review.html",
        levels={level: (SYMBOLS[level], label) for level, label in _LEVEL_LABELS.items()},
        title=f"Review of {jobs[0].name}" if len(jobs) == 1 else f"Review of {len(jobs)} jobs",
        level=min((job.level for job in jobs), key=LEVELS.index, default="unknown"),
        headline=_headline(jobs),
        warnings=review.warnings,
        runs=[(name, _amounts(amounts)) for name, amounts in review.runs.items()],
        names=comparison_table.short_names([job.name for job in jobs]),
        questions=_questions(jobs, anchors),
        figures=comparison_table.table(jobs),
        shares=_shares(jobs, review.parts) if len(jobs) > 1 else [],
        overlaid=_overlaid(jobs) if len(jobs) > 1 else [],
        differences=differences([job.settings for job in jobs]),
        jobs=[
            _job_section(job, anchor, review.parts)
            for job, anchor in zip(jobs, anchors, strict=True)
        ],
    )


def _amounts(run: ProjectionDocument) -> str:
    return format_projection(run["spent_usd"], run["remaining_usd"], run["projected_usd"])


def _headline(jobs: Sequence[JobReview]) -> str:
    """Summarize the number of problems, the cost and the duration of all jobs."""
    counts = Counter(verdict.level for job in jobs for verdict in job.verdicts)
    nouns: dict[Level, str] = {"bad": "problem", "warning": "warning", "unknown": "open question"}
    problems = [plural(counts[level], noun) for level, noun in nouns.items() if counts[level]]
    if not problems:
        problems = ["no problems" if counts else "no verdicts"]
    elapsed = format_duration(sum(job.passed_seconds for job in jobs))
    return f"{plural(len(jobs), 'job')}: {', '.join(problems)} · {_spent(jobs)} · {elapsed}"


def _spent(jobs: Sequence[JobReview]) -> str:
    """Describe the cost of all jobs. It is approximate if only the log's seconds are known."""
    paid = [job for job in jobs if job.figures.billed_usd is not None]
    total = sum(job.figures.billed_usd or 0.0 for job in paid)
    if not paid:
        return "cost unknown"
    qualifier = "at least " if len(paid) < len(jobs) else ""
    qualifier += "about " if any(job.figures.billable_seconds is None for job in paid) else ""
    return qualifier + format_usd(total)


def _questions(
    jobs: Sequence[JobReview], anchors: Sequence[str]
) -> list[tuple[str, list[tuple[Level, str] | None]]]:
    """Return each question with every job's level and the anchor of its verdict, worst first."""
    rows: dict[str, tuple[str, list[tuple[Level, str] | None]]] = {}
    for column, (job, anchor) in enumerate(zip(jobs, anchors, strict=True)):
        for number, verdict in enumerate(job.verdicts):
            empty: list[tuple[Level, str] | None] = [None] * len(jobs)
            _, cells = rows.setdefault(verdict.code, (verdict.question, empty))
            cells[column] = cells[column] or (verdict.level, f"{anchor}-verdict-{number + 1}")
    return sorted(rows.values(), key=_worst_level)


def _worst_level(row: tuple[str, list[tuple[Level, str] | None]]) -> int:
    return min(LEVELS.index(cell[0]) for cell in row[1] if cell)


def _shares(
    jobs: Sequence[JobReview], parts: Sequence[str]
) -> list[comparison_table.ComparisonRow]:
    """Return the shares of each job's time by part, as rows of the comparison table."""
    rows = []
    for part in parts:
        shares = [_share(job, part) for job in jobs]
        if any(shares):
            cells = (
                comparison_table.Cell(None if share is None else format_percent(share))
                for share in shares
            )
            rows.append(comparison_table.ComparisonRow(part_label(part), tuple(cells)))
    return rows


def _share(job: JobReview, part: str) -> float | None:
    seconds: Mapping[str, float] = job.figures.seconds or {}
    total = sum(seconds.values())
    return seconds.get(part, 0.0) / total if total > 0 else None


def _overlaid(jobs: Sequence[JobReview]) -> list[RenderedChart]:
    """Combine the charts that several jobs have, if their first line represents the whole job."""
    charts: dict[tuple[str, str], list[tuple[JobReview, Chart]]] = {}
    for job in jobs:
        for chart in job.charts:
            if 1 <= len(chart.lines) <= 2 and lines_with_values(chart):
                charts.setdefault((chart.code, chart.unit), []).append((job, chart))
    return [
        _overlay(f"overlaid-{index + 1}", shared)
        for index, shared in enumerate(
            charts_of_metric for charts_of_metric in charts.values() if len(charts_of_metric) > 1
        )
    ]


def _overlay(name: str, shared: Sequence[tuple[JobReview, Chart]]) -> RenderedChart:
    """Overlay a chart of several jobs by step, or without the steps of one by time or progress."""
    lengths = [_length(job) for job, _ in shared]
    axis = time_axis(max(lengths))
    if max(lengths) > _MAX_LENGTH_RATIO * min(lengths):
        axis = PROGRESS
    progress = [job.progress for job, _ in shared]
    known = [series for series in progress if series is not None]
    by_step = len(known) == len(shared)
    if by_step:
        axis = step_axis(
            min(series.steps[0] for series in known), max(series.steps[-1] for series in known)
        )
    lines = []
    labels = comparison_table.short_names([job.name for job, _ in shared])
    for label, length, reached, (_, chart) in zip(labels, lengths, progress, shared, strict=True):
        line = replace(chart.lines[0], label=label, low=None, high=None)
        if by_step and reached is not None:
            line = replace(line, times_seconds=steps_at(reached, line.times_seconds))
        elif axis is PROGRESS:
            times = [100 * seconds / length for seconds in line.times_seconds]
            line = replace(line, times_seconds=times)
        lines.append(line)
    combined = replace(shared[0][1], lines=tuple(lines))
    return render_chart(name, combined, axis)


def _job_section(job: JobReview, anchor: str, parts: Sequence[str]) -> _JobSection:
    axis = replace(time_axis(_length(job)), progress=job.progress)
    numbered, more = _numbered(job.marks)
    charts = [
        render_chart(f"{anchor}-chart-{index + 1}", chart, axis, numbered)
        for index, chart in enumerate(job.charts)
    ]
    names = (("run", job.run), ("stage", job.stage))
    return _JobSection(
        anchor=anchor,
        review=job,
        began=datetime.fromtimestamp(job.begin, UTC).strftime("%Y-%m-%d %H:%M UTC"),
        run_and_stage=", ".join(f"{key} {name}" for key, name in names if name is not None),
        unknown=", ".join(comparison_table.unknown(job)),
        waterfall=waterfall.waterfall_bars(job, parts),
        charts=charts,
        interruptions=[_interruption(mark, number) for mark, number in numbered if number],
        more_interruptions=more,
        routine=_routine(job.marks),
    )


def _length(job: JobReview) -> float:
    """Return the job's seconds, or those to the last value of its charts; at least 1."""
    lines = (line for chart in job.charts for line in chart.lines)
    times = (float(second) for line in lines for second in line.times_seconds)
    return max(1.0, float(job.passed_seconds), *times)


def _numbered(
    marks: Sequence[Mark],
) -> tuple[list[tuple[Mark, str]], int]:
    """Return the marks to plot, and the number of further interruptions.

    Interruptions get a number, under which the page explains them; routine marks get "". The first
    start and the end are not plotted, as they coincide with the ends of the time axis.
    """
    ordered = sorted(marks, key=lambda mark: mark.time_seconds)
    first = next((mark for mark in ordered if mark.kind == "start"), None)
    interrupting = [mark for mark in ordered if mark.kind in _INTERRUPTIONS and mark is not first]
    numbered = [(mark, str(index + 1)) for index, mark in enumerate(interrupting[:_MAX_EVENTS])]
    routine = [(mark, "") for mark in ordered if mark.kind in _ROUTINE]
    return numbered + routine, max(0, len(interrupting) - _MAX_EVENTS)


def _interruption(mark: Mark, number: str) -> _Interruption:
    return _Interruption(
        number=number,
        kind="restart" if mark.kind == "start" else mark.kind,
        after=format_duration(mark.time_seconds),
        duration=format_duration(mark.seconds) if mark.seconds else "",
        label=mark.label,
    )


def _routine(marks: Sequence[Mark]) -> str:
    """Describe the number of the marks at the bottom of the charts."""
    counts = Counter(mark.kind for mark in marks)
    return " and ".join(plural(counts[kind], kind) for kind in _ROUTINE if counts[kind])
