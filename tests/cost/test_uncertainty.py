"""The range contains 80 % of runs that are simulated failure by failure."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from sm_train.cost.assumptions import Assumptions
from sm_train.cost.estimate import Purchase, estimate
from sm_train.cost.failures import daly_interval, observed_rate, young_interval
from sm_train.cost.services import blocking
from sm_train.cost.speed import Speed
from sm_train.cost.stage import CostStage

Z90 = 1.2815515655446004
RUNS = 4000

STAGE = CostStage(
    name="256px",
    resolution=256,
    instance_type="ml.p4de.24xlarge",
    instances=4,
    per_device_batch_size=32,
    gradient_accumulation_steps=2,
    max_steps=100_000,
    checkpoint_every=1000,
    parameters=865_910_724,
    speed=Speed(1.0, 0.9, 1.05, "measured", "test"),
)

CASES = {
    "as shipped": (STAGE, Assumptions()),
    "a failure every hour": (STAGE, Assumptions(failures_per_gpu_hour=1 / 32)),
    "a few long-lost hours": (
        replace(STAGE, checkpoint_every=5_000),
        Assumptions(failures_per_gpu_hour=4 / (32 * 27.8)),
    ),
    "a slow start of a short stage": (
        replace(STAGE, max_steps=1000),
        Assumptions(start_up_seconds=3000),
    ),
}


def simulate(stage: CostStage, assumed: Assumptions, rng: random.Random) -> float:
    """Simulate the billed seconds of one run: interval by interval, failure by failure."""
    speed = stage.speed
    assert speed is not None
    z = rng.gauss(0, 1)
    bound = speed.low if z > 0 else speed.high
    per_step = 1 / speed.steps_per_second * (speed.steps_per_second / bound) ** abs(z / Z90)
    if z < 0:
        per_step = (
            1 / speed.steps_per_second * (speed.steps_per_second / speed.high) ** abs(z / Z90)
        )
    rate = assumed.failures_per_gpu_hour * stage.world_size / 3600
    rate *= assumed.failure_spread ** (rng.gauss(0, 1) / Z90)
    clock = assumed.start_up_seconds * assumed.start_up_spread ** (rng.gauss(0, 1) / Z90)
    every = min(stage.checkpoint_every or 1, stage.max_steps)
    delay = blocking(stage, assumed).value or 0.0
    done = 0
    while done < stage.max_steps:
        steps = min(every, stage.max_steps - done)
        span = steps * per_step + (delay if steps == every else 0)
        until_failure = rng.expovariate(rate)
        if until_failure < span:
            clock += until_failure + assumed.restart_seconds
            continue
        clock += span
        done += steps
    return clock


@pytest.mark.parametrize("case", CASES)
def test_80_percent_of_simulated_runs_fall_inside(case: str) -> None:
    stage, assumed = CASES[case]
    [priced] = estimate([stage], Purchase("us-east-1"), assumed=assumed).stages
    assert priced.seconds_range is not None
    rng = random.Random(case)
    runs = [simulate(stage, assumed, rng) for _ in range(RUNS)]
    inside = sum(priced.seconds_range.low <= run <= priced.seconds_range.high for run in runs)
    assert inside / RUNS == pytest.approx(0.80, abs=0.03)


def test_expected_value_matches_the_mean_of_simulated_runs() -> None:
    stage, assumed = CASES["as shipped"]
    [priced] = estimate([stage], Purchase("us-east-1"), assumed=assumed).stages
    rng = random.Random(1)
    runs = sorted(simulate(stage, assumed, rng) for _ in range(RUNS))
    assert priced.seconds.billable == pytest.approx(runs[RUNS // 2], rel=0.01)


def test_range_is_reproducible() -> None:
    first, second = (estimate([STAGE], Purchase("us-east-1")) for _ in range(2))
    assert (first.low, first.high) == (second.low, second.high)


def test_young_and_daly_intervals() -> None:
    # Young 1974: √(2 · 27 s · 65 days) on 32 GPUs; Daly's higher order lies just below.
    between = 65 * 86400.0
    assert young_interval(27, between) == pytest.approx(17_414, abs=1)
    assert daly_interval(27, between) == pytest.approx(17_396, abs=1)
    assert daly_interval(100, 10) == 10


def test_daly_interval_minimizes_the_priced_waste() -> None:
    blocking, between = 27.0, 20_000.0
    best = young_interval(blocking, between)

    def waste(interval: float) -> float:
        return blocking / interval + interval / (2 * between)

    assert waste(best) < min(waste(best * 0.9), waste(best * 1.1))
    assert daly_interval(blocking, between) == pytest.approx(best, rel=0.05)


def test_observed_failures_replace_the_published_rate() -> None:
    prior = 1e-5
    assert observed_rate(0, 0, prior) == pytest.approx(prior)
    assert observed_rate(0, 1e5, prior) == pytest.approx(prior / 2)
    assert observed_rate(99, 1e6, prior) == pytest.approx(100 / 1.1e6)
