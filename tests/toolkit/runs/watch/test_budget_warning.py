"""The watch's warning about the budget."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest
from sm_train.toolkit.planning.spent import Projection
from sm_train.toolkit.records.live_state import LiveState
from sm_train.toolkit.runs.run_state import RunState
from sm_train.toolkit.runs.watch.controller import budget_warning

from tests.support.aws.described_jobs import run_on_sagemaker
from tests.support.run_documents import config


@pytest.mark.parametrize(
    ("spent", "projected", "expected"),
    [
        (10.0, 90.0, None),
        (10.0, 200.0, "projected to cost $200, more than budget.usd $100"),
        # An unknown price is not 0.
        (None, None, "budget.usd: $100 cannot be enforced: the price of a job is unknown"),
    ],
)
def test_budget_is_exceeded_unknown_or_kept(
    spent: float | None, projected: float | None, expected: str | None
) -> None:
    assert_warning(spent, spent, projected, expected)


def test_price_range_counts_at_its_upper_end() -> None:
    expected = "only a range of a job's price is known, and its upper end counts: at most $42.00"
    assert_warning(None, 42.0, None, expected)


def assert_warning(
    spent: float | None, at_most: float | None, projected: float | None, expected: str | None
) -> None:
    run = run_on_sagemaker(config(budget={"usd": 100}))
    left = None if projected is None else projected - (spent or 0.0)
    projection = Projection(spent, spent or 0.0, at_most, at_most or 0.0, {"256px": left})
    state = RunState(run, (), projection, datetime.now(UTC), LiveState())
    warning = budget_warning(state)
    assert (warning is None) == (expected is None)
    assert (expected or "") in (warning or "")
