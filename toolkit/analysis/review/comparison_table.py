"""Builds the table that compares the figures of several jobs, with the best and worst of each."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from sm_train.toolkit.analysis.review.review_model import JobReview
from sm_train.toolkit.analysis.review.series import quantity
from sm_train.toolkit.terminal.formatting import (
    format_duration,
    format_percent,
    format_signed_usd,
    format_usd,
)

Rank = Literal["best", "worst"]


@dataclass(frozen=True)
class ComparedFigure:
    """A figure by which jobs are compared.

    Jobs are ranked by it if one direction is ``better`` and they agree in all ``comparable_if``
    figures. Without the figure ``exact_if`` it is only approximate.
    """

    key: str
    label: str
    format: Callable[[Any], str]
    better: Literal["more", "less"] | None = None
    comparable_if: tuple[str, ...] = ()
    exact_if: str | None = None

    def text(self, job: JobReview) -> str | None:
        """Format the figure of ``job``; return None if it is unknown."""
        value = _value(job, self.key)
        if value is None:
            return None
        approximate = self.exact_if is not None and _value(job, self.exact_if) is None
        return f"{'about ' if approximate else ''}{self.format(value)}"


@dataclass(frozen=True)
class Cell:
    """The figure of one job. ``text`` is None if it is unknown."""

    text: str | None
    rank: Rank | None = None


@dataclass(frozen=True)
class ComparisonRow:
    """One figure of all jobs, in their order."""

    label: str
    cells: tuple[Cell, ...]


def _integer(value: float) -> str:
    return f"{value:,.0f}"


def _precise(value: float) -> str:
    return quantity(value, 4)


_WORK = ("resolution", "effective_batch_size")

GROUPS: tuple[tuple[str, tuple[ComparedFigure, ...]], ...] = (
    (
        "Time",
        (
            ComparedFigure("passed_seconds", "elapsed time", format_duration),
            ComparedFigure("billable_seconds", "billed time", format_duration),
            ComparedFigure("goodput", "goodput", format_percent, "more"),
            ComparedFigure("restarts", "restarts", _integer, "less"),
            ComparedFigure("stalls", "stalls", _integer, "less"),
        ),
    ),
    (
        "Speed",
        (
            ComparedFigure("steps_per_second", "it/s", quantity, "more", _WORK),
            ComparedFigure("images_per_second", "images/s", quantity, "more", ("resolution",)),
            ComparedFigure("mfu", "model FLOPs utilization", format_percent, "more"),
            ComparedFigure("gpu_utilization", "GPU utilization", format_percent, "more"),
            ComparedFigure("data_wait_share", "waiting for data", format_percent, "less"),
        ),
    ),
    (
        "Loss and steps",
        (
            ComparedFigure("loss", "loss", _precise, "less", ("resolution",)),
            ComparedFigure("evaluation_loss", "evaluation loss", _precise, "less", ("resolution",)),
            ComparedFigure("first_step", "first step", _integer),
            ComparedFigure("last_step", "last step", _integer),
            ComparedFigure("max_steps", "planned steps", _integer),
        ),
    ),
    (
        "Cost",
        (
            ComparedFigure("billed_usd", "billed", format_usd, exact_if="billable_seconds"),
            ComparedFigure("estimate_usd", "estimated", format_usd),
            ComparedFigure("difference_usd", "difference to the estimate", format_signed_usd),
        ),
    ),
    (
        "Setup",
        (
            ComparedFigure("status", "status", str),
            ComparedFigure("instance_type", "instance type", str),
            ComparedFigure("instances", "instances", _integer),
            ComparedFigure("world_size", "processes", _integer),
            ComparedFigure("backend", "backend", str),
            ComparedFigure("resolution", "resolution", lambda side: f"{side} px"),
            ComparedFigure("effective_batch_size", "effective batch size", _integer),
        ),
    ),
)


def table(jobs: Sequence[JobReview]) -> list[tuple[str, list[ComparisonRow]]]:
    """Return all figures that at least one job has, by group."""
    groups = []
    for title, figures in GROUPS:
        rows = [_row(figure, jobs) for figure in figures]
        known = [row for row in rows if any(cell.text is not None for cell in row.cells)]
        if known:
            groups.append((title, known))
    return groups


def short_names(names: Sequence[str]) -> list[str]:
    """Return names without the folders that all of them have: those tell no job from another."""
    parts = [Path(name).parts for name in names]
    first = _common_count(parts)
    last = _common_count([part[first:][::-1] for part in parts])
    return [("…/" if first else "") + str(Path(*part[first : len(part) - last])) for part in parts]


def _common_count(parts: Sequence[Sequence[str]]) -> int:
    """Return how many first parts all have in common; each keeps at least one other."""
    shortest = min(map(len, parts)) - 1
    same = (len({part[index] for part in parts}) == 1 for index in range(shortest))
    return sum(itertools.takewhile(bool, same)) if len(parts) > 1 else 0


def unknown(job: JobReview) -> list[str]:
    """Return the labels of the figures that are unknown for ``job``."""
    every = [figure for _, figures in GROUPS for figure in figures]
    return [figure.label for figure in every if _value(job, figure.key) is None]


def _value(job: JobReview, key: str) -> Any:
    """Return a figure of the job, or its duration."""
    return job.passed_seconds if key == "passed_seconds" else getattr(job.figures, key)


def _row(figure: ComparedFigure, jobs: Sequence[JobReview]) -> ComparisonRow:
    values = [_value(job, figure.key) for job in jobs]
    texts = [figure.text(job) for job in jobs]
    best, worst = _best_and_worst(figure, jobs)
    # Values that look the same get the same badge.
    ranks: list[Rank | None] = [
        None if text is None else "best" if text == best else "worst" if text == worst else None
        for text in (None if value is None else figure.format(value) for value in values)
    ]
    return ComparisonRow(figure.label, tuple(map(Cell, texts, ranks)))


def _best_and_worst(
    figure: ComparedFigure, jobs: Sequence[JobReview]
) -> tuple[str, str] | tuple[None, None]:
    """Return the best and the worst value as shown; None if they differ in nothing shown."""
    ranked = [job for job in jobs if _value(job, figure.key) is not None]
    conditions = {tuple(_value(job, key) for key in figure.comparable_if) for job in ranked}
    if figure.better is None or len(conditions) != 1 or None in next(iter(conditions)):
        return None, None
    values = [_value(job, figure.key) for job in ranked]
    low, high = figure.format(min(values)), figure.format(max(values))
    if low == high:
        return None, None
    return (high, low) if figure.better == "more" else (low, high)
