"""Computes the waterfall of a job's time: from all seconds down to the useful ones, by part."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sm_train.toolkit.analysis.review.review_model import JobReview, part_label
from sm_train.toolkit.report_html.svg import PARTS
from sm_train.toolkit.terminal.formatting import format_duration, format_percent, format_usd


@dataclass(frozen=True)
class WaterfallBar:
    """One bar; ``start`` and ``width`` are percent of all seconds."""

    label: str
    time: str
    share: str
    cost: str | None
    """None if the job's cost is unknown."""
    color: str
    """The name of a custom property in page.css."""
    start: float
    width: float


def waterfall_bars(job: JobReview, parts: Sequence[str]) -> list[WaterfallBar]:
    """Return bars for all seconds, each lost part, and the useful rest; [] if unknown."""
    seconds = job.figures.seconds or {}
    total = sum(seconds.values())
    if total <= 0:
        return []

    def bar(label: str, color: str, duration: float, start: float) -> WaterfallBar:
        share = duration / total
        usd = None if job.figures.billed_usd is None else format_usd(job.figures.billed_usd * share)
        time = format_duration(duration)
        return WaterfallBar(label, time, format_percent(share), usd, color, start, 100 * share)

    total_label = "billed" if job.figures.billable_seconds is not None else "elapsed"
    bars = [bar(total_label, "muted", total, 0.0)]
    lost = [part for part in parts if part != "useful" and seconds.get(part, 0) > 0]
    left = total
    for part in lost:
        left -= seconds[part]
        start = max(0.0, 100 * left / total)
        bars.append(bar(part_label(part), part_color(part), seconds[part], start))
    useful = seconds.get("useful", 0.0)
    bars.append(bar(part_label("useful"), part_color("useful"), useful, 0.0))
    return bars


def part_color(part: str) -> str:
    """Return the custom property of page.css with the color of a part."""
    return f"part-{part}" if part in PARTS else "muted"
