"""Computations on the curves of a chart: downsampling, extremes, outliers and text summaries."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median

from sm_train.toolkit.analysis.review.review_model import Chart, Curve

OUTLIER_FACTOR = 5.0

Values = Sequence[float | None]


@dataclass(frozen=True)
class SeriesRow:
    """The values of several curves from ``time_seconds`` on; None where a curve has no value."""

    time_seconds: float
    values: tuple[float | None, ...]


def resample(
    curves: Sequence[tuple[Sequence[float], Values]],
    rows: int,
    aggregate: Callable[[Iterable[float]], float] = fmean,
) -> list[SeriesRow]:
    """Return at most ``rows`` rows; ``aggregate`` combines the values of neighboring times."""
    times = sorted({time for curve_times, _ in curves for time in curve_times})
    size = max(1, -(-len(times) // rows))
    group = {time: index // size for index, time in enumerate(times)}
    columns = []
    for curve_times, values in curves:
        grouped: list[list[float]] = [[] for _ in times[::size]]
        for time, value in zip(curve_times, values, strict=True):
            if value is not None:
                grouped[group[time]].append(value)
        columns.append([aggregate(some) if some else None for some in grouped])
    cells = zip(*columns, strict=True)
    return [SeriesRow(time, values) for time, values in zip(times[::size], cells, strict=True)]


def in_percent(chart: Chart) -> Chart:
    """Convert a chart of shares of 1 to percent; return any other chart unchanged."""
    if chart.unit != "share":
        return chart
    lines = tuple(
        replace(
            line,
            values=_times_100(line.values),
            low=None if line.low is None else _times_100(line.low),
            high=None if line.high is None else _times_100(line.high),
        )
        for line in chart.lines
    )
    full = None if chart.full is None else 100 * chart.full
    return replace(chart, unit="%", lines=lines, full=full)


def _times_100(values: Values) -> Values:
    return [None if value is None else 100 * value for value in values]


def known(line: Curve) -> list[float]:
    """Return the values of a line without its gaps."""
    return [value for value in line.values if value is not None]


def lines_with_values(chart: Chart) -> list[Curve]:
    """Return the lines of a chart that have at least one value."""
    return [line for line in chart.lines if known(line)]


def extremes(line: Curve) -> list[float]:
    """Return all values that the axis range of a plot must include."""
    sides = (line.values, line.low or (), line.high or ())
    return [value for side in sides for value in side if value is not None]


def outliers(lines: Sequence[Curve]) -> dict[int, str]:
    """Return the indices of the lines with the lowest and the highest mean if they are outliers.

    The mean of an outlier is farther from the median than :data:`OUTLIER_FACTOR` times the median
    absolute deviation, and than 1 % of the median, which excludes noise.
    """
    means = [fmean(known(line)) for line in lines]
    middle = median(means)
    deviation = median(abs(mean - middle) for mean in means)
    threshold = max(OUTLIER_FACTOR * deviation, 0.01 * abs(middle))
    ends = {means.index(min(means)): "lowest", means.index(max(means)): "highest"}
    return {index: end for index, end in ends.items() if abs(means[index] - middle) > threshold}


def quantity(value: float, digits: int = 3) -> str:
    """Format with ``digits`` significant digits; without decimals from 1,000 on."""
    return f"{value:,.0f}" if 1e3 <= abs(value) < 1e9 else f"{value:.{digits}g}"


def summary(chart: Chart) -> str:
    """Summarize a chart in one sentence, without its title."""
    lines = lines_with_values(chart)
    if not lines:
        return "There are no measurements."
    every = [value for line in lines for value in known(line)]
    text = (
        f"{quantity(min(every))} to {quantity(max(every))}, median {quantity(median(every))}"
        + (f", last {quantity(known(lines[0])[-1])}" if len(lines) == 1 else "")
        if min(every) < max(every)
        else f"always {quantity(every[0])}"
    ) + _unit(chart)
    if chart.full is not None:
        text += f"; the maximum is {quantity(chart.full)}"
    return text + "."


def _unit(chart: Chart) -> str:
    return chart.unit if chart.unit in ("", "%") else f" {chart.unit}"
