"""Dollars: right against figures worked out by hand, and honest about what is unknown."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sm_train.cost.estimate import Assumptions, estimate
from sm_train.cost.instances import UnknownInstanceTypeError, instance_type, instance_types
from sm_train.cost.prices import training_price
from sm_train.cost.stage import Stage

# BRIA's published stage: 4 × ml.p4de.24xlarge, 1.8 it/s, effective batch 2048, at 256 px.
BRIA = Stage(
    name="256px",
    resolution=256,
    instance_type="ml.p4de.24xlarge",
    instances=4,
    per_gpu_batch=32,
    accumulation=2,
    iterations=550_000,
    iterations_per_second=1.8,
    throughput_source="run file",
    checkpoint_every=1000,
)
NOTHING_ELSE = Assumptions(start_up_seconds=0, failures_per_gpu_hour=0)

STAGE_KEYS = {
    "name", "resolution", "instance_type", "instances", "world_size", "effective_batch_size",
    "iterations", "iterations_per_second", "training_seconds", "overhead_seconds",
    "billable_seconds", "instance_hours", "price_per_instance_hour_usd", "price_source",
    "price_date", "cost_usd", "cost_low_usd", "cost_high_usd", "breakdown_usd",
}  # fmt: skip


def document(*stages: Stage, **options: Any) -> dict[str, Any]:
    return estimate(stages, region="us-east-1", **options).as_dict()


def test_brias_own_figures() -> None:
    assert BRIA.world_size == 32
    assert BRIA.effective_batch_size == 2048
    assert BRIA.images_per_second == pytest.approx(3686.4)
    one = document(BRIA, assumptions=NOTHING_ELSE)["stages"][0]
    # 550,000 ÷ 1.8 = 305,555.6 s = 84.877 h; × 4 × $31.5641075 (EC2's $27.44705 × 1.15).
    assert one["training_seconds"] == pytest.approx(305_555.56, abs=0.01)
    assert one["cost_usd"] == pytest.approx(550_000 / 1.8 / 3600 * 4 * 31.5641075, abs=0.01)
    a_day = replace(BRIA, iterations=round(1.8 * 86400))
    assert document(a_day, assumptions=NOTHING_ELSE)["total"]["cost_usd"] == pytest.approx(
        4 * 24 * 31.5641075
    )


def test_overheads_are_billed_on_every_instance() -> None:
    one = document(BRIA)["stages"][0]
    hour = 4 * 31.5641075
    # Ten minutes of start-up; 419 failures ÷ (16,384 GPUs × 54 days) on 32 GPUs, each 900 s
    # and half of 1,000 iterations.
    failures = 419 / (16384 * 54 * 24) * 32 * 550_000 / 1.8 / 3600
    expected = 600 + 550_000 / 1.8 + failures * (900 + 500 / 1.8)
    assert one["billable_seconds"] == pytest.approx(expected)
    assert one["breakdown_usd"]["start_up"] == pytest.approx(hour / 6, abs=1e-5)
    [priced] = estimate([BRIA], region="us-east-1").stages
    assert priced.cost == sum(part for part in priced.breakdown.values() if part is not None)


def test_an_unstated_checkpoint_interval_is_not_a_free_one() -> None:
    unstated = document(replace(BRIA, checkpoint_every=None))
    default = document(replace(BRIA, checkpoint_every=1000))
    assert unstated["total"]["cost_usd"] == default["total"]["cost_usd"]
    assert any("1,000 iterations where none is stated" in line for line in unstated["assumptions"])
    assert not any("where none is stated" in line for line in default["assumptions"])


def test_a_failure_never_loses_more_than_the_whole_stage() -> None:
    whole, rare = (
        document(replace(BRIA, checkpoint_every=every))["total"]["cost_usd"]
        for every in (BRIA.iterations, 100 * BRIA.iterations)
    )
    assert rare == whole


def test_the_document_has_the_contracts_keys() -> None:
    found = document(BRIA)
    assert set(found) == {"stages", "total", "assumptions"}
    assert set(found["stages"][0]) == STAGE_KEYS
    assert set(found["stages"][0]["breakdown_usd"]) == {"training", "start_up", "restarts"}
    assert set(found["total"]) == {
        "billable_seconds", "wall_seconds", "instance_hours",
        "cost_usd", "cost_low_usd", "cost_high_usd", "cost_at_least_usd",
    }  # fmt: skip


def test_stages_add_up() -> None:
    second = replace(BRIA, name="512px", instances=8, iterations_per_second=0.9)
    both, one, other = document(BRIA, second), document(BRIA), document(second)
    for key in ("cost_usd", "cost_low_usd", "cost_high_usd", "instance_hours", "wall_seconds"):
        assert both["total"][key] == pytest.approx(one["total"][key] + other["total"][key])


def test_an_unknown_speed_makes_the_total_a_lower_bound() -> None:
    found = document(BRIA, replace(BRIA, name="512px", iterations_per_second=None))
    assert found["stages"][1]["cost_usd"] is None
    assert found["total"]["cost_usd"] is None
    assert found["total"]["wall_seconds"] is None
    assert found["total"]["cost_at_least_usd"] == found["stages"][0]["cost_usd"]
    least = f"at least ${found['stages'][0]['cost_usd']:,.2f}: stage 512px has no known it/s"
    assert any(line.startswith(least) for line in found["assumptions"])


def test_an_unknown_price_is_null_and_never_zero() -> None:
    found = document(replace(BRIA, instance_type="ml.p5e.48xlarge"))
    assert found["stages"][0]["price_per_instance_hour_usd"] is None
    assert found["stages"][0]["cost_usd"] is None
    assert found["stages"][0]["billable_seconds"] is not None
    assert any(
        line.startswith("total unknown: the price of ml.p5e.48xlarge")
        for line in found["assumptions"]
    )


@pytest.mark.parametrize("machine", instance_types(), ids=lambda machine: machine.name)
def test_every_price_says_where_it_is_from(machine: Any) -> None:
    price = training_price(machine.name, "us-east-1")
    assert price.source
    assert (price.usd_per_instance_hour is None) == (price.status == "unknown")
    assert (price.status == "inferred") == price.source.startswith("inferred: ")


def test_another_regions_price_is_inferred_and_says_so() -> None:
    price = training_price("ml.p5.48xlarge", "eu-north-1")
    assert price.status == "inferred"
    assert "stands in for eu-north-1" in price.source
    assert any("is inferred" in line for line in document_in("eu-north-1")["assumptions"])


def document_in(region: str) -> dict[str, Any]:
    return estimate([replace(BRIA, instance_type="ml.p5.48xlarge")], region=region).as_dict()


def test_a_training_plan_costs_nothing_more_and_says_it_is_prepaid() -> None:
    found = document(BRIA, capacity="training-plan")
    assert found["total"]["cost_usd"] == 0
    assert "prepaid" in found["stages"][0]["price_source"]


def test_spot_has_no_known_low_end() -> None:
    found = document(BRIA, capacity="spot")
    assert found["total"]["cost_low_usd"] is None
    assert any("upper bound" in line for line in found["assumptions"])


def test_a_capacity_that_does_not_exist_is_not_priced_as_another() -> None:
    with pytest.raises(ValueError, match=r"capacity: 'sopt' is not one of on-demand, spot"):
        document(BRIA, capacity="sopt")


stages = st.builds(
    Stage,
    name=st.just("any"),
    resolution=st.just(256),
    instance_type=st.sampled_from(["ml.p4de.24xlarge", "ml.p5.48xlarge", "ml.g5.xlarge"]),
    instances=st.integers(1, 512),
    per_gpu_batch=st.integers(1, 256),
    accumulation=st.integers(1, 64),
    iterations=st.integers(1, 10**7),
    iterations_per_second=st.floats(1e-2, 1e3),
    throughput_source=st.just("option"),
    checkpoint_every=st.none() | st.integers(1, 10**5),
)


@settings(deadline=None)
@given(stages)
def test_the_range_holds_the_cost(stage: Stage) -> None:
    total = document(stage)["total"]
    assert total["cost_low_usd"] <= total["cost_usd"] <= total["cost_high_usd"]


@settings(deadline=None)
@given(stages, st.integers(1, 10**6))
def test_more_steps_never_cost_less(stage: Stage, more: int) -> None:
    longer = replace(stage, iterations=stage.iterations + more)
    assert document(longer)["total"]["cost_usd"] >= document(stage)["total"]["cost_usd"]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("iterations_per_second", 0.0),
        ("iterations_per_second", float("nan")),
        ("iterations_per_second", float("inf")),
        ("iterations_per_second", -1.0),
        ("instances", 0),
        ("iterations", 0),
        ("iterations", 10**400),
        ("per_gpu_batch", 0),
        ("checkpoint_every", 0),
        ("iterations_per_second", 1e-12),
    ],
)
def test_impossible_figures_are_refused_by_name(field: str, value: float) -> None:
    with pytest.raises(ValueError, match=field):
        replace(BRIA, **{field: value})


def test_an_unknown_instance_type_names_the_nearest() -> None:
    with pytest.raises(UnknownInstanceTypeError, match=r"ml\.p4de\.24xlarge"):
        instance_type("ml.p4de.24xlage")


def test_smddp_is_for_a100_and_efa_for_those_that_have_it() -> None:
    assert [machine.name for machine in instance_types() if machine.supports_smddp] == [
        "ml.p4d.24xlarge",
        "ml.p4de.24xlarge",
    ]
    assert instance_type("ml.p5en.48xlarge").supports_efa
    assert not instance_type("ml.g5.xlarge").supports_efa
