"""Alternative clusters for a run file, within a deadline and a budget."""

from __future__ import annotations

from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from sm_train.cost.alternatives import Limits, SearchInputs, alternatives, choose, with_range
from sm_train.toolkit.costing.command import EstimateInputs
from sm_train.toolkit.costing.stages import memory_needs, stated_measurements
from sm_train.toolkit.errors import UserError
from sm_train.toolkit.terminal.formatting import parse_duration


@dataclass(frozen=True)
class AlternativesResult:
    """Documents of the alternatives within the limits.

    ``considered`` is the number of all alternatives; ``sentence`` summarizes the limits.
    """

    documents: list[dict[str, Any]]
    considered: int
    sentence: str


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


def list_alternatives(
    inputs: EstimateInputs, limit: Limits, *, with_ranges: int
) -> AlternativesResult:
    """List every cluster that can run the run within ``limit``, cheapest first.

    The first ``with_ranges`` get a cost range, which takes time to compute.
    """
    if inputs.config is None:
        raise UserError("--alternatives: belongs to a run file; give RUN too")
    search = SearchInputs(
        stages=inputs.stages,
        memory=memory_needs(inputs.config, inputs.stages),
        measurements=(
            *stated_measurements(
                stage for stage in inputs.stages if stage.speed and stage.speed.basis == "stated"
            ),
            *(
                measured.measurement
                for measured in inputs.measured
                if not measured.measurement.on_cpu
            ),
        ),
        region=inputs.purchase.region,
        assumed=inputs.assumptions,
        prices=inputs.prices,
    )
    considered = alternatives(search)
    chosen = choose(considered, limit)
    documents = []
    for rank, alternative in enumerate(chosen):
        low, high = with_range(alternative, search) if rank < with_ranges else (None, None)
        documents.append(
            alternative.as_dict()
            | {
                "cost_low_usd": None if low is None else float(low),
                "cost_high_usd": None if high is None else float(high),
            }
        )
    return AlternativesResult(
        documents, len(considered), _sentence(limit, len(chosen), len(considered))
    )


def _sentence(limit: Limits, chosen: int, considered: int) -> str:
    clauses = [f"{chosen:,} of {considered:,} clusters"]
    if limit.deadline_seconds is not None:
        clauses.append(f"take at most {limit.deadline_seconds / 86400:g} days")
    if limit.budget_usd is not None:
        clauses.append(f"cost at most ${limit.budget_usd:,.2f}".removesuffix(".00"))
    return " and ".join((" ".join(clauses[:2]), *clauses[2:])) + (
        "; * is Pareto-optimal: nothing is both cheaper and faster. One cluster runs every stage."
    )
