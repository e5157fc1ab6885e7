"""The alternatives of a run file: what is considered, and what keeps to the limits."""

from __future__ import annotations

from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from sm_train.cost.alternatives import Limits, SearchInputs, alternatives, choose, with_range
from sm_train.toolkit.costing.command import Costing
from sm_train.toolkit.costing.stages import known_speeds, memory_needs
from sm_train.toolkit.errors import UserError
from sm_train.toolkit.terminal.formatting import parse_duration


@dataclass(frozen=True)
class AlternativesResult:
    """Alternatives within the limits as documents, of how many, and the limits in words."""

    documents: list[dict[str, Any]]
    considered: int
    sentence: str


def limits(deadline: str | None, budget: float | None) -> Limits:
    """The limits that the options name.

    Raises:
        UserError: an option is no time, or no positive number of dollars.
    """
    latest = None if deadline is None else parse_duration("--deadline", deadline)
    if latest == 0:
        raise UserError(f"--deadline: {deadline!r} must be longer than nothing")
    if budget is not None and not 0 < budget < float("inf"):
        raise UserError(f"--budget: {budget} must be a positive number of dollars")
    return Limits(latest, None if budget is None else Decimal(str(budget)))


def list_alternatives(question: Costing, limit: Limits, *, ranged: int) -> AlternativesResult:
    """Every cluster that could run the run within ``limit``; the first ``ranged`` with a range."""
    if question.config is None:
        raise UserError("--alternatives: belongs to a run file; give RUN too")
    asked = SearchInputs(
        stages=question.stages,
        memory=memory_needs(question.config, question.stages),
        measurements=(
            *known_speeds(
                one for one in question.stages if one.speed and one.speed.basis == "stated"
            ),
            *(one.measurement for one in question.measured if not one.measurement.on_cpu),
        ),
        region=question.purchase.region,
        assumed=question.assumed,
        prices=question.prices,
    )
    considered = alternatives(asked)
    chosen = choose(considered, limit)
    documents = []
    for place, one in enumerate(chosen):
        low, high = with_range(one, asked) if place < ranged else (None, None)
        documents.append(
            one.as_dict()
            | {
                "cost_low_usd": None if low is None else float(low),
                "cost_high_usd": None if high is None else float(high),
            }
        )
    return AlternativesResult(
        documents, len(considered), _sentence(limit, len(chosen), len(considered))
    )


def _sentence(limit: Limits, chosen: int, considered: int) -> str:
    words = [f"{chosen:,} of {considered:,} clusters"]
    if limit.deadline_seconds is not None:
        words.append(f"take at most {limit.deadline_seconds / 86400:g} days")
    if limit.budget_usd is not None:
        words.append(f"cost at most ${limit.budget_usd:,.2f}".removesuffix(".00"))
    return " and ".join((" ".join(words[:2]), *words[2:])) + (
        "; * is Pareto-optimal: nothing is both cheaper and faster. One cluster runs every stage."
    )
