"""Judges the loss: skipped steps, spikes, divergence and growing gradients."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from sm_train.toolkit.analysis.review.job_facts import JobFacts
from sm_train.toolkit.analysis.review.job_log import Column, finite
from sm_train.toolkit.analysis.review.review_model import Level, Verdict
from sm_train.toolkit.terminal.formatting import format_number

_BUCKETS = 20
_MIN_INTERVALS = 5 * _BUCKETS
_SPIKE = 8.0
"""Multiple of the robust standard deviation; normally distributed losses never reach it."""

_MIN_SPIKE = 0.2
"""Minimum height of a spike as a share of its neighbors."""

_NEIGHBORS = 7
"""Intervals on each side."""

_RISE = 3.0
"""Multiple of the medians' spread by which a loss that rises again exceeds its best."""

_MAX_GRADIENT_GROWTH = 3.0
"""Ratio of the gradient norm in the last fifth to that in the first."""

_MAX_NONFINITE_SHARE = 0.05
"""Largest share of intervals without a finite loss that only costs a warning."""


def loss(facts: JobFacts) -> Verdict:
    """Find skipped steps, spikes, a loss that rises again and a growing gradient norm."""
    question = "Is the loss healthy?"
    steps, losses = facts.log.steps["step"], facts.log.steps["loss"]
    if not len(losses):
        return Verdict("loss", "unknown", question, "the log contains no steps")
    known = np.isfinite(losses)
    nonfinite = _NonFinite(int((~known).sum()), len(known), not known[-1])
    steps, losses = steps[known], losses[known]
    skipped = {
        code: facts.log.warnings[code].count
        for code in ("step-skipped", "loss-non-finite", "rolled-back")
        if code in facts.log.warnings
    }
    evidence = [f"{code}: {count:,} times" for code, count in skipped.items()]
    evidence += _validation(facts)
    if not len(losses):
        return Verdict(
            "loss",
            "bad",
            question,
            "no: it was never finite",
            tuple(evidence),
            "lower the learning rate or lengthen the warm-up; check the samples named in the log",
        )
    at_end = "non-finite" if nonfinite.at_end else format_number(_last(losses))
    evidence.insert(0, f"{format_number(float(losses[0]))} at first, {at_end} at the end")
    if nonfinite.at_end:
        evidence.insert(1, f"the last finite loss was at step {int(steps[-1]):,}")
    problems, level = _problems(facts, steps, losses, nonfinite, skipped)
    if not problems:
        enough = len(losses) >= _MIN_INTERVALS
        return Verdict(
            "loss",
            "good" if enough else "unknown",
            question,
            "yes: no spikes, no rise"
            if enough
            else f"no problem so far, but only {len(losses)} intervals",
            tuple(evidence),
        )
    return Verdict(
        "loss",
        level,
        question,
        f"no: {'; '.join(problems)}",
        tuple(evidence),
        "lower the learning rate or lengthen the warm-up; the log names the samples of non-finite "
        "losses (loss-non-finite)",
    )


@dataclass(frozen=True)
class _NonFinite:
    """``count`` of all ``intervals`` have no finite loss; ``at_end`` means the last one."""

    count: int
    intervals: int
    at_end: bool

    @property
    def level(self) -> Level:
        share = self.count / self.intervals
        return "bad" if self.at_end or share > _MAX_NONFINITE_SHARE else "warning"

    def __str__(self) -> str:
        where = ", and at the end" if self.at_end else ""
        share = self.count / self.intervals
        intervals = "interval" if self.count == 1 else "intervals"
        return f"it was non-finite in {self.count:,} {intervals} ({share:.1%}){where}"


def _problems(
    facts: JobFacts, steps: Column, losses: Column, nonfinite: _NonFinite, skipped: dict[str, int]
) -> tuple[list[str], Level]:
    problems: list[str] = []
    level: Level = "warning"
    if "rolled-back" in skipped:
        level = "bad"
        problems.append(f"it rolled back to a checkpoint {skipped['rolled-back']} times")
    if nonfinite.count:
        level = "bad" if level == "bad" else nonfinite.level
        problems.append(str(nonfinite))
    elif "step-skipped" in skipped:
        problems.append("steps with non-finite gradients were skipped")
    if len(losses) < _MIN_INTERVALS:
        return problems, level
    if (rise := _rise(losses)) is not None:
        level = "bad"
        problems.append(f"it rises again, {rise:.0%} above its best")
    if len(spikes := _spikes(losses)):
        at = ", ".join(f"{int(step):,}" for step in steps[spikes][:3])
        problems.append(f"{len(spikes)} spikes, at step {at}{' …' if len(spikes) > 3 else ''}")
    if (growth := _gradient_growth(facts.log.steps["gradient_norm"])) > _MAX_GRADIENT_GROWTH:
        problems.append(f"the gradient norm grew {growth:.1f} ×")
    return problems, level


def _medians(values: Column) -> Column:
    """Return the medians of consecutive parts: (_BUCKETS,)."""
    return np.array([np.median(part) for part in np.array_split(values, _BUCKETS)])


def _rise(losses: Column) -> float | None:
    """Return how far the last fifth is above the best, as a share of it; None within the spread."""
    medians = _medians(losses)
    end, best = float(np.median(medians[-_BUCKETS // 5 :])), float(medians.min())
    # Between neighboring medians the trend is small, so their differences measure the noise. The
    # factor 1.4826 turns a median absolute deviation into a standard deviation; a difference of two
    # values has √2 times that of one.
    spread = 1.4826 * float(np.median(np.abs(np.diff(medians)))) / np.sqrt(2)
    if best <= 0 or end <= 1.05 * best or end - best <= _RISE * max(spread, 0.01 * best):
        return None
    return end / best - 1


def _spikes(losses: Column) -> npt.NDArray[np.intp]:
    """Return the indices of losses far above their neighbors on both sides, unlike on a slope.

    ``losses`` is (num_intervals,).
    """
    # (num_intervals - _NEIGHBORS + 1,): medians[i] covers losses[i : i + _NEIGHBORS].
    medians = np.median(np.lib.stride_tricks.sliding_window_view(losses, _NEIGHBORS), axis=1)
    inner = losses[_NEIGHBORS:-_NEIGHBORS]
    before, after = medians[: len(inner)], medians[_NEIGHBORS + 1 :]
    height = inner - np.maximum(before, after)
    spread = 1.4826 * float(np.median(np.abs(inner - (before + after) / 2)))
    return _NEIGHBORS + np.flatnonzero(height > np.maximum(_SPIKE * spread, _MIN_SPIKE * before))


def _gradient_growth(norms: Column) -> float:
    known = finite(norms)
    if len(known) < _MIN_INTERVALS:
        return 1.0
    fifth = len(known) // 5
    first, last = float(np.median(known[:fifth])), float(np.median(known[-fifth:]))
    return last / first if first > 0 else 1.0


def _last(losses: Column) -> float:
    return float(np.median(losses[-max(1, len(losses) // _BUCKETS) :]))


def _validation(facts: JobFacts) -> list[str]:
    evaluations = [event for event in facts.log.events["eval"] if event["loss"] is not None]
    if not evaluations:
        return []
    best = min(evaluations, key=lambda evaluation: float(evaluation["loss"]))
    last = evaluations[-1]
    return [
        f"validation loss {format_number(float(last['loss']))} at step {last['step']:,}, "
        f"best {format_number(float(best['loss']))} at step {best['step']:,}"
    ]
