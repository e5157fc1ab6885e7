"""``review --html``: one self-contained page, from the document of ``review --json``.

The template escapes whatever it is given: names and log lines come from outside.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from sm_train.toolkit.errors import UserError
from sm_train.toolkit.report_html.page import template, write_html
from sm_train.toolkit.review import comparison_table, waterfall
from sm_train.toolkit.review.charts import PROGRESS, Drawn, clock, draw
from sm_train.toolkit.review.model import LEVELS, SIGNS, Level, part_label
from sm_train.toolkit.review.series import Document, drawn
from sm_train.toolkit.terminal.formatting import format_duration, format_percent, format_usd

_WORDS: dict[Level, str] = {
    "good": "Good",
    "warning": "Warning",
    "bad": "Problem",
    "unknown": "Unknown",
}

_INTERRUPTIONS = ("stall", "error", "start")
_ROUTINE = ("checkpoint", "evaluation")
_MOST_EVENTS = 50
_MUCH_LONGER = 5


@dataclass(frozen=True)
class _Event:
    number: str
    kind: str
    after: str
    lasted: str
    label: str


@dataclass(frozen=True)
class _Job:
    """A job as the template shows it."""

    anchor: str
    document: Document
    began: str
    place: str
    unknown: str
    steps: list[waterfall.WaterfallBar]
    charts: list[Drawn]
    events: list[_Event]
    more_events: int
    routine: str


def write_page(path: Path, document: Document) -> None:
    """Write the page of a ``review --json`` document to ``path``, whole or not at all.

    Raises:
        UserError: matplotlib or Jinja2 is not installed, or the folder is not there.
    """
    write_html(path, page(document))


def page(document: Document) -> str:
    """The HTML. The same document gives the same text.

    Raises:
        UserError: matplotlib or Jinja2 is not installed.
    """
    try:
        from jinja2 import Environment, StrictUndefined
        from markupsafe import Markup
    except ModuleNotFoundError:
        raise UserError(
            '--html: needs Jinja2; install it with pip install "sm-train[report]"'
        ) from None
    jobs = document["jobs"]
    anchors = [f"job-{place + 1}" for place in range(len(jobs))]
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    return environment.from_string(template("review.html")).render(
        style=Markup(template("page.css")),
        drawing=Markup,
        words={level: (SIGNS[level], word) for level, word in _WORDS.items()},
        title=f"Review of {jobs[0]['name']}" if len(jobs) == 1 else f"Review of {len(jobs)} jobs",
        level=min((job["level"] for job in jobs), key=LEVELS.index, default="unknown"),
        headline=_headline(jobs),
        notes=document["notes"],
        names=[job["name"] for job in jobs],
        questions=_questions(jobs, anchors),
        figures=comparison_table.table(jobs),
        shares=_shares(jobs, document["parts"]) if len(jobs) > 1 else [],
        overlaid=_overlaid(jobs) if len(jobs) > 1 else [],
        jobs=[
            _job(job, anchor, document["parts"]) for job, anchor in zip(jobs, anchors, strict=True)
        ],
    )


def _headline(jobs: Sequence[Document]) -> str:
    """What was found, what it cost and how long it took."""
    counts = Counter(verdict["level"] for job in jobs for verdict in job["verdicts"])
    found = [
        _count(counts[level], words)
        for level, words in (
            ("bad", "problem"),
            ("warning", "warning"),
            ("unknown", "open question"),
        )
        if counts[level]
    ]
    if not found:
        found = ["all is well" if counts else "nothing could be judged"]
    passed = format_duration(sum(job["passed_seconds"] for job in jobs))
    return f"{_count(len(jobs), 'job')}: {', '.join(found)} · {_spent(jobs)} · {passed}"


def _spent(jobs: Sequence[Document]) -> str:
    """The dollars of all jobs. Without SageMaker's own figure the seconds are those in the log."""
    paid = [job for job in jobs if job["billed_usd"] is not None]
    if not paid:
        return "dollars unknown"
    how = "at least " if len(paid) < len(jobs) else ""
    how += "about " if any(job["billable_seconds"] is None for job in paid) else ""
    return how + format_usd(sum(job["billed_usd"] for job in paid))


def _count(number: int, word: str) -> str:
    return f"{number:,} {word}{'' if number == 1 else 's'}"


def _questions(
    jobs: Sequence[Document], anchors: Sequence[str]
) -> list[tuple[str, list[tuple[Level, str] | None]]]:
    """Each question with every job's level and the place of its answer, the worst first."""
    rows: dict[str, tuple[str, list[tuple[Level, str] | None]]] = {}
    for column, (job, anchor) in enumerate(zip(jobs, anchors, strict=True)):
        for number, verdict in enumerate(job["verdicts"]):
            empty: list[tuple[Level, str] | None] = [None] * len(jobs)
            _, cells = rows.setdefault(verdict["code"], (verdict["question"], empty))
            cells[column] = cells[column] or (verdict["level"], f"{anchor}-verdict-{number + 1}")
    return sorted(rows.values(), key=_worst)


def _worst(row: tuple[str, list[tuple[Level, str] | None]]) -> int:
    return min(LEVELS.index(cell[0]) for cell in row[1] if cell)


def _shares(jobs: Sequence[Document], parts: Sequence[str]) -> list[comparison_table.ComparisonRow]:
    """Where the time of each job went, as rows of the table of figures."""
    rows = []
    for part in parts:
        shares = [_share(job, part) for job in jobs]
        if any(shares):
            cells = (
                comparison_table.Cell(None if one is None else format_percent(one))
                for one in shares
            )
            rows.append(comparison_table.ComparisonRow(part_label(part), tuple(cells)))
    return rows


def _share(job: Document, part: str) -> float | None:
    total = sum((job["seconds"] or {}).values())
    return job["seconds"].get(part, 0.0) / total if total > 0 else None


def _overlaid(jobs: Sequence[Document]) -> list[Drawn]:
    """The charts that several jobs have, in one: of those whose first line stands for the job."""
    charts: dict[tuple[str, str], list[tuple[Document, Document]]] = {}
    for job in jobs:
        for chart in job["charts"]:
            if 1 <= len(chart["lines"]) <= 2 and drawn(chart):
                charts.setdefault((chart["code"], chart["unit"]), []).append((job, chart))
    return [
        _together(f"overlaid-{place + 1}", shared)
        for place, shared in enumerate(one for one in charts.values() if len(one) > 1)
    ]


def _together(name: str, shared: Sequence[tuple[Document, Document]]) -> Drawn:
    lengths = [_length(job) for job, _ in shared]
    time = clock(max(lengths))
    if max(lengths) > _MUCH_LONGER * min(lengths):
        time = PROGRESS
    lines = []
    for length, (job, chart) in zip(lengths, shared, strict=True):
        line = {**chart["lines"][0], "label": job["name"], "low": None, "high": None}
        if time is PROGRESS:
            line["times_seconds"] = [100 * one / length for one in line["times_seconds"]]
        lines.append(line)
    return draw(name, {**shared[0][1], "lines": lines}, time)


def _job(job: Document, anchor: str, parts: Sequence[str]) -> _Job:
    time = clock(_length(job))
    numbered, more = _numbered(job["marks"])
    charts = [
        draw(f"{anchor}-chart-{place + 1}", chart, time, numbered)
        for place, chart in enumerate(job["charts"])
    ]
    where = [f"{key} {job[key]}" for key in ("run", "stage") if job[key] is not None]
    return _Job(
        anchor=anchor,
        document=job,
        began=datetime.fromtimestamp(job["begin"], UTC).strftime("%Y-%m-%d %H:%M UTC"),
        place=", ".join(where),
        unknown=", ".join(comparison_table.unknown(job)),
        steps=waterfall.waterfall_bars(job, parts),
        charts=charts,
        events=[_event(mark, number) for mark, number in numbered if number],
        more_events=more,
        routine=_routine(job["marks"]),
    )


def _length(job: Document) -> float:
    """Seconds of the job, or to the last value of its charts, and never none."""
    lines = (line for chart in job["charts"] for line in chart["lines"])
    times = (float(one) for line in lines for one in line["times_seconds"])
    return max(1.0, float(job["passed_seconds"]), *times)


def _numbered(marks: Sequence[Document]) -> tuple[list[tuple[Document, str]], int]:
    """What charts show, by time, and how many interruptions more there were.

    An interruption has a number, by which it is explained. A job's first start is where its charts
    begin, and its end is where they end.
    """
    ordered = sorted(marks, key=lambda one: one["time_seconds"])
    first = next((mark for mark in ordered if mark["kind"] == "start"), None)
    interrupting = [
        mark for mark in ordered if mark["kind"] in _INTERRUPTIONS and mark is not first
    ]
    numbered = [(mark, str(place + 1)) for place, mark in enumerate(interrupting[:_MOST_EVENTS])]
    routine = [(mark, "") for mark in ordered if mark["kind"] in _ROUTINE]
    return numbered + routine, max(0, len(interrupting) - _MOST_EVENTS)


def _event(mark: Document, number: str) -> _Event:
    return _Event(
        number=number,
        kind="restart" if mark["kind"] == "start" else mark["kind"],
        after=format_duration(mark["time_seconds"]),
        lasted=format_duration(mark["seconds"]) if mark["seconds"] else "",
        label=mark["label"],
    )


def _routine(marks: Sequence[Document]) -> str:
    """How often the job did what its charts mark at their foot."""
    counts = Counter(mark["kind"] for mark in marks)
    return " and ".join(_count(counts[kind], kind) for kind in _ROUTINE if counts[kind])
