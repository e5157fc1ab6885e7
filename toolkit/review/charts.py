"""A chart of a review as a drawing and what belongs to it: legend, words, table."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import isnan, nan
from statistics import fmean, median
from typing import TYPE_CHECKING, Literal

from sm_train.toolkit.report_html.svg import LINES, css_color, inline_svg
from sm_train.toolkit.review.series import (
    Document,
    Values,
    apart,
    drawn,
    extremes,
    in_percent,
    known,
    quantity,
    summary,
    thinned,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SIZE = (4.6, 2.5)
"""Inches at 72 points: on a narrow telephone a point is about a pixel."""

_DASHES = ("", "6 3", "2 2", "8 2 2 2")
_TABLE_ROWS = 40
_SHAPE_ROWS = 120
_UNITS = (("days", 86400.0, 3.0), ("hours", 3600.0, 3.0), ("minutes", 60.0, 3.0))


@dataclass(frozen=True)
class Key:
    """An entry of a legend: how a curve is drawn and what it is."""

    ink: str
    dash: str
    thin: bool
    words: str


@dataclass(frozen=True)
class _Mark:
    ink: str
    line: Literal["-", "-.", ":"]


_MARKS = {
    "stall": _Mark("part-stalls", "-"),
    "error": _Mark("bad", "-."),
    "start": _Mark("part-restarts", ":"),
}


@dataclass(frozen=True)
class Drawn:
    """A chart as the page shows it. ``svg`` is None where there is nothing to draw."""

    name: str
    title: str
    unit: str
    summary: str
    svg: str | None
    keys: tuple[Key, ...]
    silent: tuple[str, ...]
    """Lines without a value."""
    time_unit: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Clock:
    """The time axis of a job: all its charts have the same."""

    length: float
    unit: str
    seconds: float
    """Of one unit."""
    axis: str

    def __call__(self, seconds: float) -> float:
        return seconds / self.seconds


def clock(length: float) -> Clock:
    """In the largest unit of which ``length`` (seconds) has a few."""
    for unit, seconds, several in _UNITS:
        if length >= several * seconds:
            return Clock(length, unit, seconds, f"{unit} since the start")
    return Clock(max(length, 1.0), "seconds", 1.0, "seconds since the start")


PROGRESS = Clock(100.0, "% of each job's time", 1.0, "% of each job's time")
"""For times that are percent: of jobs that took very different times."""


def draw(
    name: str, chart: Document, time: Clock, marks: Sequence[tuple[Document, str]] = ()
) -> Drawn:
    """``marks`` are to be seen on the chart, with the number under which they are explained."""
    chart = in_percent(chart)
    lines = drawn(chart)
    words = summary(chart)
    said = f"{chart['title']} over {quantity(time(time.length))} {time.unit}: {words}"
    svg = None
    if lines:
        svg = inline_svg(name, said, SIZE, lambda axes: _paint(axes, chart, lines, time, marks))
    curves = [(line["times_seconds"], line["values"]) for line in lines]
    rows = thinned(curves, _TABLE_ROWS) if lines else []
    return Drawn(
        name=name,
        title=chart["title"],
        unit=chart["unit"],
        summary=words,
        svg=svg,
        keys=_keys(lines),
        silent=tuple(line["label"] for line in chart["lines"] if not known(line)),
        time_unit=time.unit,
        columns=tuple(line["label"] for line in lines),
        rows=tuple((quantity(time(row.time_seconds)), *map(_cell, row.values)) for row in rows),
    )


def _cell(value: float | None) -> str:
    return "–" if value is None else quantity(value, 4)


def _paint(
    axes: Axes,
    chart: Document,
    lines: Sequence[Document],
    time: Clock,
    marks: Sequence[tuple[Document, str]],
) -> None:
    """Marks below, then the full value, then the curves."""
    axes.set_xlim(0, time(time.length))
    axes.set_ylim(*_limits(chart, lines))
    axes.locator_params(nbins=5)
    axes.set_xlabel(time.axis)
    _paint_marks(axes, time, marks)
    if chart["full"] is not None:
        axes.axhline(chart["full"], color=css_color("muted"), linewidth=1, linestyle=(0, (4, 3)))
    if len(lines) > LINES:
        _paint_crowd(axes, lines, time)
        return
    for place, line in enumerate(lines):
        color = css_color(f"line-{place + 1}")
        _paint_band(axes, line["times_seconds"], line["low"], line["high"], time, color)
        _paint_line(axes, place, line, time, color, 1.4, _dash(place))


def _limits(chart: Document, lines: Sequence[Document]) -> tuple[float, float]:
    """From zero, for a rate that falls by a hundredth is steady; but a loss lives far from zero."""
    values = [value for line in lines for value in extremes(line)]
    if chart["full"] is not None:
        values.append(chart["full"])
    least, most = min(values), max(values)
    if least >= 0 and "loss" not in chart["code"]:
        least = 0.0
    room = 0.06 * (most - least) or 0.1 * abs(most) or 1.0
    return least - (room if least else 0.0), most + room


def _paint_line(
    axes: Axes, place: int, line: Document, time: Clock, color: str, width: float, dash: str = ""
) -> None:
    """A value between two gaps is no line: it gets a dot."""
    values = [nan if value is None else value for value in line["values"]]
    gap = [True, *map(isnan, values), True]
    alone = [at for at in range(len(values)) if gap[at] and gap[at + 2] and not gap[at + 1]]
    axes.plot(
        [time(seconds) for seconds in line["times_seconds"]],
        values,
        color=color,
        linewidth=width,
        gid=f"_line-{place + 1}",
        linestyle=(0, tuple(map(float, dash.split()))) if dash else "-",
        marker="o" if alone else None,
        markersize=3,
        markevery=alone or None,
    )


def _paint_band(
    axes: Axes,
    times: Sequence[float],
    low: Values | None,
    high: Values | None,
    time: Clock,
    color: str,
) -> None:
    if low is None or high is None:
        return
    bottom, top = ([nan if one is None else one for one in side] for side in (low, high))
    at = [time(one) for one in times]
    axes.fill_between(at, bottom, top, color=color, alpha=0.2, linewidth=0)


def _paint_crowd(axes: Axes, lines: Sequence[Document], time: Clock) -> None:
    """Of many curves: their extremes, their median, which lie apart, and faintly the others."""
    times, low = _shape(lines, "low", min)
    _, high = _shape(lines, "high", max)
    _paint_band(axes, times, low, high, time, css_color("muted"))
    named = apart(lines)
    for place, line in enumerate(lines):
        if place not in named:
            seconds, values = _shape([line], "values", fmean)
            faint = {"times_seconds": seconds, "values": values}
            _paint_line(axes, place, faint, time, css_color("muted"), 0.4)
    times, middle = _shape(lines, "values", median)
    gaps = [nan if value is None else value for value in middle]
    axes.plot([time(one) for one in times], gaps, color=css_color("text"), linewidth=1.2)
    for number, place in enumerate(named):
        _paint_line(axes, place, lines[place], time, css_color(f"line-{number + 1}"), 1.2)


def _shape(
    lines: Sequence[Document], side: str, of_many: Callable[[Iterable[float]], float]
) -> tuple[list[float], list[float | None]]:
    """One curve of some, from their values at neighbouring times."""
    curves = [(line["times_seconds"], line[side] or line["values"]) for line in lines]
    rows = thinned(curves, _SHAPE_ROWS, of_many)
    there = [[value for value in row.values if value is not None] for row in rows]
    return [row.time_seconds for row in rows], [of_many(some) if some else None for some in there]


def _paint_marks(axes: Axes, time: Clock, marks: Sequence[tuple[Document, str]]) -> None:
    """What stopped the job across the whole height with its number; the routine at the foot."""
    foot = axes.get_xaxis_transform()
    routine = [time(mark["time_seconds"]) for mark, number in marks if not number]
    axes.plot(
        routine,
        [0.03] * len(routine),
        transform=foot,
        color=css_color("muted"),
        linestyle="",
        marker="|",
        markersize=5,
    )
    for kind, style in _MARKS.items():
        own = [mark for mark, number in marks if number and mark["kind"] == kind]
        times = [time(mark["time_seconds"]) for mark in own]
        axes.vlines(
            times,
            0,
            1,
            transform=foot,
            colors=css_color(style.ink),
            linewidth=1,
            linestyles=style.line,
        )
        for at, mark in zip(times, own, strict=True):
            if mark["seconds"] > 0:
                until = at + time(mark["seconds"])
                axes.axvspan(at, until, color=css_color(style.ink), alpha=0.25, linewidth=0)
    labelled = -1.0
    for mark, number in marks:
        at = time(mark["time_seconds"])
        if number and at - labelled > 0.04 * time(time.length):
            axes.text(
                at, 1.0, number, transform=foot, ha="center", va="bottom", color=css_color("muted")
            )
            labelled = at


def _keys(lines: Sequence[Document]) -> tuple[Key, ...]:
    """One line alone is what the chart's title says."""
    if len(lines) == 1:
        return ()
    if len(lines) <= LINES:
        return tuple(
            Key(f"line-{place + 1}", _dash(place), False, line["label"])
            for place, line in enumerate(lines)
        )
    named = [
        Key(f"line-{number + 1}", "", False, f"{lines[place]['label']}, the {which} on average")
        for number, (place, which) in enumerate(apart(lines).items())
    ]
    return (
        *named,
        Key("text", "", False, f"median of all {len(lines)}"),
        Key("muted", "", True, "the others; shaded: from lowest to highest"),
    )


def _dash(place: int) -> str:
    return _DASHES[place % len(_DASHES)]
