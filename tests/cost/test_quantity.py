"""A number's formula and figures say what was computed."""

from __future__ import annotations

from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sm_train.cost.assumptions import Assumptions
from sm_train.cost.estimate import Purchase, estimate
from sm_train.cost.quantity import Quantity, computed, derivations, rounded_down, sum_of

from tests.cost.estimate_support import BRIA

LEAVES = st.integers(1, 99).map(lambda value: Quantity(value, f"n{value}"))
COMPUTED = st.recursive(
    LEAVES,
    lambda smaller: st.tuples(smaller, st.sampled_from("+−×÷"), smaller).map(
        lambda terms: {
            "+": Quantity.__add__,
            "−": Quantity.__sub__,
            "×": Quantity.__mul__,
            "÷": lambda left, right: left / right if right.value else left,
        }[terms[1]](terms[0], terms[2])
    ),
    max_leaves=12,
)


def evaluated(text: str) -> float:
    python = text.replace("×", "*").replace("÷", "/").replace("−", "-").replace("n", "")
    return float(eval(python, {"__builtins__": {}}))


@given(COMPUTED)
def test_formula_and_figures_evaluate_to_the_value(quantity: Quantity) -> None:
    assert evaluated(quantity.figures) == pytest.approx(quantity.value)
    assert evaluated(quantity.formula) == pytest.approx(quantity.value)


def test_a_name_stands_for_its_formula() -> None:
    speed = Quantity(4, "it/s")
    training = (Quantity(10, "steps") / speed).named("training", "{:.1f}", " s")
    total = training + Quantity(1, "start-up")
    assert (training.text, training.formula, training.figures) == (
        "2.5 s",
        "steps ÷ it/s",
        "10 ÷ 4",
    )
    assert (total.formula, total.figures) == ("training + start-up", "2.5 + 1")
    assert [term.name for term in derivations([total.named("total", "{}")])] == [
        "training",
        "total",
    ]
    least = computed(min, "min({}, {})", training, speed)
    assert (least.value, least.formula, least.figures) == (
        2.5,
        "min(training, it/s)",
        "min(2.5, 4)",
    )
    assert rounded_down(least).formula == "⌊min(training, it/s)⌋"


def test_what_follows_from_an_unknown_number_is_unknown() -> None:
    unknown = Quantity(None, "it/s")
    for quantity in (
        Quantity(10, "steps") / unknown,
        computed(min, "min({}, {})", unknown, Quantity(1)),
        sum_of([Quantity(1), unknown]),
        unknown.exact() * Quantity(Decimal(3)),
    ):
        assert quantity.value is None
        assert quantity.text == "unknown"
    assert (Quantity(10, "steps") / unknown).figures == "10 ÷ unknown"


def test_estimate_is_the_sum_of_the_terms_that_it_shows() -> None:
    priced = estimate([BRIA], Purchase("us-east-1"), assumed=Assumptions())
    terms = priced.stages[0].terms
    assert terms["billable"].value == priced.stages[0].seconds.billable
    assert terms["cost"].value == sum(part or 0 for part in priced.stages[0].breakdown.values())
    names = [term.name for term in derivations(terms.values())]
    assert len(names) == len(set(names))
    assert names.index("training") < names.index("billable") < names.index("cost")
