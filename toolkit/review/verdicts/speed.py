"""Was the speed steady, and how much of the GPUs' arithmetic did it use?"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from sm_train.toolkit.review.job_facts import JobFacts
from sm_train.toolkit.review.job_log import Column, finite
from sm_train.toolkit.review.model import Level, Verdict
from sm_train.toolkit.review.verdicts.goodput import clock
from sm_train.toolkit.terminal.formatting import format_number

STEADY, MUCH = 0.05, 0.15
"""Losses of speed that are worth a word, and much money."""

UNEVEN = 0.2
"""From the slow to the fast tenth of the intervals, of the median."""

_BUCKETS = 24
_ENOUGH = 2 * _BUCKETS
_NOISE = 3.0
"""A change counts when it is this many times the spread about it."""

GOOD_MFU, POOR_MFU = 0.3, 0.15
"""NVIDIA's Stable Diffusion entry to MLPerf 4.0 reached 31 % on H100s (training_results_v4.0)."""


def steady_speeds(facts: JobFacts) -> tuple[Column, Column]:
    """Times and it/s of the logging intervals but the first of each start, which pays for it."""
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
    """``change`` is of the speed, as a share of its beginning, over the whole time or at once."""

    change: float
    at: float | None
    """When it changed at once, Unix seconds; None of a drift."""


def trend(times: Column, speeds: Column) -> Trend | None:
    """The change that explains the speeds best; None where there is none beyond their spread.

    A drift is a line by Theil and Sen through medians, which single slow intervals do not bend.
    """
    if len(times) < _ENOUGH:
        return None
    parts = np.array_split(np.arange(len(times)), _BUCKETS)
    x = np.array([times[part].mean() for part in parts])
    y = np.array([np.median(speeds[part]) for part in parts])
    drift, left_by_drift = _drift(x, y)
    step, at, left_by_step = _step(x, y)
    if left_by_step < left_by_drift:
        found, left, when = step, left_by_step, float(x[at - 1] + x[at]) / 2
    else:
        found, left, when = drift, left_by_drift, None
    noise = left / float(np.median(y))
    if abs(found) <= max(STEADY / 2, _NOISE * noise):
        return None
    return Trend(found, when)


def _drift(x: Column, y: Column) -> tuple[float, float]:
    """The line's change as a share of its beginning, and the spread about it."""
    i, j = np.triu_indices(len(x), 1)
    slope = float(np.median((y[j] - y[i]) / (x[j] - x[i])))
    offset = float(np.median(y - slope * x))
    begin, end = slope * x[0] + offset, slope * x[-1] + offset
    return (end - begin) / begin if begin > 0 else 0.0, _spread(y - slope * x - offset)


def _step(x: Column, y: Column) -> tuple[float, int, float]:
    """The change at the best place to cut, that place, and the spread about both sides."""
    best = (0.0, 1, float("inf"))
    for cut in range(2, len(x) - 1):
        before, after = np.median(y[:cut]), np.median(y[cut:])
        left = _spread(np.concatenate([y[:cut] - before, y[cut:] - after]))
        if left < best[2]:
            best = (float((after - before) / before), cut, left)
    return best


def _spread(rest: Column) -> float:
    """The standard deviation of a normal distribution with the same mean distance."""
    return float(np.sqrt(np.pi / 2) * np.abs(rest).mean())


def speed(facts: JobFacts) -> Verdict:
    question = "Was the speed steady?"
    times, speeds = steady_speeds(facts)
    if not len(times):
        return Verdict("speed", "unknown", question, "no line tells of a step")
    median = float(np.median(speeds))
    evidence = [f"median {format_number(median)} it/s of {len(times):,} logging intervals"]
    if len(times) < _ENOUGH:
        return Verdict(
            "speed",
            "unknown",
            question,
            f"{format_number(median)} it/s, in too few intervals to tell ({len(times)})",
            tuple(evidence),
        )
    slow, fast = np.quantile(speeds, (0.1, 0.9))
    evidence.append(
        f"8 of 10 between {format_number(float(slow))} and {format_number(float(fast))} it/s"
    )
    change = trend(times, speeds)
    if change is not None and abs(change.change) > STEADY:
        return _changed(facts, question, change, tuple(evidence))
    if (fast - slow) / median > UNEVEN:
        return Verdict(
            "speed",
            "warning",
            question,
            f"{format_number(median)} it/s on the whole, but uneven from interval to interval",
            tuple(evidence),
            "see what waits: the data, checkpoints, or a slow machine",
        )
    return Verdict("speed", "good", question, f"yes, {format_number(median)} it/s", tuple(evidence))


def _changed(facts: JobFacts, question: str, change: Trend, evidence: tuple[str, ...]) -> Verdict:
    level: Level = "good" if change.change > 0 else "warning" if change.change > -MUCH else "bad"
    way = "rose" if change.change > 0 else "fell"
    if change.at is None:
        sentence = f"no: it {way} by {abs(change.change):.0%}, little by little"
    else:
        sentence = f"no: it {way} by {abs(change.change):.0%} about {clock(change.at)}"
        near = facts.seconds / _BUCKETS
        if any(abs(float(one["time"]) - change.at) < near for one in facts.log.events["start"][1:]):
            sentence += ", when it was started again: perhaps on other machines"
    mend = (
        "compare the machines before and after: clocks and temperature, the data's wait, the "
        "network; a slow machine is replaced by stopping and resuming"
    )
    return Verdict("speed", level, question, sentence, evidence, mend if level != "good" else None)


def mfu(facts: JobFacts) -> Verdict:
    """Model FLOP utilization: what the model needs by count over what the GPUs could do."""
    question = "How much of the GPUs' arithmetic was used?"
    known = finite(facts.log.steps["mfu"])
    if not len(known):
        return Verdict(
            "mfu", "unknown", question, "the device's peak is not known, so there is no MFU"
        )
    share = float(np.median(known))
    level: Level = "good" if share >= GOOD_MFU else "warning" if share >= POOR_MFU else "bad"
    return Verdict(
        "mfu",
        level,
        question,
        f"{share:.0%} of their peak (MFU, median)",
        ("about 30 % is what well-tuned diffusion training reaches",),
        None
        if level == "good"
        else "training.compile, a larger per_device_batch_size, latents that are "
        "computed once (`sm-train pack --latents`)",
    )
