"""The cost of failures and the best checkpoint interval. Times are seconds."""

from __future__ import annotations

import math

_HOPELESS = 20.0
"""Failures per interval above which it never finishes: e²⁰ attempts on average."""


def lost_per_failure(restart: float, interval: float, failures_per_second: float) -> float:
    """Return the expected seconds that one failure costs: a restart and half a checkpoint interval.

    To first order restart + interval ÷ 2. Recomputed work can be interrupted again: exactly, for a
    rate r, a restart R and an interval τ, it is R·(e^x − 1)/x + τ·(e^x − 1 − x)/x² with x = r·τ
    (Daly, 2006, equation 20, less the work itself).

    Raises:
        ValueError: failures are so frequent that an interval almost never finishes.
    """
    x = failures_per_second * interval
    if x > _HOPELESS:
        raise ValueError(
            f"failures_per_gpu_hour: {x:,.0f} failures in each checkpoint interval of "
            f"{interval:,.0f} s allow no progress; checkpoint more often"
        )
    if x < 1e-4:  # the differences below would cancel
        return restart * (1 + x / 2) + interval * (1 / 2 + x / 6)
    grown = math.expm1(x)
    return restart * grown / x + interval * (grown - x) / x**2


def young_interval(blocking: float, between_failures: float) -> float:
    """Return the best seconds between checkpoints: √(2 · blocking · MTBF) (Young, 1974)."""
    return math.sqrt(2 * blocking * between_failures)


def daly_interval(blocking: float, between_failures: float) -> float:
    """Return the best seconds between checkpoints, higher order (Daly, 2006, equation 37).

    √(2δM)·[1 + ⅓·√(δ/2M) + ⅑·(δ/2M)] − δ for δ < 2M, else M, for a blocking time δ and a mean
    time M between failures.
    """
    if blocking >= 2 * between_failures:
        return between_failures
    ratio = blocking / (2 * between_failures)
    series = 1 + math.sqrt(ratio) / 3 + ratio / 9
    return young_interval(blocking, between_failures) * series - blocking


def observed_rate(failures: int, gpu_hours: float, prior_per_gpu_hour: float) -> float:
    """Return failures per GPU-hour after ``failures`` in ``gpu_hours``, from a prior rate.

    The posterior mean of a Poisson rate under a gamma prior with the weight of one failure:
    (k + 1) ÷ (t + 1/prior). Without observations it is the prior; with many it approaches k ÷ t.
    """
    return (failures + 1) / (gpu_hours + 1 / prior_per_gpu_hour)
