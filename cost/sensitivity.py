"""How much the expected dollars move when one assumption does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from decimal import Decimal

from sm_train.cost.assumptions import Assumptions
from sm_train.cost.estimate import Estimate, StageEstimate, price_stage
from sm_train.cost.services import blocking_seconds
from sm_train.cost.stage import CostStage


@dataclass(frozen=True)
class Sensitivity:
    """``change`` of the assumption called ``name`` moves the total by ``delta`` dollars."""

    name: str
    change: str
    delta: Decimal


def sensitivities(priced: Estimate) -> list[Sensitivity]:
    """The moves of the total, the largest first; nothing where the total is not known."""
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
    """``+$4,210``; cents below 100."""
    sign = "+" if amount >= 0 else "−"
    size = abs(float(amount))
    return f"{sign}${size:,.0f}" if size >= 100 else f"{sign}${size:,.2f}"


_Vary = Callable[[StageEstimate, Assumptions], tuple[StageEstimate, Assumptions]]


def _total(priced: Estimate, vary: _Vary) -> Decimal | None:
    total = Decimal(0)
    for one in priced.stages:
        changed, assumed = vary(one, priced.assumed)
        again = price_stage(changed.stage, changed.price, priced.purchase, assumed).cost
        if again is None:
            return None
        total += again
    return total


def _slower(one: StageEstimate, assumed: Assumptions) -> tuple[StageEstimate, Assumptions]:
    speed = one.stage.speed
    if speed is None:
        return one, assumed
    slower = replace(
        speed,
        steps_per_second=speed.steps_per_second * 0.9,
        low=speed.low * 0.9,
        high=speed.high * 0.9,
    )
    stage: CostStage = one.stage.at(slower)
    return replace(one, stage=stage), assumed


def _dearer(one: StageEstimate, assumed: Assumptions) -> tuple[StageEstimate, Assumptions]:
    price = one.price.usd_per_instance_hour
    if price is None:
        return one, assumed
    dearer = replace(one.price, usd_per_instance_hour=price * Decimal("1.1"))
    return replace(one, price=dearer), assumed


def _blocking_longer(one: StageEstimate, assumed: Assumptions) -> tuple[StageEstimate, Assumptions]:
    blocking = blocking_seconds(one.stage, assumed) or 0.0
    return one, assumed.assuming(checkpoint_blocking_seconds=2 * blocking)


def _times(field: str, factor: float) -> _Vary:
    def vary(one: StageEstimate, assumed: Assumptions) -> tuple[StageEstimate, Assumptions]:
        return one, assumed.assuming(**{field: getattr(assumed, field) * factor})

    return vary


_VARIATIONS: tuple[tuple[str, str, _Vary], ...] = (
    ("it/s", "−10 %", _slower),
    ("price", "+10 %", _dearer),
    ("checkpoint blocking", "× 2", _blocking_longer),
    ("start-up", "× 2", _times("start_up_seconds", 2)),
    ("evaluation", "× 2", _times("evaluation_seconds", 2)),
    ("failures", "× 3", _times("failures_per_gpu_hour", 3)),
    ("restart", "× 2", _times("restart_seconds", 2)),
    ("bytes an image", "× 2", _times("bytes_per_image", 2)),
)
