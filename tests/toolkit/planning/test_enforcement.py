"""Who stops a run at its budget, and what that may exceed it by."""

from __future__ import annotations

from typing import Any

import pytest
from sm_train.cost.json_document import as_document
from sm_train.toolkit.planning.run_price import estimate_run
from sm_train.toolkit.planning.scope import UNWATCHED, WATCHERS, Enforcer, enforcement_row

from tests.support.run_documents import config


def row(enforcers: Any = WATCHERS, otherwise: str | None = None, **changes: Any) -> str:
    run = config(**changes)
    document = as_document(estimate_run(run, "us-east-1"))
    label, text = enforcement_row(document, run, enforcers, otherwise)
    assert label == "enforced by"
    return text


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, "nobody: the run has no budget.usd"),
        (
            {"budget": {"usd": 9, "on_exceed": "warn"}},
            "nobody: budget.on_exceed is warn",
        ),
    ],
)
def test_nobody_enforces_what_is_no_limit(changes: dict[str, Any], expected: str) -> None:
    assert row(**changes) == expected


def test_each_watcher_may_exceed_the_budget_by_its_delay_on_all_instances() -> None:
    budget = {"usd": 100_000}
    # 4 × $31.5641075 an hour, for 180 s and for 420 s.
    assert row(otherwise=UNWATCHED, budget=budget) == (
        "this laptop while `sm-train watch` runs: up to $6.31 more than the budget; the function "
        "of `sm-train template watch-lambda`: up to $14.73 more than the budget; while neither "
        "polls, nobody before cluster.max_runtime"
    )
    assert row([Enforcer("the CronJob", 3600.0)], budget=budget) == (
        "the CronJob: up to $126 more than the budget"
    )
    assert row((), budget=budget) == "nobody: nothing watches the run"
