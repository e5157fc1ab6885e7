"""Alternative clusters, regions and purchase options for a run file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from typing import Any

from sm_train.cost.alternatives import (
    Alternative,
    Limits,
    SearchInputs,
    alternatives,
    batch_splits,
    best_of_each_type,
    choose,
    own_cluster,
    with_range,
)
from sm_train.cost.estimate import Purchase, hourly_price, stage_cost, total_money
from sm_train.cost.prices import ON_DEMAND, SAVINGS_PLANS, SPOT, known_regions
from sm_train.cost.purchasing import break_even, costs_by_region, platform_costs
from sm_train.toolkit.base.errors import UserError
from sm_train.toolkit.planning.estimate_inputs import EstimateInputs
from sm_train.toolkit.planning.run_price import memory_needs, stated_measurements
from sm_train.toolkit.terminal.formatting import parse_duration


@dataclass(frozen=True)
class AlternativesResult:
    """Documents of the run's own cluster and of the best one of each type within the limits.

    ``considered`` is the number of all alternatives; ``sentence`` summarizes the limits.
    """

    own: dict[str, Any]
    documents: list[dict[str, Any]]
    considered: int
    sentence: str
    break_even: list[dict[str, Any]]
    batch_splits: list[dict[str, Any]]

    def as_dict(self) -> dict[str, Any]:
        return {
            "own": self.own,
            "alternatives": self.documents,
            "considered": self.considered,
            "break_even": self.break_even,
            "batch_splits": self.batch_splits,
        }


def limits(deadline: str | None, budget: float | None) -> Limits:
    """Parse the limits that the options name.

    Raises:
        UserError: the deadline is not a duration, or the budget not a positive number.
    """
    latest = None if deadline is None else parse_duration("--deadline", deadline)
    if latest == 0:
        raise UserError(f"--deadline: {deadline!r} must be longer than 0 s")
    if budget is not None and not 0 < budget < float("inf"):
        raise UserError(f"--budget: {budget} must be a positive number of dollars")
    return Limits(latest, None if budget is None else Decimal(str(budget)))


def list_alternatives(inputs: EstimateInputs, limit: Limits) -> AlternativesResult:
    """List the run's own cluster and, of every instance type, the best one within ``limit``.

    Without a deadline, no stage may take longer than ``cluster.max_runtime``.
    """
    if inputs.config is None:
        raise UserError("--alternatives: belongs to a run file; give RUN too")
    if limit.deadline_seconds is None:
        limit = replace(limit, stage_seconds=float(inputs.config.cluster.max_runtime))
    search = _search(inputs)
    considered = alternatives(search)
    chosen = best_of_each_type(choose(considered, limit))
    region = inputs.purchase.region
    return AlternativesResult(
        own=_document(own_cluster(search), search),
        documents=[_document(alternative, search) for alternative in chosen],
        considered=len(considered),
        sentence=_sentence(limit, len(chosen), len(considered)),
        break_even=[
            threshold.as_dict()
            for threshold in break_even(search.stages, region, search.assumed, search.prices)
        ],
        batch_splits=[split.as_dict() for split in batch_splits(search)],
    )


def list_regions(inputs: EstimateInputs) -> list[dict[str, Any]]:
    """List the run's cost in every region that offers its instance type, cheapest first."""
    return [
        cost.as_dict()
        for cost in costs_by_region(
            inputs.stages, inputs.purchase, inputs.assumptions, inputs.prices
        )
    ]


def _search(inputs: EstimateInputs) -> SearchInputs:
    assert inputs.config is not None
    stated = (stage for stage in inputs.stages if stage.speed and stage.speed.basis == "stated")
    measured = (
        measured_stage.measurement
        for measured_stage in inputs.measured
        if not measured_stage.measurement.on_cpu
    )
    return SearchInputs(
        stages=inputs.stages,
        memory=memory_needs(inputs.config, inputs.stages),
        measurements=(*stated_measurements(stated), *measured),
        region=inputs.purchase.region,
        assumed=inputs.assumptions,
        prices=inputs.prices,
    )


def _document(alternative: Alternative, search: SearchInputs) -> dict[str, Any]:
    low, high = with_range(alternative, search)
    return alternative.as_dict() | {
        "cost_low_usd": _float(low),
        "cost_high_usd": _float(high),
        "platforms": [
            priced.as_dict()
            for priced in platform_costs(
                alternative.stages, search.region, search.assumed, search.prices
            )
        ],
        "purchase_options": _purchase_options(alternative, search),
        "cheapest_region": _cheapest_region(alternative, search),
    }


def _purchase_options(alternative: Alternative, search: SearchInputs) -> dict[str, Any]:
    """Return the cost by purchase option; ``at_least`` if only the least price is known."""
    options = {}
    for kind in (ON_DEMAND, SPOT, *SAVINGS_PLANS):
        purchase = Purchase(search.region, SPOT if kind == SPOT else ON_DEMAND, kind)
        price = hourly_price(alternative.instance_type, purchase, search.prices)
        known = price.usd_per_instance_hour
        if known is None and kind in SAVINGS_PLANS:
            continue
        priced = replace(price, usd_per_instance_hour=price.least if known is None else known)
        cost = total_money(
            [stage_cost(stage, priced, purchase, search.assumed)[1] for stage in alternative.stages]
        )
        options[kind] = {"cost_usd": _float(cost), "at_least": known is None}
    return options


def _cheapest_region(alternative: Alternative, search: SearchInputs) -> dict[str, Any] | None:
    """Return the region of the lowest on-demand price and its share of the own region's price."""
    regions: Sequence[str] = (search.region, *known_regions(alternative.instance_type))
    prices = {
        region: search.prices.price(alternative.instance_type, region).usd_per_instance_hour
        for region in regions
    }
    known = {region: price for region, price in prices.items() if price is not None}
    own = prices[search.region]
    if own is None or not known:
        return None
    region = min(known, key=lambda name: (known[name], name != search.region))
    return {"region": region, "price_share": float(known[region] / own)}


def _float(amount: Decimal | None) -> float | None:
    return None if amount is None else float(amount)


def _sentence(limit: Limits, chosen: int, considered: int) -> str:
    clauses = [f"the best cluster of each of {chosen} types, of {considered:,} considered"]
    if limit.deadline_seconds is not None:
        clauses.append(f"at most {limit.deadline_seconds / 86400:g} days")
    if limit.stage_seconds is not None:
        clauses.append(f"each stage within max_runtime ({limit.stage_seconds / 86400:g} days)")
    if limit.budget_usd is not None:
        clauses.append(f"at most ${limit.budget_usd:,.2f}".removesuffix(".00"))
    return ", ".join(clauses) + ". One cluster runs every stage, at the run's effective batch."
