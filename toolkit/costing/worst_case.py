"""The most that a run may cost: on the dearest machines that it may be given, wherever they are."""

from __future__ import annotations

from typing import Any

from sm_train.cost.estimate import Estimate
from sm_train.cost.json_document import as_document
from sm_train.estimators.config.placement import Placement, unique_placements
from sm_train.estimators.config.schema import RunConfig
from sm_train.toolkit.costing.history import History
from sm_train.toolkit.costing.run_price import estimate_remaining, estimate_run
from sm_train.toolkit.terminal.formatting import format_total_usd

Priced = tuple[Placement, Estimate]


def fallback_costs(config: RunConfig, region: str, history: History | None = None) -> list[Priced]:
    """The whole run on each cluster beside the run file's first, were it there all the time."""
    return [
        (place, estimate_run(place.config, place.region, history=history, stated=config))
        for place in unique_placements(config, region)[1:]
    ]


def remaining_fallback_costs(
    config: RunConfig, region: str, stage: str, from_step: int, history: History | None = None
) -> list[Priced]:
    """What the stage called ``stage`` has still to do, on each of those."""
    found = []
    for place in unique_placements(config, region)[1:]:
        [there] = [one for one in place.config.stages if one.name == stage]
        cost = estimate_remaining(place.config, place.region, there, from_step, history, config)
        found.append((place, cost))
    return found


def most_expensive(priced: list[Priced]) -> Priced | None:
    """The one whose known dollars are most."""
    return max(priced, key=lambda one: total(one[1])["cost_at_least_usd"], default=None)


def total(cost: Estimate) -> dict[str, Any]:
    """The total of the document of ``cost --json``."""
    found: dict[str, Any] = as_document(cost)["total"]
    return found


def up_to_suffix(own: Estimate, priced: list[Priced]) -> str:
    """What to add to the price of a question: the most that may come instead, and where."""
    most = most_expensive(priced)
    if most is None or total(most[1])["cost_at_least_usd"] <= total(own)["cost_at_least_usd"]:
        return ""
    place, cost = most
    machine = place.config.cluster.instance_type
    return f", or up to {format_total_usd(total(cost))} on {machine} in {place.region}"
