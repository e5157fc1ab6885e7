"""Prices a run on every cluster its jobs may get."""

from __future__ import annotations

from typing import Any

from sm_train.cost.estimate import Estimate
from sm_train.cost.json_document import as_document
from sm_train.estimators.config.placement import Placement, unique_placements
from sm_train.estimators.config.schema import RunConfig
from sm_train.toolkit.costing.history import History
from sm_train.toolkit.costing.run_price import estimate_remaining, estimate_run
from sm_train.toolkit.terminal.formatting import format_total_usd

PricedCluster = tuple[Placement, Estimate]


def alternative_costs(
    config: RunConfig, region: str, history: History | None = None
) -> list[PricedCluster]:
    """Estimate the whole run on each cluster but the run file's first, as if it always got it."""
    return [
        (
            placement,
            estimate_run(placement.config, placement.region, history=history, stated=config),
        )
        for placement in unique_placements(config, region)[1:]
    ]


def remaining_alternative_costs(
    config: RunConfig, region: str, stage: str, from_step: int, history: History | None = None
) -> list[PricedCluster]:
    """Estimate the rest of the stage called ``stage`` on each of those clusters."""
    return [
        (
            placement,
            estimate_remaining(
                placement.config,
                placement.region,
                placement.stage(stage),
                from_step,
                history,
                config,
            ),
        )
        for placement in unique_placements(config, region)[1:]
    ]


def most_expensive(priced: list[PricedCluster]) -> PricedCluster | None:
    """Return the cluster with the highest known cost."""
    return max(
        priced, key=lambda alternative: total(alternative[1])["cost_at_least_usd"], default=None
    )


def total(cost: Estimate) -> dict[str, Any]:
    """Return the total of the ``cost --json`` document."""
    document: dict[str, Any] = as_document(cost)["total"]
    return document


def up_to_suffix(cost: Estimate, alternatives: list[PricedCluster]) -> str:
    """Return the suffix for a price that names the most expensive alternative; empty if none costs
    more than ``cost``.
    """
    most = most_expensive(alternatives)
    if most is None or total(most[1])["cost_at_least_usd"] <= total(cost)["cost_at_least_usd"]:
        return ""
    cluster, highest = most
    instance_type = cluster.config.cluster.instance_type
    return f", or up to {format_total_usd(total(highest))} on {instance_type} in {cluster.region}"
