"""What a run costs and how long it takes, against what the run file allows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from sm_train.cost.json_document import as_document
from sm_train.cost.speed import FIRM
from sm_train.estimators.config.schema import RunConfig
from sm_train.toolkit.checks.fallbacks import found_at
from sm_train.toolkit.checks.finding import Check, Finding
from sm_train.toolkit.costing.worst_case import Priced
from sm_train.toolkit.terminal.formatting import format_duration, format_total_usd, format_usd

THROUGHPUT_UNMEASURED = Check(
    "throughput-unmeasured",
    ("warning",),
    means="No it/s was measured on this very stage. Its time and its dollars are worked out from "
    "another stage, another machine or FLOPs alone, or are unknown.",
    impact="Everything that is in dollars here rests on it: budget, run time, what idle instances "
    "cost.",
    fix="Run a few hundred steps of the stage and write `steps_per_second`, or give the "
    "job's log to `sm-train cost RUN --measured`.",
)
PRICE_UNKNOWN = Check(
    "price-unknown",
    ("warning",),
    means="There is no on-demand training price of this instance type in the region; of the run's "
    "first, or of one that a job may be given instead.",
    impact="The total is a lower bound, and the budget guards only the part that is known.",
    fix="`sm-train cost RUN --refresh` asks AWS for today's prices; `--prices FILE` takes your "
    "own.",
)
OVER_BUDGET = Check(
    "over-budget",
    ("error", "warning"),
    means="The run's expected dollars are more than `budget.usd`. An error with `on_exceed: stop`; "
    "a warning where that is so only on other machines that it may be given "
    "(`cluster.alternatives`, `recovery.fallbacks`).",
    impact="With `stop`, `submit` refuses the run; with `warn`, it goes on above the budget.",
    fix="Raise the budget, shorten a stage, or look for a cheaper cluster with "
    "`sm-train cost RUN --alternatives --budget USD`.",
)
MAX_RUNTIME_SHORT = Check(
    "max-runtime-short",
    ("error", "warning"),
    means="The stage is expected to take longer than `cluster.max_runtime`, at which SageMaker "
    "ends the job. All attempts of a retried job share that time. A warning where the it/s was "
    "not measured.",
    impact="What was trained since the newest checkpoint, a new start, and the wait for machines.",
    fix="Raise `max_runtime` (28 days at most), split the stage, or take more instances.",
    source="SageMaker API reference, StoppingCondition (2026-11)",
)


def money_findings(config: RunConfig, document: dict[str, Any]) -> Iterator[Finding]:
    """By the document of ``cost --json``."""
    for index, stage in enumerate(document["stages"]):
        where = f"stages[{index}]"
        if stage["throughput_basis"] not in FIRM:
            yield THROUGHPUT_UNMEASURED.found(
                "warning",
                f"{where}.steps_per_second",
                f"no it/s was measured for {stage['name']}: its time and cost are "
                + (f"worked out ({stage['throughput_basis']})" if stage["cost_usd"] else "unknown"),
                "measure a few hundred steps of this stage and write the figure",
            )
        yield from _short(config, stage)
    if document["stages"][0]["price_per_instance_hour_usd"] is None:
        yield PRICE_UNKNOWN.found(
            "warning",
            "cluster.instance_type",
            f"{config.cluster.instance_type} has no published training price",
            "ask AWS, and take the total as a lower bound",
        )
    total, budget = document["total"], config.budget
    if budget and total["cost_at_least_usd"] > budget.usd:
        yield OVER_BUDGET.found(
            "error" if budget.on_exceed == "stop" else "warning",
            "budget.usd",
            f"the run costs {format_total_usd(total)}, more than {format_usd(budget.usd)}",
            "raise the budget or shorten the run",
        )


def money_elsewhere(
    config: RunConfig, own: dict[str, Any], priced: list[Priced]
) -> Iterator[Finding]:
    """What other machines cost that the run may be given; ``own`` is the document of its first."""
    budget = config.budget
    for place, cost in priced:
        document = as_document(cost)
        machine = f"{place.config.cluster.instance_type} in {place.region}"
        if document["stages"][0]["price_per_instance_hour_usd"] is None:
            yield PRICE_UNKNOWN.found(
                "warning",
                place.where,
                f"{machine} has no published training price",
                "ask AWS, and take the total as a lower bound",
            )
        for stage in document["stages"]:
            yield from found_at(place, _short(place.config, stage))
        total = document["total"]["cost_at_least_usd"]
        if budget and own["total"]["cost_at_least_usd"] <= budget.usd < total:
            yield OVER_BUDGET.found(
                "warning",
                place.where,
                f"on {machine} the run costs {format_total_usd(document['total'])}, more than "
                f"{format_usd(budget.usd)}",
                "raise the budget, or leave these machines out",
            )


def _short(config: RunConfig, stage: dict[str, Any]) -> Iterator[Finding]:
    seconds = stage["billable_seconds"]
    if seconds is not None and seconds > config.cluster.max_runtime:
        yield MAX_RUNTIME_SHORT.found(
            "error" if stage["throughput_basis"] in FIRM else "warning",
            "cluster.max_runtime",
            f"{stage['name']} takes {format_duration(seconds)} and the job is ended after "
            f"{format_duration(config.cluster.max_runtime)}",
            "raise max_runtime (28d at most) or split the stage",
        )
