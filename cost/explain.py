"""Every number of an estimate with its formula, inputs and sources; sensitivity of the total."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from decimal import Decimal

from sm_train.cost.assumptions import Assumptions
from sm_train.cost.estimate import (
    INSTANCE_PARTS,
    Estimate,
    StageEstimate,
    checkpoint_steps,
    failure_rate,
    interval_seconds,
    price_stage,
    total,
)
from sm_train.cost.services import (
    SECONDS_PER_MONTH,
    blocking_seconds,
    checkpoint_bytes,
    service_prices,
    upload_requests,
)
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
    terms = [term for stage in priced.stages for term in _stage_terms(stage, priced)]
    return [*terms, *_total_terms(priced), *_sensitivity_terms(priced)]


def _stage_terms(estimate: StageEstimate, priced: Estimate) -> Iterator[Term]:
    stage = estimate.stage
    yield Term(
        stage.name,
        "GPUs",
        f"{stage.world_size}",
        "instances × GPUs per instance",
        f"{stage.instances} × {stage.instance.accelerators}",
        stage.instance_type,
    )
    if stage.per_device_batch_size is not None:
        yield Term(
            stage.name,
            "batch",
            f"{stage.effective_batch_size:,} images",
            "per_device_batch_size × gradient_accumulation_steps × GPUs",
            f"{stage.per_device_batch_size} × {stage.gradient_accumulation_steps} "
            f"× {stage.world_size}",
            "run file",
        )
    if stage.speed is not None:
        yield from _speed_terms(estimate)
    yield from _seconds_terms(estimate, priced)
    yield from _money_terms(estimate, priced)


def _speed_terms(estimate: StageEstimate) -> Iterator[Term]:
    stage, speed = estimate.stage, estimate.stage.speed
    assert speed is not None
    yield Term(
        stage.name,
        "it/s",
        f"{speed.steps_per_second:.4g}",
        speed.basis,
        f"P10 {speed.low:.4g}, P90 {speed.high:.4g}",
        speed.why,
    )
    if stage.images_per_second is not None:
        yield Term(
            stage.name,
            "images/s",
            f"{stage.images_per_second:,.1f}",
            "it/s × batch",
            f"{speed.steps_per_second:.4g} × {stage.effective_batch_size:,}",
            "derived",
        )
    if stage.flops_utilization is not None and stage.flops_per_image is not None:
        peak = stage.instance.bf16_tflops
        yield Term(
            stage.name,
            "MFU",
            f"{stage.flops_utilization:.1%}",
            "images/s × FLOPs per image ÷ (GPUs × peak)",
            f"{stage.images_per_second:,.1f} × {stage.flops_per_image / 1e12:.4g} TFLOP ÷ "
            f"({stage.world_size} × {peak:g} TFLOP/s)",
            "counted from the preset; dense bf16 peak",
        )


def _seconds_terms(estimate: StageEstimate, priced: Estimate) -> Iterator[Term]:
    stage, seconds, assumed = estimate.stage, estimate.seconds, priced.assumed
    every = checkpoint_steps(stage, assumed)
    if stage.speed is not None and seconds.training is not None:
        yield Term(
            stage.name,
            "training",
            f"{seconds.training:,.1f} s",
            "steps ÷ it/s",
            f"{stage.max_steps:,} ÷ {stage.speed.steps_per_second:.6g}",
            "run file",
        )
    yield Term(
        stage.name,
        "start-up",
        f"{seconds.start_up:,.1f} s",
        "start_up_seconds",
        f"{assumed.start_up_seconds:g}",
        assumed.source("start_up_seconds"),
    )
    yield Term(
        stage.name,
        "checkpoints",
        f"{seconds.checkpoints:,.1f} s",
        "complete intervals × (5 ms + copy, overlapped with a step)"
        if assumed.checkpoint_blocking_seconds is None
        else "complete intervals × checkpoint_blocking_seconds",
        f"{stage.max_steps:,} ÷ {every:,.0f} × {blocking_seconds(stage, assumed) or 0:.3g}",
        assumed.source("checkpoint_blocking_seconds"),
    )
    yield Term(
        stage.name,
        "evaluation",
        f"{seconds.evaluation:,.1f} s",
        "evaluation_seconds",
        f"{assumed.evaluation_seconds:g}",
        assumed.source("evaluation_seconds"),
    )
    if estimate.failures is None or seconds.restarts is None or seconds.training is None:
        return
    rate = failure_rate(stage, priced.purchase, assumed)
    running = seconds.training + seconds.checkpoints + seconds.evaluation
    yield Term(
        stage.name,
        "failures",
        f"{estimate.failures:.3g}",
        "rate × GPUs × hours running",
        f"{rate:.3g} × {stage.world_size} × {running / 3600:,.1f}",
        assumed.source("failures_per_gpu_hour"),
    )
    interval = interval_seconds(stage, assumed, seconds.training)
    yield Term(
        stage.name,
        "restarts",
        f"{seconds.restarts:,.1f} s",
        "failures × (restart_seconds + half a checkpoint interval), with repeated failures",
        f"{estimate.failures:.3g} × ({assumed.restart_seconds:g} + {interval:,.1f} ÷ 2)",
        assumed.source("restart_seconds"),
    )
    yield Term(
        stage.name,
        "billable",
        f"{seconds.billable:,.1f} s",
        "training + start-up + checkpoints + evaluation + restarts",
        f"{seconds.training:,.1f} + {seconds.start_up:,.1f} + {seconds.checkpoints:,.1f} + "
        f"{seconds.evaluation:,.1f} + {seconds.restarts:,.1f}",
        "derived",
    )
    yield Term(
        stage.name,
        "days",
        f"{(seconds.billable or 0) / 86400:.4g}",
        "billable ÷ 86,400",
        f"{seconds.billable:,.1f} ÷ 86,400",
        "derived",
    )


def _money_terms(estimate: StageEstimate, priced: Estimate) -> Iterator[Term]:
    stage, price = estimate.stage, estimate.price.usd_per_instance_hour
    if price is not None:
        yield Term(
            stage.name,
            "$/h",
            f"${stage.instances * price:,.4f}",
            "instances × price",
            f"{stage.instances} × ${price:,.6f}",
            f"{estimate.price.source}, {estimate.price.date or 'undated'}",
        )
    for name in INSTANCE_PARTS:
        amount, seconds = estimate.breakdown[name], getattr(estimate.seconds, name)
        if amount:
            yield Term(
                stage.name,
                f"{name} $",
                f"${amount:,.4f}",
                "seconds ÷ 3600 × $/h",
                f"{seconds:,.1f} ÷ 3600 × ${stage.instances * (price or 0):,.4f}",
                "derived",
            )
    yield from _service_terms(estimate, priced)
    if estimate.cost is not None:
        yield Term(
            stage.name,
            "cost",
            f"${estimate.cost:,.4f}",
            "sum of the dollars above",
            " + ".join(f"{part:,.2f}" for part in estimate.breakdown.values() if part),
            "derived",
        )
    if estimate.low is not None and estimate.high is not None:
        yield Term(
            stage.name,
            "range",
            f"${estimate.low:,.2f} to ${estimate.high:,.2f}",
            f"P10 and P90 of {DRAWS:,} seeded draws of speed, start-up and failures",
            "seed 0",
            "cost/uncertainty.py",
        )


def _service_terms(estimate: StageEstimate, priced: Estimate) -> Iterator[Term]:
    stage, prices, assumed = estimate.stage, service_prices(), priced.assumed
    if estimate.breakdown.get("storage") is not None:
        size = (checkpoint_bytes(stage) or 0) / 1e9
        yield Term(
            stage.name,
            "storage $",
            f"${estimate.breakdown['storage']:,.4f}",
            "checkpoints kept × GB × months × price",
            f"{stage.checkpoints_kept} × {size:,.2f} × "
            f"{(estimate.seconds.billable or 0) / SECONDS_PER_MONTH:.3g} × "
            f"${prices['s3_storage'].usd}",
            prices["s3_storage"].source,
        )
    if estimate.breakdown.get("uploads") is not None:
        yield Term(
            stage.name,
            "uploads $",
            f"${estimate.breakdown['uploads']:,.4f}",
            "checkpoints × PUT requests × price per PUT",
            f"{stage.max_steps // checkpoint_steps(stage, assumed):,.0f} × "
            f"{upload_requests(stage, assumed):,} × ${prices['s3_put'].usd:f}",
            prices["s3_put"].source,
        )
    if estimate.breakdown.get("requests") is not None:
        yield Term(
            stage.name,
            "requests $",
            f"${estimate.breakdown['requests']:,.4f}",
            "images × bytes_per_image ÷ bytes_per_request × price per GET",
            f"{stage.images:,} × {assumed.bytes_per_image:,.0f} ÷ {assumed.bytes_per_request:,.0f}"
            f" × ${prices['s3_get'].usd:f}",
            prices["s3_get"].source,
        )
    yield Term(
        stage.name,
        "logs $",
        f"${estimate.breakdown['logs'] or 0:,.4f}",
        "steps × log_bytes_per_step × price per GB",
        f"{stage.max_steps:,} × {assumed.log_bytes_per_step:g} ÷ 10⁹ × "
        f"${prices['logs_ingestion'].usd}",
        prices["logs_ingestion"].source,
    )


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


def _total_terms(priced: Estimate) -> Iterator[Term]:
    billable = [stage.seconds.billable for stage in priced.stages]
    if (seconds := total(billable)) is not None:
        yield Term(
            "total",
            "days",
            f"{seconds / 86400:.4g}",
            "sum of the stages, one after another",
            " + ".join(f"{(seconds_of_stage or 0) / 86400:.4g}" for seconds_of_stage in billable),
            "derived",
        )
    if priced.cost is not None:
        yield Term(
            "total",
            "cost",
            f"${priced.cost:,.4f}",
            "sum of the stages",
            " + ".join(f"{stage.cost or 0:,.2f}" for stage in priced.stages),
            "derived",
        )
    if priced.low is not None and priced.high is not None:
        yield Term(
            "total",
            "range",
            f"${priced.low:,.2f} to ${priced.high:,.2f}",
            "P10 and P90 of the summed draws",
            "seed 0",
            "cost/uncertainty.py",
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
    slower = replace(
        speed,
        steps_per_second=speed.steps_per_second * 0.9,
        low=speed.low * 0.9,
        high=speed.high * 0.9,
    )
    stage: CostStage = estimate.stage.at(slower)
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
    blocking = blocking_seconds(estimate.stage, assumed) or 0.0
    return estimate, assumed.assuming(checkpoint_blocking_seconds=2 * blocking)


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
