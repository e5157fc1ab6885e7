"""Renders a chart of a review: its SVG plot, legend, summary and table."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import isnan, nan
from statistics import fmean, median
from typing import TYPE_CHECKING, Literal

import numpy as np
from sm_train.toolkit.analysis.review.review_model import Chart, Curve, Mark, StepProgress
from sm_train.toolkit.analysis.review.series import (
    Values,
    extremes,
    in_percent,
    known,
    lines_with_values,
    outliers,
    quantity,
    resample,
    summary,
)
from sm_train.toolkit.report_html.svg import LINES, css_color, inline_svg

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SIZE, SIZE_WITH_STEPS = (4.6, 2.5), (4.6, 2.9)
"""Inches at 72 points per inch: on a narrow phone a point is about a pixel."""

_DASHES = ("", "6 3", "2 2", "8 2 2 2")
_TABLE_ROWS = 40
_ENVELOPE_ROWS = 120
_UNITS = (("days", 86400.0, 3.0), ("hours", 3600.0, 3.0), ("minutes", 60.0, 3.0))


@dataclass(frozen=True)
class LegendEntry:
    """The style and label of a curve; ``color`` is a custom property of page.css."""

    color: str
    dash: str
    thin: bool
    label: str


@dataclass(frozen=True)
class _MarkStyle:
    color: str
    line: Literal["-", "-.", ":"]


_MARK_STYLES = {
    "stall": _MarkStyle("part-stalls", "-"),
    "error": _MarkStyle("bad", "-."),
    "start": _MarkStyle("part-restarts", ":"),
}


@dataclass(frozen=True)
class RenderedChart:
    """A chart as shown on the page. ``svg`` is None if there are no values."""

    name: str
    title: str
    unit: str
    summary: str
    svg: str | None
    legend: tuple[LegendEntry, ...]
    without_values: tuple[str, ...]
    """The labels of lines without any value."""
    time_unit: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class TimeAxis:
    """The time axis that all charts of a job share; ``length`` and ``begin`` are in seconds.

    A second axis shows the steps of ``progress``, if there is one.
    """

    length: float
    unit: str
    unit_seconds: float
    label: str
    begin: float = 0.0
    progress: StepProgress | None = None

    def __call__(self, seconds: float) -> float:
        return seconds / self.unit_seconds


def time_axis(length: float) -> TimeAxis:
    """Return an axis of ``length`` seconds in the largest unit that fits at least three times."""
    for unit, seconds, least in _UNITS:
        if length >= least * seconds:
            return TimeAxis(length, unit, seconds, f"{unit} since the start")
    return TimeAxis(max(length, 1.0), "seconds", 1.0, "seconds since the start")


def step_axis(first: float, last: float) -> TimeAxis:
    """Return an axis of steps, on which charts have steps in place of seconds."""
    return TimeAxis(max(last, first + 1), "step", 1.0, "step", begin=first)


def steps_at(progress: StepProgress, times: Sequence[float]) -> list[float]:
    """Return the steps that were reached at ``times``."""
    steps: list[float] = np.interp(times, progress.times_seconds, progress.steps).tolist()
    return steps


PROGRESS = TimeAxis(100.0, "% of each job's time", 1.0, "% of each job's time")
"""An axis in percent, for jobs of very different durations."""


def render_chart(
    name: str,
    chart: Chart,
    axis: TimeAxis,
    marks: Sequence[tuple[Mark, str]] = (),
) -> RenderedChart:
    """Render ``chart`` with ``marks``, each with the number under which it is explained, or ""."""
    chart = in_percent(chart)
    lines = lines_with_values(chart)
    text = summary(chart)
    alt_text = f"{chart.title} over {quantity(axis(axis.length))} {axis.unit}: {text}"
    svg = None
    if lines:
        size = SIZE if axis.progress is None else SIZE_WITH_STEPS
        svg = inline_svg(name, alt_text, size, lambda axes: _plot(axes, chart, lines, axis, marks))
    curves = [(line.times_seconds, line.values) for line in lines]
    rows = resample(curves, _TABLE_ROWS) if lines else []
    return RenderedChart(
        name=name,
        title=chart.title,
        unit=chart.unit,
        summary=text,
        svg=svg,
        legend=_legend(lines),
        without_values=tuple(line.label for line in chart.lines if not known(line)),
        time_unit=axis.unit,
        columns=tuple(line.label for line in lines),
        rows=tuple((quantity(axis(row.time_seconds)), *map(_cell, row.values)) for row in rows),
    )


def _cell(value: float | None) -> str:
    return "–" if value is None else quantity(value, 4)


def _plot(
    axes: Axes,
    chart: Chart,
    lines: Sequence[Curve],
    axis: TimeAxis,
    marks: Sequence[tuple[Mark, str]],
) -> None:
    """Plot marks first, then the maximum, then the curves on top."""
    axes.set_xlim(axis(axis.begin), axis(axis.length))
    axes.set_ylim(*_limits(chart, lines))
    axes.locator_params(nbins=5)
    axes.set_xlabel(axis.label)
    if axis.progress is not None:
        _plot_steps(axes, axis, axis.progress)
    _plot_marks(axes, axis, marks)
    if chart.full is not None:
        axes.axhline(chart.full, color=css_color("muted"), linewidth=1, linestyle=(0, (4, 3)))
    if len(lines) > LINES:
        _plot_many(axes, lines, axis)
        return
    for index, line in enumerate(lines):
        color = css_color(f"line-{index + 1}")
        _plot_band(axes, line.times_seconds, line.low, line.high, axis, color)
        _plot_line(axes, index, line.times_seconds, line.values, axis, color, 1.4, _dash(index))


def _plot_steps(axes: Axes, axis: TimeAxis, progress: StepProgress) -> None:
    """Add an axis with round steps at the times at which they were reached."""
    from matplotlib.ticker import MaxNLocator

    times, steps = progress.times_seconds, progress.steps
    ticks = MaxNLocator(nbins=5, integer=True).tick_values(steps[0], steps[-1])
    shown = [float(step) for step in ticks if steps[0] <= step <= steps[-1]]
    below = axes.secondary_xaxis(-0.3)
    reached = [axis(time) for time in np.interp(shown, steps, times).tolist()]
    below.set_xticks(reached, [_short(step) for step in shown])
    below.set_xlabel("step")


def _short(step: float) -> str:
    """Format a step for a tick, as 40k or 1.2M."""
    for unit, size in (("M", 1e6), ("k", 1e4)):
        if step >= size:
            return f"{step / (1e6 if unit == 'M' else 1e3):g}{unit}"
    return f"{step:g}"


def _limits(chart: Chart, lines: Sequence[Curve]) -> tuple[float, float]:
    """Return the range of the y axis.

    It starts at zero, so that a rate that falls by 1 % looks steady, except for losses.
    """
    values = [value for line in lines for value in extremes(line)]
    if chart.full is not None:
        values.append(chart.full)
    least, most = min(values), max(values)
    if least >= 0 and "loss" not in chart.code:
        least = 0.0
    margin = 0.06 * (most - least) or 0.1 * abs(most) or 1.0
    return least - (margin if least else 0.0), most + margin


def _plot_line(
    axes: Axes,
    index: int,
    times_seconds: Sequence[float],
    values: Values,
    axis: TimeAxis,
    color: str,
    width: float,
    dash: str = "",
) -> None:
    """Plot a curve; a value between two gaps would be invisible as a line and becomes a dot."""
    y = [nan if value is None else value for value in values]
    # gap[i + 1] belongs to y[i]: the ends count as gaps.
    gap = [True, *map(isnan, y), True]
    isolated = [i for i in range(len(y)) if gap[i] and gap[i + 2] and not gap[i + 1]]
    axes.plot(
        [axis(seconds) for seconds in times_seconds],
        y,
        color=color,
        linewidth=width,
        gid=f"_line-{index + 1}",
        linestyle=(0, tuple(map(float, dash.split()))) if dash else "-",
        marker="o" if isolated else None,
        markersize=3,
        markevery=isolated or None,
    )


def _plot_band(
    axes: Axes,
    times: Sequence[float],
    low: Values | None,
    high: Values | None,
    axis: TimeAxis,
    color: str,
) -> None:
    if low is None or high is None:
        return
    bottom, top = ([nan if value is None else value for value in side] for side in (low, high))
    x = [axis(seconds) for seconds in times]
    axes.fill_between(x, bottom, top, color=color, alpha=0.2, linewidth=0)


def _plot_many(axes: Axes, lines: Sequence[Curve], axis: TimeAxis) -> None:
    """Plot many curves as their envelope and median, with outliers in color and others faint."""
    times, low = _combine(lines, "low", min)
    _, high = _combine(lines, "high", max)
    _plot_band(axes, times, low, high, axis, css_color("muted"))
    highlighted = outliers(lines)
    for index, line in enumerate(lines):
        if index not in highlighted:
            seconds, values = _combine([line], "values", fmean)
            _plot_line(axes, index, seconds, values, axis, css_color("muted"), 0.4)
    times, medians = _combine(lines, "values", median)
    y = [nan if value is None else value for value in medians]
    axes.plot([axis(seconds) for seconds in times], y, color=css_color("text"), linewidth=1.2)
    for number, index in enumerate(highlighted):
        line, color = lines[index], css_color(f"line-{number + 1}")
        _plot_line(axes, index, line.times_seconds, line.values, axis, color, 1.2)


def _combine(
    lines: Sequence[Curve],
    side: Literal["values", "low", "high"],
    aggregate: Callable[[Iterable[float]], float],
) -> tuple[list[float], list[float | None]]:
    """Combine several curves to one: its times in seconds and its values."""
    curves = [(line.times_seconds, getattr(line, side) or line.values) for line in lines]
    rows = resample(curves, _ENVELOPE_ROWS, aggregate)
    values = [[value for value in row.values if value is not None] for row in rows]
    combined = [aggregate(some) if some else None for some in values]
    return [row.time_seconds for row in rows], combined


def _plot_marks(axes: Axes, axis: TimeAxis, marks: Sequence[tuple[Mark, str]]) -> None:
    """Plot numbered interruptions over the whole height, and routine marks at the bottom."""
    # x in data coordinates, y from 0 at the bottom to 1 at the top of the axes.
    foot = axes.get_xaxis_transform()
    routine = [axis(mark.time_seconds) for mark, number in marks if not number]
    axes.plot(
        routine,
        [0.03] * len(routine),
        transform=foot,
        color=css_color("muted"),
        linestyle="",
        marker="|",
        markersize=5,
    )
    for kind, style in _MARK_STYLES.items():
        of_kind = [mark for mark, number in marks if number and mark.kind == kind]
        times = [axis(mark.time_seconds) for mark in of_kind]
        axes.vlines(
            times,
            0,
            1,
            transform=foot,
            colors=css_color(style.color),
            linewidth=1,
            linestyles=style.line,
        )
        for start, mark in zip(times, of_kind, strict=True):
            if mark.seconds > 0:
                end = start + axis(mark.seconds)
                axes.axvspan(start, end, color=css_color(style.color), alpha=0.25, linewidth=0)
    last_label = -1.0
    for mark, number in marks:
        x = axis(mark.time_seconds)
        # Skip labels that would overlap the previous one.
        if number and x - last_label > 0.04 * axis(axis.length):
            axes.text(
                x, 1.0, number, transform=foot, ha="center", va="bottom", color=css_color("muted")
            )
            last_label = x


def _legend(lines: Sequence[Curve]) -> tuple[LegendEntry, ...]:
    """Return the legend; a single line needs none besides the chart's title."""
    if len(lines) == 1:
        return ()
    if len(lines) <= LINES:
        return tuple(
            LegendEntry(f"line-{index + 1}", _dash(index), False, line.label)
            for index, line in enumerate(lines)
        )
    highlighted = [
        LegendEntry(f"line-{number + 1}", "", False, f"{lines[index].label}, {end} on average")
        for number, (index, end) in enumerate(outliers(lines).items())
    ]
    return (
        *highlighted,
        LegendEntry("text", "", False, f"median of all {len(lines)}"),
        LegendEntry("muted", "", True, "others; shaded: lowest to highest"),
    )


def _dash(index: int) -> str:
    return _DASHES[index % len(_DASHES)]
