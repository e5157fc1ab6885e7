"""What a job's seconds went into, each part a step down from all of them to the useful ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sm_train.toolkit.report_html.svg import PARTS
from sm_train.toolkit.review.model import part_label
from sm_train.toolkit.review.series import Document
from sm_train.toolkit.terminal.formatting import format_duration, format_percent, format_usd


@dataclass(frozen=True)
class WaterfallBar:
    """A bar: ``start`` and ``width`` are percent of all seconds."""

    label: str
    time: str
    share: str
    dollars: str | None
    """None where the job's dollars are unknown."""
    ink: str
    start: float
    width: float


def waterfall_bars(job: Document, parts: Sequence[str]) -> list[WaterfallBar]:
    """All seconds, what was lost of them part by part, and what was left; [] where unknown."""
    seconds = job["seconds"] or {}
    total = sum(seconds.values())
    if total <= 0:
        return []

    def step(label: str, ink: str, own: float, start: float) -> WaterfallBar:
        usd = None if job["billed_usd"] is None else format_usd(job["billed_usd"] * own / total)
        width = 100 * own / total
        return WaterfallBar(
            label, format_duration(own), format_percent(own / total), usd, ink, start, width
        )

    whole = "billed" if job["billable_seconds"] is not None else "passed"
    found = [step(whole, "muted", total, 0.0)]
    lost = [part for part in parts if part != "useful" and seconds.get(part, 0) > 0]
    left = total
    for part in lost:
        left -= seconds[part]
        found.append(
            step(part_label(part), part_ink(part), seconds[part], max(0.0, 100 * left / total))
        )
    found.append(step(part_label("useful"), part_ink("useful"), seconds.get("useful", 0.0), 0.0))
    return found


def part_ink(part: str) -> str:
    """The style sheet's name of a part's colour."""
    return f"part-{part}" if part in PARTS else "muted"
