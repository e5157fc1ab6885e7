"""Limits and shares by which an estimate decides, in numbers."""

from __future__ import annotations

from dataclasses import replace
from datetime import date
from decimal import Decimal

import pytest
from sm_train.cost import timeline, uncertainty
from sm_train.cost.instances import instance_type
from sm_train.cost.prices import PriceRow, PriceTable, staleness
from sm_train.cost.services import checkpoint_bytes
from sm_train.cost.speed import stated_speed
from sm_train.cost.speed_model import StepWork, step_seconds
from sm_train.cost.throughput import Measurement, resolve_speed

from tests.cost.break_even_support import STAGE

WORK = StepWork(images=16, passes=1, flops=2.4e12, activation_bytes=1.2e9, parameters=10**9)


def test_a_price_is_old_after_90_days() -> None:
    row = PriceRow("ml.p5.48xlarge", "us-east-1", "on-demand", Decimal(1), "verified", "", None)
    table = PriceTable.of([replace(row, date="2026-09-01")])
    price = table.price("ml.p5.48xlarge", "us-east-1")
    assert staleness(price, date(2026, 11, 30)) is None
    assert "is 91 days old" in (staleness(price, date(2026, 12, 1)) or "")


def test_a_thousand_steps_per_second_are_the_most() -> None:
    assert stated_speed(1000.0, "a user").steps_per_second == 1000.0
    with pytest.raises(ValueError, match="more than the 1,000 steps per second"):
        stated_speed(1000.1, "a user")


def test_a_checkpoint_of_unstated_size_has_16_bytes_for_each_parameter() -> None:
    assert checkpoint_bytes(replace(STAGE, parameters=10**9, checkpoint_bytes=None)) == 16 * 10**9


def test_attention_scores_are_moved_six_times() -> None:
    kind = instance_type("ml.p5.48xlarge")
    gpu = kind.gpu("bf16")
    assert gpu is not None
    with_scores = step_seconds(replace(WORK, score_bytes=1e9), gpu, kind.network(1))
    without = step_seconds(WORK, gpu, kind.network(1))
    moved = (with_scores.memory - without.memory) * gpu.memory_bandwidth
    assert moved == pytest.approx(16 * 6e9, rel=1e-9)


@pytest.mark.parametrize(
    ("silence", "interval", "is_stall"),
    [(60.0, 1.0, False), (60.1, 1.0, True), (300.0, 100.0, False), (300.1, 100.0, True)],
)
def test_a_silence_is_a_stall_after_a_minute_or_three_intervals(
    silence: float, interval: float, is_stall: bool
) -> None:
    assert timeline._is_stall(silence, interval) == is_stall


def test_a_speed_is_carried_to_another_gpu_by_a_share_of_its_peak() -> None:
    """The model is unknown, so no prediction says more."""
    measured = Measurement(
        "a job",
        1.0,
        STAGE.world_size,
        resolution=256,
        effective_batch_size=STAGE.effective_batch_size,
        instance_type="ml.p4d.24xlarge",
    )
    stage = replace(STAGE, speed=None)
    speed = resolve_speed(stage, [measured])
    assert speed is not None
    ratio = 989.4 / 312
    assert speed.steps_per_second == pytest.approx(0.65 * ratio, rel=1e-3)
    assert speed.low == pytest.approx(0.9 * 0.45 * ratio, rel=1e-3)


def test_failures_of_a_draw_are_capped_at_five_an_interval() -> None:
    """A draw from the far tail of the rate would never finish the run."""
    assert uncertainty._MOST_IN_AN_INTERVAL == 5.0
