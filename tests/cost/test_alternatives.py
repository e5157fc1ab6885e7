"""Other clusters for the same run: limits, Pareto-optimal choices, memory."""

from __future__ import annotations

from dataclasses import replace
from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sm_train.cost.alternatives import (
    Alternative,
    Limits,
    MemoryNeed,
    SearchInputs,
    alternatives,
    choose,
)
from sm_train.cost.assumptions import Assumptions
from sm_train.cost.comparison import compare
from sm_train.cost.estimate import Purchase, estimate
from sm_train.cost.json_document import as_document
from sm_train.cost.prices import PriceRow, PriceTable, shipped_prices
from sm_train.cost.stage import CostStage
from sm_train.cost.throughput import Measurement, stated_speed

STAGE = CostStage(
    name="256px",
    resolution=256,
    instance_type="ml.p4de.24xlarge",
    instances=4,
    per_device_batch_size=32,
    gradient_accumulation_steps=2,
    max_steps=550_000,
    checkpoint_every=1000,
    flops_per_image=0.543e12,
    parameters=865_910_724,
    speed=stated_speed(1.8, "published"),
)
SPEED = Measurement("published", 1.8, 32, 256, 2048, "ml.p4de.24xlarge", flops_per_image=0.543e12)
NEED = MemoryNeed(fixed=lambda *_: 22 * 865_910_724, activations=lambda images: 0.4e9 * images)


def question(need: MemoryNeed = NEED, prices: PriceTable | None = None) -> SearchInputs:
    return SearchInputs(
        (STAGE,), {"256px": need}, (SPEED,), "us-east-1", Assumptions(), prices or shipped_prices()
    )


def test_compares_16_p4de_with_6_p5() -> None:
    found = {
        (one.instance_type, one.instances): one
        for one in alternatives(question())
        if one.capacity == "on-demand"
    }
    p4de, p5 = found["ml.p4de.24xlarge", 16], found["ml.p5.48xlarge", 6]
    assert p4de.cost is not None
    assert p5.cost is not None
    assert p4de.bases == ("scaled",)
    assert p5.bases == ("other hardware",)
    # 48 GPUs do not divide 2,048 images: the nearest batch that they do divide is used.
    assert p4de.batches == (2048,)
    assert p5.batches == (2064,)
    # The run's own cluster is priced as the run itself is.
    own = estimate([STAGE], Purchase("us-east-1")).cost
    assert float(found["ml.p4de.24xlarge", 4].cost or 0) == pytest.approx(float(own or 0), rel=1e-9)


def test_alternatives_within_limits_sorted_by_cost() -> None:
    limits = Limits(deadline_seconds=2 * 86400, budget_usd=Decimal(15_000))
    chosen = choose(alternatives(question()), limits)
    assert chosen
    assert all(one.seconds <= 2 * 86400 for one in chosen)
    costs = [one.cost for one in chosen if one.cost is not None]
    assert len(costs) == len(chosen)
    assert costs == sorted(costs)
    assert max(costs) <= 15_000
    assert not choose(alternatives(question()), Limits(deadline_seconds=1.0))


def test_skips_types_without_memory_and_accumulates_on_small_gpus() -> None:
    assert not alternatives(question(MemoryNeed(fixed=lambda *_: 1e13, activations=float)))
    tight = alternatives(
        question(MemoryNeed(fixed=lambda *_: 22e9, activations=lambda images: 5e9 * images))
    )
    types = {one.instance_type for one in tight}
    assert "ml.p4de.24xlarge" in types
    assert "ml.g5.48xlarge" not in types
    [small] = {
        one.stages[0].per_device_batch_size
        for one in tight
        if (one.instance_type, one.instances) == ("ml.p4d.24xlarge", 4)
    }
    # (0.9 × 40 GiB − 22 GB) ÷ 5 GB leaves room for 3 images; 64 for each GPU divide by 2.
    assert small == 2


def test_unknown_price_sorts_last_and_is_within_no_budget() -> None:
    found = choose(alternatives(question()), Limits())
    unknown = [one for one in found if one.cost is None]
    assert {one.instance_type for one in unknown} == {"ml.p5e.48xlarge"}
    assert found[-len(unknown) :] == unknown
    assert not any(one.pareto for one in unknown)
    assert all(one.cost is not None for one in choose(found, Limits(budget_usd=Decimal(10**9))))


def test_savings_plan_with_known_price_is_an_alternative() -> None:
    row = PriceRow(
        "ml.p5.48xlarge",
        "us-east-1",
        "savings-plan-1y-no-upfront",
        Decimal(40),
        "verified",
        "x",
        None,
    )
    table = PriceTable.of([row]).over(shipped_prices())
    kinds = {(one.instance_type, one.kind) for one in alternatives(question(prices=table))}
    assert ("ml.p5.48xlarge", "savings-plan-1y-no-upfront") in kinds
    assert ("ml.p4de.24xlarge", "savings-plan-1y-no-upfront") not in kinds


@given(
    st.lists(st.tuples(st.none() | st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=12)
)
def test_pareto_optimal_alternatives_are_not_dominated(pairs: list[tuple[int | None, int]]) -> None:
    made = [
        Alternative(
            "t",
            number,
            "on-demand",
            "on-demand",
            float(seconds),
            None if cost is None else Decimal(cost),
            True,
            (),
            (),
            (),
        )
        for number, (cost, seconds) in enumerate(pairs)
    ]
    for one in choose(made, Limits()):
        beaten = one.cost is None or any(
            other.cost is not None
            and other.cost <= one.cost
            and other.seconds <= one.seconds
            and (other.cost, other.seconds) != (one.cost, one.seconds)
            for other in made
        )
        assert not (one.pareto and beaten)
        if not beaten:
            twins = [(other.cost, other.seconds) == (one.cost, one.seconds) for other in made]
            assert one.pareto or sum(twins) > 1


def test_comparison_names_changes_and_sums_differences() -> None:
    before = as_document(estimate([STAGE], Purchase("us-east-1")))
    second = replace(STAGE, name="512px")
    after = as_document(
        estimate([replace(STAGE, max_steps=275_000), second], Purchase("us-east-1"))
    )
    found = compare(before, after)
    kept, added = found["stages"]
    assert (kept["change"], added["change"]) == ("kept", "added")
    assert {field["field"] for field in kept["fields"]} == {"max_steps", "billable_seconds"}
    assert found["total"]["difference_usd"] == pytest.approx(
        kept["difference_usd"] + added["difference_usd"]
    )
    assert kept["difference_usd"] == pytest.approx(sum(kept["breakdown_difference_usd"].values()))
    back = compare(after, before)
    assert back["total"]["difference_usd"] == -found["total"]["difference_usd"]
    assert [stage["change"] for stage in back["stages"]] == ["kept", "removed"]
