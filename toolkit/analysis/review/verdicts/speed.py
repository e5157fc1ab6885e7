"""Judges whether the speed was steady, and the model FLOPs utilization."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from sm_train.toolkit.analysis.review.job_facts import JobFacts
from sm_train.toolkit.analysis.review.job_log import Column, finite
from sm_train.toolkit.analysis.review.review_model import Level, Verdict
from sm_train.toolkit.analysis.review.verdicts.goodput import format_utc
from sm_train.toolkit.terminal.formatting import format_number

STEADY_LOSS, SEVERE_LOSS = 0.05, 0.15
"""Losses of speed above which it is not steady, and above which much money is lost."""

UNEVEN = 0.2
"""Difference between the 90th and the 10th percentile, as a share of the median."""

_BUCKETS = 24
_MIN_INTERVALS = 2 * _BUCKETS
_NOISE = 3.0
"""A change counts if it is this many times the spread around it."""

GOOD_MFU, POOR_MFU = 0.3, 0.15
"""NVIDIA's Stable Diffusion entry to MLPerf 4.0 reached 31 % on H100s (training_results_v4.0)."""


def steady_speeds(facts: JobFacts) -> tuple[Column, Column]:
    """Return times and it/s of all logging intervals except the first after each start.

    The first interval includes the warm-up of the start.
    """
    times, speeds = facts.log.steps["time"], facts.log.steps["steps_per_second"]
    starts = [float(event["time"]) for event in facts.log.events["start"]]
    first = np.searchsorted(times, starts)
    keep = np.isfinite(speeds) & (speeds > 0)
    keep[first[first < len(times)]] = False
    if not keep.any():
        keep = np.isfinite(speeds) & (speeds > 0)
    return times[keep], speeds[keep]


@dataclass(frozen=True)
class Trend:
    """A change in speed: ``change`` is relative to the speed at the beginning."""

    change: float
    time: float | None
    """When the speed changed abruptly, in Unix seconds; None for a gradual drift."""


def trend(times: Column, speeds: Column) -> Trend | None:
    """Return the change that explains the speeds best; None if it is within their spread.

    A drift is a Theil–Sen line through medians, which is robust against single slow intervals.
    """
    if len(times) < _MIN_INTERVALS:
        return None
    parts = np.array_split(np.arange(len(times)), _BUCKETS)
    x = np.array([times[part].mean() for part in parts])
    y = np.array([np.median(speeds[part]) for part in parts])
    drift, drift_residual = _drift(x, y)
    step, index, step_residual = _step(x, y)
    if step_residual < drift_residual:
        change, residual, time = step, step_residual, float(x[index - 1] + x[index]) / 2
    else:
        change, residual, time = drift, drift_residual, None
    noise = residual / float(np.median(y))
    if abs(change) <= max(STEADY_LOSS / 2, _NOISE * noise):
        return None
    return Trend(change, time)


def _drift(x: Column, y: Column) -> tuple[float, float]:
    """Return the relative change along a Theil–Sen line, and the spread around the line."""
    i, j = np.triu_indices(len(x), 1)
    slope = float(np.median((y[j] - y[i]) / (x[j] - x[i])))
    offset = float(np.median(y - slope * x))
    begin, end = slope * x[0] + offset, slope * x[-1] + offset
    return (end - begin) / begin if begin > 0 else 0.0, _spread(y - slope * x - offset)


def _step(x: Column, y: Column) -> tuple[float, int, float]:
    """Return the relative change at the best split, its index, and the spread around it."""
    best = (0.0, 1, float("inf"))
    for split in range(2, len(x) - 1):
        before, after = np.median(y[:split]), np.median(y[split:])
        residual = _spread(np.concatenate([y[:split] - before, y[split:] - after]))
        if residual < best[2]:
            best = (float((after - before) / before), split, residual)
    return best


def _spread(residuals: Column) -> float:
    """Return the standard deviation of a normal distribution with the same mean deviation."""
    return float(np.sqrt(np.pi / 2) * np.abs(residuals).mean())


def speed(facts: JobFacts) -> Verdict:
    question = "Was the speed steady?"
    times, speeds = steady_speeds(facts)
    if not len(times):
        return Verdict("speed", "unknown", question, "the log contains no steps")
    median = float(np.median(speeds))
    mean = facts.timeline.steps_per_second if facts.timeline else None
    evidence = [
        f"{format_number(mean)} it/s on average, median {format_number(median)} over "
        f"{len(times):,} logging intervals"
    ]
    if len(times) < _MIN_INTERVALS:
        return Verdict(
            "speed",
            "unknown",
            question,
            f"{format_number(median)} it/s, but only {len(times)} intervals",
            tuple(evidence),
        )
    slow, fast = np.quantile(speeds, (0.1, 0.9))
    evidence.append(
        f"80 % of the intervals between {format_number(float(slow))} and "
        f"{format_number(float(fast))} it/s"
    )
    change = trend(times, speeds)
    if change is not None and abs(change.change) > STEADY_LOSS:
        return _changed_speed(facts, question, change, tuple(evidence))
    if (fast - slow) / median > UNEVEN:
        return Verdict(
            "speed",
            "warning",
            question,
            f"no: median {format_number(median)} it/s, but uneven between intervals",
            tuple(evidence),
            "check for waits on data or checkpoints, and for a slow instance",
        )
    return Verdict("speed", "good", question, f"yes, {format_number(median)} it/s", tuple(evidence))


def _changed_speed(
    facts: JobFacts, question: str, change: Trend, evidence: tuple[str, ...]
) -> Verdict:
    level: Level = (
        "good" if change.change > 0 else "warning" if change.change > -SEVERE_LOSS else "bad"
    )
    verb = "rose" if change.change > 0 else "fell"
    if change.time is None:
        sentence = f"no: it {verb} by {abs(change.change):.0%}, gradually"
    else:
        sentence = f"no: it {verb} by {abs(change.change):.0%} at about {format_utc(change.time)}"
        near = facts.seconds / _BUCKETS
        if any(
            abs(float(event["time"]) - change.time) < near
            for event in facts.log.events["start"][1:]
        ):
            sentence += ", when it was restarted, possibly on other instances"
    fix = (
        "compare the instances before and after: clocks, temperature, data wait and network; stop "
        "and resume to replace a slow instance"
    )
    return Verdict("speed", level, question, sentence, evidence, fix if level != "good" else None)


def mfu(facts: JobFacts) -> Verdict:
    """Judge model FLOPs utilization: the model's FLOPs relative to the GPUs' peak."""
    question = "How much of the GPUs' peak FLOPs was used?"
    known = finite(facts.log.steps["mfu"])
    if not len(known):
        return Verdict("mfu", "unknown", question, "no MFU: the GPU's peak FLOPs is unknown")
    share = float(np.median(known))
    level: Level = "good" if share >= GOOD_MFU else "warning" if share >= POOR_MFU else "bad"
    return Verdict(
        "mfu",
        level,
        question,
        f"{share:.0%} (MFU, median)",
        ("well-tuned diffusion training reaches about 30 %",),
        None
        if level == "good"
        else "use training.compile, a larger per_device_batch_size, or precomputed latents "
        "(`sm-train pack --latents`)",
    )
