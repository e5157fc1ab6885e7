"""Builds the charts of a job over time, downsampled to a screen's resolution."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import numpy.typing as npt
from sm_train.entrypoints.base.sagemaker_paths import host_name
from sm_train.toolkit.analysis.review.job_facts import JobFacts
from sm_train.toolkit.analysis.review.job_log import Column
from sm_train.toolkit.analysis.review.review_model import Chart, Curve, Mark, MarkKind, StepProgress
from sm_train.toolkit.analysis.review.verdicts.gpus import utilization
from sm_train.toolkit.records.job_logs import Event

MAX_POINTS = 300
"""Points per curve: more than a phone's width in pixels, and small for a page with 16 nodes."""

_MAX_MARKS = 200


def downsample(label: str, times: Column, values: Column, begin: float, end: float) -> Curve | None:
    """Return the means over equal bins from ``begin`` to ``end``, with their extremes.

    ``times`` and ``values`` are (num_rows,). A bin without a value is a gap. Returns None if there
    is no value.
    """
    known = np.isfinite(values) & np.isfinite(times)
    times, values = times[known], values[known]
    if not len(values):
        return None
    bins = min(MAX_POINTS, len(values))
    width = max(end - begin, 1e-9) / bins
    index = np.clip(((times - begin) / width).astype(int), 0, bins - 1)
    counts = np.bincount(index, minlength=bins)
    sums = np.bincount(index, values, minlength=bins)
    low, high = np.full(bins, np.inf), np.full(bins, -np.inf)
    np.minimum.at(low, index, values)
    np.maximum.at(high, index, values)
    with np.errstate(invalid="ignore"):
        means = sums / counts
    filled = counts > 0
    return Curve(
        label,
        [_round(width * (bin_index + 0.5)) for bin_index in range(bins)],
        _points(means, filled),
        _points(low, filled),
        _points(high, filled),
    )


def _points(values: Column, filled: npt.NDArray[np.bool_]) -> list[float | None]:
    pairs = zip(values.tolist(), filled.tolist(), strict=True)
    return [_round(value) if known else None for value, known in pairs]


def _round(value: float) -> float:
    return float(f"{value:.5g}")


def progress(facts: JobFacts) -> StepProgress | None:
    """Return the steps over time, without those that were repeated after a restart."""
    steps = facts.log.steps["step"]
    known = np.isfinite(steps)
    times, reached = facts.log.steps["time"][known], np.maximum.accumulate(steps[known])
    new = np.flatnonzero(np.diff(reached, prepend=-1.0) > 0)
    if len(new) < 2:
        return None
    chosen = new[np.unique(np.linspace(0, len(new) - 1, MAX_POINTS).astype(int))]
    return StepProgress(
        [_round(time) for time in (times[chosen] - facts.begin).tolist()], reached[chosen].tolist()
    )


def charts(facts: JobFacts) -> tuple[Chart, ...]:
    """Return all charts that have measurements."""
    return tuple(chart for chart in _charts(facts) if chart.lines)


def _charts(facts: JobFacts) -> Iterator[Chart]:
    steps = facts.log.steps
    for code, title, unit, column in (
        ("speed", "Speed", "it/s", "steps_per_second"),
        ("loss", "Loss", "", "loss"),
        ("gradient", "Gradient norm", "", "gradient_norm"),
        ("data", "Waiting for data", "share", "data_wait_share"),
        ("mfu", "Model FLOPs utilization", "share", "mfu"),
    ):
        line = downsample(title, steps["time"], steps[column], facts.begin, facts.end)
        yield Chart(code, title, unit, (line,) if line else ())
    gpu_series = utilization(facts)
    yield Chart(
        "gpu",
        "GPU utilization",
        "share",
        _lines(facts, gpu_series),
        full=1.0 if gpu_series else None,
    )
    for name, title in (("DiskUtilization", "Disk usage"), ("MemoryUtilization", "Memory usage")):
        yield Chart(name.lower(), title, "%", _lines(facts, _cloudwatch(facts, name)), full=100.0)
    for column, title, unit, scale in (
        ("efa_receive_bytes_per_second", "EFA receive rate", "GB/s", 1e9),
        ("network_receive_bytes_per_second", "Network receive rate", "GB/s", 1e9),
        ("read_bytes_per_second", "File read rate", "MB/s", 1e6),
        ("gpu_temperature_max", "Hottest GPU", "°C", 1.0),
    ):
        rates = {
            host_name(node, facts.instances or 0): (table["time"], table[column] / scale)
            for node, table in facts.log.nodes.items()
        }
        yield Chart(column, title, unit, _lines(facts, rates))


def _cloudwatch(facts: JobFacts, metric: str) -> dict[str, tuple[Column, Column]]:
    return {
        instance: (series.times, series.values)
        for (instance, name), series in facts.metrics.items()
        if name == metric
    }


def _lines(facts: JobFacts, series: dict[str, tuple[Column, Column]]) -> tuple[Curve, ...]:
    lines = (downsample(name, *pair, facts.begin, facts.end) for name, pair in series.items())
    return tuple(line for line in lines if line is not None)


def marks(facts: JobFacts) -> tuple[Mark, ...]:
    """Return what happened by time; only the latest checkpoints and evaluations are marked."""
    log = facts.log
    absolute = [_mark("start", event, 0.0, _start(event)) for event in log.events["start"]]
    absolute += [
        _mark("stall", stall, _silent_seconds(stall), str(stall["message"])) for stall in log.stalls
    ]
    absolute += [_mark("error", event, 0.0, str(event["message"])) for event in log.events["error"]]
    absolute += [_mark("end", event, 0.0, str(event["reason"])) for event in log.events["end"]]
    absolute += [_blocked("checkpoint", event) for event in log.events["checkpoint"][-_MAX_MARKS:]]
    absolute += [_blocked("evaluation", event) for event in log.events["eval"][-_MAX_MARKS:]]
    relative = (
        replace(mark, time_seconds=round(mark.time_seconds - facts.begin, 1)) for mark in absolute
    )
    return tuple(sorted(relative, key=lambda mark: mark.time_seconds))


def _mark(kind: MarkKind, event: Event, seconds: float, label: str) -> Mark:
    """Mark an event that is logged at its end and took ``seconds``."""
    return Mark(kind, float(event["time"]) - seconds, seconds, label)


def _blocked(kind: MarkKind, event: Event) -> Mark:
    return _mark(kind, event, float(event["seconds"] or 0.0), f"{kind} at step {event['step']:,}")


def _silent_seconds(event: Event) -> float:
    return float(event.get("silent_seconds") or 0.0)


def _start(event: Event) -> str:
    step = event["resumed_from_step"]
    return f"resumed from step {step:,}" if step else "started"
