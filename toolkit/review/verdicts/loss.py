"""Is the loss healthy?"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from sm_train.toolkit.review.job_facts import JobFacts
from sm_train.toolkit.review.job_log import Column, finite
from sm_train.toolkit.review.model import Level, Verdict
from sm_train.toolkit.terminal.formatting import format_number

_BUCKETS = 20
_ENOUGH = 5 * _BUCKETS
_SPIKE = 8.0
"""Times the usual distance from the neighbours' median: a normal loss is never that far off."""

_HIGH = 0.2
"""Less above its neighbours, as a share of them, is not worth a word."""

_NEIGHBOURS = 7
"""Of each side."""

_RISE = 3.0
"""Times the spread of the medians by which the loss must stand above its best to have turned."""

_STEEP = 3.0
"""Growth of the gradient's norm, from the first fifth to the last."""


def loss(facts: JobFacts) -> Verdict:
    """Steps left out, spikes, a loss that rises again, a gradient that grows."""
    question = "Is the loss healthy?"
    steps, losses = facts.log.steps["step"], facts.log.steps["loss"]
    if not len(losses):
        return Verdict("loss", "unknown", question, "no line tells of a step")
    broken = int((~np.isfinite(losses)).sum())
    known = np.isfinite(losses)
    steps, losses = steps[known], losses[known]
    left_out = {
        code: facts.log.warnings[code].count
        for code in ("step-skipped", "loss-not-finite", "rolled-back")
        if code in facts.log.warnings
    }
    evidence = [f"{code}: {count:,} times" for code, count in left_out.items()]
    evidence += _validation(facts)
    if not len(losses):
        return Verdict(
            "loss",
            "bad",
            question,
            "no: it was never a number",
            tuple(evidence),
            "lower the learning rate or lengthen the warm-up; look at the samples named in the log",
        )
    evidence.insert(
        0, f"{format_number(float(losses[0]))} at first, {format_number(_last(losses))} in the end"
    )
    troubles, level = _troubles(facts, steps, losses, broken, left_out)
    if not troubles:
        many = len(losses) >= _ENOUGH
        return Verdict(
            "loss",
            "good" if many else "unknown",
            question,
            "yes: no spikes, no rise"
            if many
            else f"nothing wrong so far, in few intervals ({len(losses)})",
            tuple(evidence),
        )
    return Verdict(
        "loss",
        level,
        question,
        f"no: {'; '.join(troubles)}",
        tuple(evidence),
        "lower the learning rate or lengthen the warm-up; samples of bad losses are named in the "
        "log (loss-not-finite)",
    )


def _troubles(
    facts: JobFacts, steps: Column, losses: Column, broken: int, left_out: dict[str, int]
) -> tuple[list[str], Level]:
    found: list[str] = []
    level: Level = "warning"
    if "rolled-back" in left_out:
        level = "bad"
        found.append(f"it went back to a checkpoint {left_out['rolled-back']} times")
    if broken:
        found.append(f"no number in {broken:,} intervals")
    elif "step-skipped" in left_out:
        found.append("steps without a finite gradient were left out")
    if len(losses) < _ENOUGH:
        return found, level
    if (rise := _rise(losses)) is not None:
        level = "bad"
        found.append(f"it rises again, {rise:.0%} above its best")
    if len(spikes := _spikes(losses)):
        at = ", ".join(f"{int(step):,}" for step in steps[spikes][:3])
        found.append(f"{len(spikes)} spikes, at step {at}{' …' if len(spikes) > 3 else ''}")
    if (growth := _growth(facts.log.steps["gradient_norm"])) > _STEEP:
        found.append(f"the gradient's norm grew {growth:.1f} ×")
    return found, level


def _medians(values: Column) -> Column:
    return np.array([np.median(part) for part in np.array_split(values, _BUCKETS)])


def _rise(losses: Column) -> float | None:
    """How far the last fifth stands above the best; None within the spread."""
    medians = _medians(losses)
    end, best = float(np.median(medians[-_BUCKETS // 5 :])), float(medians.min())
    # Between neighbours the trend is small: what is left is chance.
    spread = 1.4826 * float(np.median(np.abs(np.diff(medians)))) / np.sqrt(2)
    if best <= 0 or end <= 1.05 * best or end - best <= _RISE * max(spread, 0.01 * best):
        return None
    return end / best - 1


def _spikes(losses: Column) -> npt.NDArray[np.intp]:
    """The places of losses far above their neighbours on both sides: a slope is none."""
    medians = np.median(np.lib.stride_tricks.sliding_window_view(losses, _NEIGHBOURS), axis=1)
    inner = losses[_NEIGHBOURS:-_NEIGHBOURS]
    before, after = medians[: len(inner)], medians[_NEIGHBOURS + 1 :]
    above = inner - np.maximum(before, after)
    usual = 1.4826 * float(np.median(np.abs(inner - (before + after) / 2)))
    return _NEIGHBOURS + np.flatnonzero(above > np.maximum(_SPIKE * usual, _HIGH * before))


def _growth(norms: Column) -> float:
    known = finite(norms)
    if len(known) < _ENOUGH:
        return 1.0
    fifth = len(known) // 5
    first, last = float(np.median(known[:fifth])), float(np.median(known[-fifth:]))
    return last / first if first > 0 else 1.0


def _last(losses: Column) -> float:
    return float(np.median(losses[-max(1, len(losses) // _BUCKETS) :]))


def _validation(facts: JobFacts) -> list[str]:
    held_out = [one for one in facts.log.events["eval"] if one["loss"] is not None]
    if not held_out:
        return []
    best = min(held_out, key=lambda one: float(one["loss"]))
    last = held_out[-1]
    return [
        f"held-out loss {format_number(float(last['loss']))} at step {last['step']:,}, "
        f"best {format_number(float(best['loss']))} at step {best['step']:,}"
    ]
