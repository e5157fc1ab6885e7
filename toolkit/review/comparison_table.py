"""The figures of jobs side by side: how each is written, who has the best and who the worst."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from sm_train.toolkit.review.series import Document, quantity
from sm_train.toolkit.terminal.formatting import format_duration, format_percent, format_usd

Rank = Literal["best", "worst"]


@dataclass(frozen=True)
class Figure:
    """A figure of jobs. Jobs are ranked by it where one end is ``better``, and they are ``alike``.

    ``alike`` names the figures in which jobs must agree before they can be held against each other,
    ``measured`` the one without which this one is only about right.
    """

    key: str
    label: str
    words: Callable[[Any], str]
    better: Literal["more", "less"] | None = None
    alike: tuple[str, ...] = ()
    measured: str | None = None

    def said(self, job: Document) -> str | None:
        """Of one job; None where it is unknown."""
        if job[self.key] is None:
            return None
        about = self.measured is not None and job[self.measured] is None
        return f"{'about ' if about else ''}{self.words(job[self.key])}"


@dataclass(frozen=True)
class Cell:
    """A job's figure. ``words`` is None where it is unknown."""

    words: str | None
    rank: Rank | None = None


@dataclass(frozen=True)
class ComparisonRow:
    """A figure of all jobs, in their order."""

    label: str
    cells: tuple[Cell, ...]


def signed_dollars(amount: float) -> str:
    """With its direction."""
    return f"{'−' if amount < 0 else '+'}{format_usd(abs(amount))}"


def _whole(value: float) -> str:
    return f"{value:,.0f}"


def _precise(value: float) -> str:
    return quantity(value, 4)


_WORK = ("resolution", "effective_batch_size")

GROUPS: tuple[tuple[str, tuple[Figure, ...]], ...] = (
    (
        "Time",
        (
            Figure("passed_seconds", "time passed", format_duration),
            Figure("billable_seconds", "time billed", format_duration),
            Figure("goodput", "goodput", format_percent, "more"),
            Figure("restarts", "restarts", _whole, "less"),
            Figure("stalls", "stalls", _whole, "less"),
        ),
    ),
    (
        "Speed",
        (
            Figure("steps_per_second", "iterations a second", quantity, "more", _WORK),
            Figure("images_per_second", "images a second", quantity, "more", ("resolution",)),
            Figure("mfu", "model FLOPs utilization", format_percent, "more"),
            Figure("gpu_utilization", "GPU utilization", format_percent, "more"),
            Figure("data_wait_share", "waiting for data", format_percent, "less"),
        ),
    ),
    (
        "Learning",
        (
            Figure("loss", "loss", _precise, "less", ("resolution",)),
            Figure("evaluation_loss", "loss in evaluation", _precise, "less", ("resolution",)),
            Figure("first_step", "first step", _whole),
            Figure("last_step", "last step", _whole),
            Figure("max_steps", "iterations planned", _whole),
        ),
    ),
    (
        "Dollars",
        (
            Figure("billed_usd", "dollars spent", format_usd, measured="billable_seconds"),
            Figure("estimate_usd", "dollars estimated", format_usd),
            Figure("difference_usd", "against the estimate", signed_dollars),
        ),
    ),
    (
        "Set-up",
        (
            Figure("status", "status", str),
            Figure("instance_type", "instance type", str),
            Figure("instances", "instances", _whole),
            Figure("world_size", "GPUs", _whole),
            Figure("backend", "backend", str),
            Figure("resolution", "resolution", lambda side: f"{side} px"),
            Figure("effective_batch_size", "effective batch", _whole),
        ),
    ),
)


def table(jobs: Sequence[Document]) -> list[tuple[str, list[ComparisonRow]]]:
    """Every figure that at least one job has, in groups."""
    groups = []
    for title, figures in GROUPS:
        rows = [_row(figure, jobs) for figure in figures]
        seen = [row for row in rows if any(cell.words is not None for cell in row.cells)]
        if seen:
            groups.append((title, seen))
    return groups


def unknown(job: Document) -> list[str]:
    """What of a job was not measured."""
    return [figure.label for _, figures in GROUPS for figure in figures if job[figure.key] is None]


def _row(figure: Figure, jobs: Sequence[Document]) -> ComparisonRow:
    values = [job[figure.key] for job in jobs]
    words = [figure.said(job) for job in jobs]
    best, worst = _ends(figure, jobs)
    ranks: list[Rank | None] = [
        None if value is None else "best" if value == best else "worst" if value == worst else None
        for value in values
    ]
    return ComparisonRow(figure.label, tuple(map(Cell, words, ranks)))


def _ends(figure: Figure, jobs: Sequence[Document]) -> tuple[Any, Any]:
    """The best and the worst value; None where nothing can be ranked."""
    ranked = [job for job in jobs if job[figure.key] is not None]
    conditions = {tuple(job[key] for key in figure.alike) for job in ranked}
    if figure.better is None or len(conditions) != 1 or None in next(iter(conditions)):
        return None, None
    low, high = (of(job[figure.key] for job in ranked) for of in (min, max))
    if figure.words(low) == figure.words(high):
        return None, None
    return (high, low) if figure.better == "more" else (low, high)
