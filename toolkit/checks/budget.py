"""Compares a run's estimated cost and duration with the limits in the run file."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from sm_train.cost.estimate import Estimate
from sm_train.cost.instances import is_own_machine
from sm_train.cost.json_document import as_document
from sm_train.cost.speed import FIRM
from sm_train.estimators.config.schema import RunConfig
from sm_train.toolkit.checks.finding import Check, Finding, found_at
from sm_train.toolkit.planning.run_price import PricedCluster, implausible_speeds, stage_limits
from sm_train.toolkit.planning.scope import budget_restriction
from sm_train.toolkit.terminal.formatting import (
    format_duration,
    format_number,
    format_total_usd,
    format_usd,
)

THROUGHPUT_UNMEASURED = Check("throughput-unmeasured", ("warning",))
SPEED_IMPLAUSIBLE = Check("speed-implausible", ("warning",))
PRICE_UNKNOWN = Check("price-unknown", ("warning",))
PRICE_DERIVED = Check("price-derived", ("warning",))
BUDGET_UNENFORCEABLE = Check("budget-unenforceable", ("warning",))
OVER_BUDGET = Check("over-budget", ("error", "warning"))
STEP_LIMIT = Check("step-limit", ("info",))
_LEAST_SAVING = 100
"""Dollars."""
MAX_RUNTIME_SHORT = Check("max-runtime-short", ("error", "warning"))


def budget_findings(config: RunConfig, document: dict[str, Any]) -> Iterator[Finding]:
    """Check the cost and duration of the run on its first choice of cluster.

    ``document`` is that of ``cost --json``.
    """
    indexes = {stage.name: index for index, stage in enumerate(config.stages)}
    for speed in implausible_speeds(config):
        low, high = format_number(speed.predicted.low), format_number(speed.predicted.high)
        yield SPEED_IMPLAUSIBLE.found(
            "warning",
            f"stages[{indexes[speed.stage]}].steps_per_second",
            f"{format_number(speed.stated)} it/s for {speed.stage} on {speed.cluster}, and the "
            f"speed model predicts {low} to {high}",
            "measure it, or correct steps_per_second or measured_on",
        )
    for index, stage in enumerate(document["stages"]):
        where = f"stages[{index}]"
        # A fit has speeds of this work on two or more clusters.
        if stage["throughput_basis"] not in (*FIRM, "scaling fit"):
            yield THROUGHPUT_UNMEASURED.found(
                "warning",
                f"{where}.steps_per_second",
                f"no it/s was measured for {stage['name']}: its duration and cost are "
                + (f"estimated ({stage['throughput_basis']})" if stage["cost_usd"] else "unknown"),
                "set steps_per_second"
                if is_own_machine(stage["instance_type"])
                else f"run `sm-train measure RUN --stage {stage['name']}`, or set steps_per_second",
            )
        yield from _max_runtime_findings(config, stage)
    yield from _price_findings(
        "cluster.instance_type", config.cluster.instance_type, document["stages"][0]
    )
    total, budget = document["total"], config.budget
    restriction = budget_restriction(document, budget) if budget else None
    if budget and restriction:
        yield BUDGET_UNENFORCEABLE.found(
            "warning",
            "budget.usd",
            f"{format_usd(budget.usd)}: {restriction}; the run costs {format_total_usd(total)}",
            "run `sm-train cost RUN --refresh`, which fetches prices",
        )
    if budget and total["cost_at_least_usd"] > budget.usd:
        yield OVER_BUDGET.found(
            "error" if budget.on_exceed == "stop" else "warning",
            "budget.usd",
            f"the run costs {format_total_usd(total)}, more than {format_usd(budget.usd)}",
            "raise the budget or shorten the run",
        )


def limit_findings(config: RunConfig, estimate: Estimate) -> Iterator[Finding]:
    """Say what limits a stage if a change of the run file is predicted to save much."""
    for index, limit in enumerate(stage_limits(config, estimate)):
        if limit is not None and limit.change and limit.change.saved >= _LEAST_SAVING:
            fix = limit.describe_change()
            yield STEP_LIMIT.found("info", f"stages[{index}]", limit.describe(), fix)


def alternative_budget_findings(
    config: RunConfig, first_choice: dict[str, Any], alternatives: list[PricedCluster]
) -> Iterator[Finding]:
    """Check the cost and duration of the run on each other cluster it may get.

    ``first_choice`` is the document of ``cost --json`` for the run's first choice of cluster.
    """
    budget = config.budget
    for cluster, estimate in alternatives:
        document = as_document(estimate)
        description = f"{cluster.config.cluster.instance_type} in {cluster.region}"
        yield from _price_findings(cluster.key, description, document["stages"][0])
        for stage in document["stages"]:
            yield from found_at(cluster, _max_runtime_findings(cluster.config, stage))
        cost_usd = document["total"]["cost_at_least_usd"]
        if budget and first_choice["total"]["cost_at_least_usd"] <= budget.usd < cost_usd:
            yield OVER_BUDGET.found(
                "warning",
                cluster.key,
                f"on {description} the run costs {format_total_usd(document['total'])}, more than "
                f"{format_usd(budget.usd)}",
                "raise the budget, or remove this instance type",
            )


def _price_findings(where: str, description: str, stage: dict[str, Any]) -> Iterator[Finding]:
    """Report a price that is unknown, or derived from another one."""
    if stage["price_per_instance_hour_usd"] is None:
        yield PRICE_UNKNOWN.found(
            "warning",
            where,
            f"{description} has no published training price: {stage['price_source']}",
            "run `sm-train cost RUN --refresh`, or treat the total as a lower bound",
        )
    elif stage["price_status"] in ("derived", "assumed"):
        yield PRICE_DERIVED.found(
            "warning",
            where,
            f"the price of {description} is {stage['price_status']}: "
            f"{format_usd(stage['price_low_usd'])} to {format_usd(stage['price_high_usd'])} an "
            f"hour; {stage['price_source']}",
            "run `sm-train cost RUN --refresh`, or give the price with --prices",
        )


def _max_runtime_findings(config: RunConfig, stage: dict[str, Any]) -> Iterator[Finding]:
    seconds = stage["billable_seconds"]
    if seconds is not None and seconds > config.cluster.max_runtime:
        yield MAX_RUNTIME_SHORT.found(
            "error" if stage["throughput_basis"] in FIRM else "warning",
            "cluster.max_runtime",
            f"{stage['name']} takes {format_duration(seconds)}, but the job is stopped after "
            f"{format_duration(config.cluster.max_runtime)}",
            "raise max_runtime (at most 28d) or split the stage",
        )
