"""The range of a run's seconds and dollars: P10 and P90 of seeded draws.

Each draw simulates the run once: a speed for each stage, a start-up time, a failure rate, a Poisson
number of failures, and for each failure a restart and a uniform share of the checkpoint interval.
Speeds with the same assumed basis are fully correlated; so are the start-ups and the failure rates
of all stages. Speed, start-up and failure rate are lognormal on each side of their median.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from operator import mul
from statistics import quantiles

from sm_train.cost.failures import lost_per_failure
from sm_train.cost.speed import FIRM, Basis

DRAWS = 2000
"""The share of outcomes below a bound is then exact to 0.7 points (one standard deviation)."""

_MANY = 30
"""Number of failures above which their sum is drawn as normal."""
_MOST_IN_AN_INTERVAL = 5.0
"""Cap on failures per interval: a draw from the rate's far tail would never finish the run."""

_Z90 = 1.2815515655446004
"""Standard normal's 90 % quantile."""


@dataclass(frozen=True)
class Risk:
    """Inputs of the draws for one stage: seconds, and failures per second of the whole cluster."""

    training: float
    slow_factor: float
    """P90 of the training time ÷ its median, at least 1."""
    fast_factor: float
    """P10 of the training time ÷ its median, at most 1."""
    basis: Basis
    fixed: float
    """Evaluation and checkpoints: seconds that are not varied."""
    start_up: float
    start_up_spread: float
    failures_per_second: float
    failure_spread: float
    restart: float
    interval: float
    """Seconds between two checkpoints."""


@dataclass(frozen=True)
class Range:
    """P10 and P90."""

    low: float
    high: float


@dataclass(frozen=True)
class CostRanges:
    """Ranges of each stage's seconds, of all seconds, and the dollar bounds."""

    stages: tuple[Range, ...]
    seconds: Range
    low: float
    high: float


def ranges(
    risks: Sequence[Risk],
    low_rates: Sequence[float],
    high_rates: Sequence[float],
    *,
    draws: int = DRAWS,
    seed: int = 0,
) -> CostRanges:
    """Return P10 and P90 of the billable seconds and of their dollars.

    ``low_rates`` and ``high_rates`` are the lowest and highest dollars per second of each stage;
    they differ if only a range of the price is known. The same arguments give the same result.
    """
    rng = random.Random(seed)
    outcomes = [_draw(risks, rng) for _ in range(draws)]
    return CostRanges(
        stages=tuple(_range(column) for column in zip(*outcomes, strict=True)),
        seconds=_range([sum(outcome) for outcome in outcomes]),
        low=_range([_sumproduct(outcome, low_rates) for outcome in outcomes]).low,
        high=_range([_sumproduct(outcome, high_rates) for outcome in outcomes]).high,
    )


def _draw(risks: Sequence[Risk], rng: random.Random) -> list[float]:
    gauss, start_z, rate_z = rng.gauss, rng.gauss(0, 1), rng.gauss(0, 1)
    shared: dict[Basis, float] = {}
    outcome = []
    for risk in risks:
        if risk.basis in FIRM:
            z = gauss(0, 1)
        elif (common := shared.get(risk.basis)) is not None:
            z = common
        else:
            z = shared[risk.basis] = gauss(0, 1)
        factor = (risk.slow_factor if z > 0 else 1 / risk.fast_factor) ** (z / _Z90)
        running = risk.training * factor + risk.fixed
        start_up = risk.start_up * risk.start_up_spread ** (start_z / _Z90)
        rate = risk.failures_per_second * risk.failure_spread ** (rate_z / _Z90)
        lost = _lost(rate, running, risk.restart, risk.interval * factor, rng)
        outcome.append(start_up + running + lost)
    return outcome


def _lost(
    rate: float, running: float, restart: float, interval: float, rng: random.Random
) -> float:
    """Draw the seconds lost to failures in ``running`` seconds of progress.

    A failure loses a uniform share of the interval, and the recomputed work can be interrupted
    again. Many failures are drawn as one normal sum.
    """
    mean = rate * running
    x = min(rate * interval, _MOST_IN_AN_INTERVAL)
    if mean > _MANY or x > 1:
        each = lost_per_failure(restart, interval, x / interval)
        many = max(0.0, rng.gauss(mean, math.sqrt(mean)))
        return max(0.0, rng.gauss(many * each, each * math.sqrt(many / 3)))
    lost = 0.0
    redone = [rng.random() * interval for _ in range(_poisson(mean, rng))]
    while redone:
        again = redone.pop()
        lost += restart + again
        redone += [rng.random() * again for _ in range(_poisson(rate * again, rng))]
    return lost


def _poisson(mean: float, rng: random.Random) -> int:
    """Draw a Poisson number by Knuth's product of uniforms; for small means."""
    floor, product, count = math.exp(-mean), rng.random(), 0
    while product > floor:
        product *= rng.random()
        count += 1
    return count


def _sumproduct(left: Sequence[float], right: Sequence[float]) -> float:
    return sum(map(mul, left, right), 0.0)


def _range(values: Sequence[float]) -> Range:
    deciles = quantiles(values, n=10, method="inclusive")
    return Range(deciles[0], deciles[-1])
