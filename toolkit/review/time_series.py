"""A job over time, thinned to what a screen can show."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import numpy.typing as npt
from sm_train.toolkit.jobs.events import Event
from sm_train.toolkit.review.job_facts import JobFacts
from sm_train.toolkit.review.job_log import Column
from sm_train.toolkit.review.model import Chart, Curve, Kind, Mark
from sm_train.toolkit.review.verdicts.gpus import utilization

POINTS = 300
"""Of a curve: more than a phone has pixels for, and a page with 16 machines stays small."""

_MARKS = 200


def thin(label: str, times: Column, values: Column, begin: float, end: float) -> Curve | None:
    """A curve of means over equal pieces of ``begin`` to ``end``, with their extremes.

    A piece without a value is a gap. None where no value is known.
    """
    known = np.isfinite(values) & np.isfinite(times)
    times, values = times[known], values[known]
    if not len(values):
        return None
    pieces = min(POINTS, len(values))
    width = max(end - begin, 1e-9) / pieces
    place = np.clip(((times - begin) / width).astype(int), 0, pieces - 1)
    counts = np.bincount(place, minlength=pieces)
    sums = np.bincount(place, values, minlength=pieces)
    low, high = np.full(pieces, np.inf), np.full(pieces, -np.inf)
    np.minimum.at(low, place, values)
    np.maximum.at(high, place, values)
    with np.errstate(invalid="ignore"):
        means = sums / counts
    there = counts > 0
    return Curve(
        label,
        [_digits(width * (index + 0.5)) for index in range(pieces)],
        _points(means, there),
        _points(low, there),
        _points(high, there),
    )


def _points(values: Column, there: npt.NDArray[np.bool_]) -> list[float | None]:
    pairs = zip(values.tolist(), there.tolist(), strict=True)
    return [_digits(value) if known else None for value, known in pairs]


def _digits(value: float) -> float:
    return float(f"{value:.5g}")


def charts(facts: JobFacts) -> tuple[Chart, ...]:
    """Those for which something was measured."""
    return tuple(chart for chart in _charts(facts) if chart.lines)


def _charts(facts: JobFacts) -> Iterator[Chart]:
    steps = facts.log.steps
    for code, title, unit, column in (
        ("speed", "Speed", "it/s", "steps_per_second"),
        ("loss", "Loss", "", "loss"),
        ("gradient", "Norm of the gradient", "", "gradient_norm"),
        ("data", "Waiting for data", "share", "data_wait_share"),
        ("mfu", "Model FLOP utilization", "share", "mfu"),
    ):
        line = thin(title, steps["time"], steps[column], facts.begin, facts.end)
        yield Chart(code, title, unit, (line,) if line else ())
    pairs = utilization(facts)
    yield Chart("gpu", "GPUs at work", "share", _lines(facts, pairs), full=1.0 if pairs else None)
    for name, title in (("DiskUtilization", "Disk in use"), ("MemoryUtilization", "Memory in use")):
        yield Chart(name.lower(), title, "%", _lines(facts, _cloudwatch(facts, name)), full=100.0)
    for column, title, unit, scale in (
        ("efa_receive_bytes_per_second", "EFA, received", "GB/s", 1e9),
        ("network_receive_bytes_per_second", "Network, received", "GB/s", 1e9),
        ("read_bytes_per_second", "Read from files", "MB/s", 1e6),
        ("gpu_temperature_max", "Hottest GPU", "°C", 1.0),
    ):
        rates = {
            f"algo-{node + 1}": (table["time"], table[column] / scale)
            for node, table in facts.log.nodes.items()
        }
        yield Chart(column, title, unit, _lines(facts, rates))


def _cloudwatch(facts: JobFacts, wanted: str) -> dict[str, tuple[Column, Column]]:
    return {
        host: (series.times, series.values)
        for (host, name), series in facts.metrics.items()
        if name == wanted
    }


def _lines(facts: JobFacts, pairs: dict[str, tuple[Column, Column]]) -> tuple[Curve, ...]:
    lines = (thin(host, *pair, facts.begin, facts.end) for host, pair in pairs.items())
    return tuple(line for line in lines if line is not None)


def marks(facts: JobFacts) -> tuple[Mark, ...]:
    """What happened, in order of time; of many checkpoints the newest."""
    told = facts.log
    found = [_mark("start", one, 0.0, _start(one)) for one in told.events["start"]]
    found += [_mark("stall", one, _silence(one), str(one["message"])) for one in told.stalls]
    found += [_mark("error", one, 0.0, str(one["message"])) for one in told.events["error"]]
    found += [_mark("end", one, 0.0, str(one["reason"])) for one in told.events["end"]]
    found += [_blocked("checkpoint", one) for one in told.events["checkpoint"][-_MARKS:]]
    found += [_blocked("evaluation", one) for one in told.events["eval"][-_MARKS:]]
    from_begin = (
        replace(mark, time_seconds=round(mark.time_seconds - facts.begin, 1)) for mark in found
    )
    return tuple(sorted(from_begin, key=lambda mark: mark.time_seconds))


def _mark(kind: Kind, event: Event, seconds: float, label: str) -> Mark:
    """Something that had lasted ``seconds`` when it was told."""
    return Mark(kind, float(event["time"]) - seconds, seconds, label)


def _blocked(kind: Kind, event: Event) -> Mark:
    return _mark(kind, event, float(event["seconds"] or 0.0), f"{kind} at step {event['step']:,}")


def _silence(event: Event) -> float:
    return float(event.get("silent_seconds") or 0.0)


def _start(event: Event) -> str:
    step = event["resumed_from_step"]
    return f"resumed from step {step:,}" if step else "started"
