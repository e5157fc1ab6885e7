"""Curves in numbers: fewer points of them, their range, and what is said of a chart in words."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

APART = 5.0

Document = dict[str, Any]
Values = Sequence[float | None]


@dataclass(frozen=True)
class SeriesRow:
    """Some curves from ``time_seconds`` on; None where a curve says nothing."""

    time_seconds: float
    values: tuple[float | None, ...]


def thinned(
    curves: Sequence[tuple[Sequence[float], Values]],
    rows: int,
    of_many: Callable[[Iterable[float]], float] = fmean,
) -> list[SeriesRow]:
    """At most ``rows`` rows, each of neighbouring times, whose values become one by ``of_many``."""
    times = sorted({time for own, _ in curves for time in own})
    size = max(1, -(-len(times) // rows))
    group = {time: place // size for place, time in enumerate(times)}
    columns = []
    for own, values in curves:
        known: list[list[float]] = [[] for _ in times[::size]]
        for time, value in zip(own, values, strict=True):
            if value is not None:
                known[group[time]].append(value)
        columns.append([of_many(some) if some else None for some in known])
    cells = zip(*columns, strict=True)
    return [SeriesRow(time, values) for time, values in zip(times[::size], cells, strict=True)]


def in_percent(chart: Document) -> Document:
    """A chart whose unit is shares of 1 as people read shares; any other as it is."""
    if chart["unit"] != "share":
        return chart
    lines = [
        line | {side: _hundredfold(line[side]) for side in ("values", "low", "high")}
        for line in chart["lines"]
    ]
    full = None if chart["full"] is None else 100 * chart["full"]
    return chart | {"unit": "%", "lines": lines, "full": full}


def _hundredfold(values: Values | None) -> Values | None:
    return None if values is None else [None if one is None else 100 * one for one in values]


def known(line: Document) -> list[float]:
    """The values of a line without its gaps."""
    return [value for value in line["values"] if value is not None]


def drawn(chart: Document) -> list[Document]:
    """The lines of a chart of which there is something to draw."""
    return [line for line in chart["lines"] if known(line)]


def extremes(line: Document) -> list[float]:
    """Everything that a line's drawing must have room for."""
    sides = (line["values"], line["low"] or (), line["high"] or ())
    return [value for side in sides for value in side if value is not None]


def apart(lines: Sequence[Document]) -> dict[int, str]:
    """Which of the lines is the lowest on average and which the highest, if it lies apart.

    Apart is farther from the middle than :data:`APART` times as far as half of the lines are, and
    farther than a hundredth of what is there: the extremes of noise are nobody's fault.
    """
    levels = [fmean(known(line)) for line in lines]
    middle = median(levels)
    usual = median(abs(level - middle) for level in levels)
    least = max(APART * usual, 0.01 * abs(middle))
    ends = {levels.index(min(levels)): "lowest", levels.index(max(levels)): "highest"}
    return {place: which for place, which in ends.items() if abs(levels[place] - middle) > least}


def quantity(value: float, digits: int = 3) -> str:
    """So many digits; whole numbers from a thousand on."""
    return f"{value:,.0f}" if 1e3 <= abs(value) < 1e9 else f"{value:.{digits}g}"


def summary(chart: Document) -> str:
    """A chart in a sentence without its title."""
    lines = drawn(chart)
    if not lines:
        return "Nothing was measured."
    every = [value for line in lines for value in known(line)]
    words = (
        f"{quantity(min(every))} to {quantity(max(every))}, median {quantity(median(every))}"
        + (f", last {quantity(known(lines[0])[-1])}" if len(lines) == 1 else "")
        if min(every) < max(every)
        else f"always {quantity(every[0])}"
    ) + _unit(chart)
    if chart["full"] is not None:
        words += f"; full is {quantity(chart['full'])}"
    return words + "."


def _unit(chart: Document) -> str:
    return chart["unit"] if chart["unit"] in ("", "%") else f" {chart['unit']}"
