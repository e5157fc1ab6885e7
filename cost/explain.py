"""Every number of an estimate with its formula, inputs and sources; sensitivity of the total."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from decimal import Decimal

from sm_train.cost.assumptions import Assumptions
from sm_train.cost.estimate import Estimate, StageEstimate, price_stage
from sm_train.cost.quantity import Quantity, derivations, sum_of
from sm_train.cost.services import blocking
from sm_train.cost.stage import CostStage
from sm_train.cost.uncertainty import DRAWS


@dataclass(frozen=True)
class Term:
    """One number of the estimate: ``name`` = ``formula`` = ``figures`` = ``value``."""

    stage: str
    name: str
    value: str
    formula: str
    figures: str
    source: str


def explain(priced: Estimate) -> list[Term]:
    """Return every number of an estimate in the order of derivation, then the sensitivities."""
    terms = [term for stage in priced.stages for term in _stage_terms(stage)]
    return [*terms, *_total_terms(priced), *_sensitivity_terms(priced)]


def _stage_terms(estimate: StageEstimate) -> Iterator[Term]:
    for quantity in derivations(estimate.terms.values()):
        unpaid = isinstance(quantity.value, Decimal) and not quantity.value
        unused = quantity.name == "warm_pool" and not quantity.value
        if quantity.value is not None and not (unpaid or unused):
            yield _term(estimate.stage.name, quantity)
    yield from _range_terms(
        estimate.stage.name,
        estimate,
        f"P10 and P90 of {DRAWS:,} seeded draws of speed, start-up and failures",
    )


def _term(stage: str, quantity: Quantity) -> Term:
    formula, figures = quantity.formula, quantity.figures
    return Term(stage, quantity.name, quantity.text, formula, figures, quantity.source)


def _range_terms(name: str, ranged: StageEstimate | Estimate, formula: str) -> Iterator[Term]:
    if ranged.low is not None and ranged.high is not None:
        shown = f"${ranged.low:,.2f} to ${ranged.high:,.2f}"
        yield Term(name, "range", shown, formula, "seed 0", "cost/uncertainty.py")


def _total_terms(priced: Estimate) -> Iterator[Term]:
    """Sums over the stages, which train one after another."""
    for name in ("days", "cost"):
        parts = [
            replace(stage.terms[name], name=f"{name} of {stage.stage.name}", parts=())
            for stage in priced.stages
        ]
        total = sum_of(parts).named(name, parts[0].shown)
        if total.value is not None:
            yield _term("total", replace(total, parts=total.parts or (parts[0],)))
    yield from _range_terms("total", priced, "P10 and P90 of the summed draws")


def _sensitivity_terms(priced: Estimate) -> Iterator[Term]:
    for move in sensitivities(priced):
        yield Term(
            "total",
            f"if {move.name} {move.change}",
            signed_dollars(move.delta),
            "total with the changed assumption − total",
            move.change,
            "derived",
        )


@dataclass(frozen=True)
class Sensitivity:
    """Applying ``change`` to the assumption ``name`` changes the total by ``delta`` dollars."""

    name: str
    change: str
    delta: Decimal


def sensitivities(priced: Estimate) -> list[Sensitivity]:
    """Return the changes of the total, the largest first; none if the total is unknown."""
    before = priced.cost
    if before is None:
        return []
    moves = [
        Sensitivity(name, change, after - before)
        for name, change, vary in _VARIATIONS
        if (after := _total(priced, vary)) is not None and abs(after - before) >= Decimal("0.005")
    ]
    return sorted(moves, key=lambda move: -abs(move.delta))


def signed_dollars(amount: Decimal | float) -> str:
    """Format dollars with their sign, as ``+$4,210``; cents below 100."""
    sign = "+" if amount >= 0 else "−"
    size = abs(float(amount))
    return f"{sign}${size:,.0f}" if size >= 100 else f"{sign}${size:,.2f}"


_Vary = Callable[[StageEstimate, Assumptions], tuple[StageEstimate, Assumptions]]


def _total(priced: Estimate, vary: _Vary) -> Decimal | None:
    total = Decimal(0)
    for stage in priced.stages:
        changed, assumed = vary(stage, priced.assumed)
        again = price_stage(changed.stage, changed.price, priced.purchase, assumed).cost
        if again is None:
            return None
        total += again
    return total


def _slower(estimate: StageEstimate, assumed: Assumptions) -> tuple[StageEstimate, Assumptions]:
    speed = estimate.stage.speed
    if speed is None:
        return estimate, assumed
    stage: CostStage = estimate.stage.at(speed.scaled(0.9))
    return replace(estimate, stage=stage), assumed


def _more_expensive(
    estimate: StageEstimate, assumed: Assumptions
) -> tuple[StageEstimate, Assumptions]:
    price = estimate.price.usd_per_instance_hour
    if price is None:
        return estimate, assumed
    raised = replace(estimate.price, usd_per_instance_hour=price * Decimal("1.1"))
    return replace(estimate, price=raised), assumed


def _blocking_longer(
    estimate: StageEstimate, assumed: Assumptions
) -> tuple[StageEstimate, Assumptions]:
    delay = blocking(estimate.stage, assumed).value or 0.0
    return estimate, assumed.assuming(checkpoint_blocking_seconds=2 * delay)


def _times(field: str, factor: float) -> _Vary:
    def vary(estimate: StageEstimate, assumed: Assumptions) -> tuple[StageEstimate, Assumptions]:
        return estimate, assumed.assuming(**{field: getattr(assumed, field) * factor})

    return vary


_VARIATIONS: tuple[tuple[str, str, _Vary], ...] = (
    ("it/s", "−10 %", _slower),
    ("price", "+10 %", _more_expensive),
    ("checkpoint blocking", "× 2", _blocking_longer),
    ("start-up", "× 2", _times("start_up_seconds", 2)),
    ("evaluation", "× 2", _times("evaluation_seconds", 2)),
    ("failures", "× 3", _times("failures_per_gpu_hour", 3)),
    ("restart", "× 2", _times("restart_seconds", 2)),
    ("bytes per image", "× 2", _times("bytes_per_image", 2)),
)
