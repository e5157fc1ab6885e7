"""Every number of an estimate with its formula, its inputs and their sources."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from sm_train.cost.estimate import (
    MACHINE_PARTS,
    Estimate,
    StageEstimate,
    checkpoint_steps,
    failure_rate,
    interval_seconds,
    total,
)
from sm_train.cost.services import (
    SECONDS_PER_MONTH,
    blocking_seconds,
    checkpoint_bytes,
    service_prices,
)
from sm_train.cost.uncertainty import DRAWS


@dataclass(frozen=True)
class Term:
    """One traced number: ``name`` = ``formula`` = ``figures`` = ``value``."""

    stage: str
    name: str
    value: str
    formula: str
    figures: str
    source: str


def explain(priced: Estimate) -> list[Term]:
    """Each number that an estimate shows, in the order in which they build on each other."""
    terms = [term for one in priced.stages for term in _stage_terms(one, priced)]
    return [*terms, *_total_terms(priced)]


def _stage_terms(one: StageEstimate, priced: Estimate) -> Iterator[Term]:
    stage = one.stage
    yield Term(
        stage.name,
        "GPUs",
        f"{stage.world_size}",
        "instances × GPUs of an instance",
        f"{stage.instances} × {stage.machine.accelerators}",
        stage.instance_type,
    )
    if stage.per_device_batch_size is not None:
        yield Term(
            stage.name,
            "batch",
            f"{stage.effective_batch_size:,} images",
            "batch per GPU × accumulation × GPUs",
            f"{stage.per_device_batch_size} × {stage.gradient_accumulation_steps} "
            f"× {stage.world_size}",
            "run file",
        )
    if stage.speed is not None:
        yield from _speed_terms(one)
    yield from _seconds_terms(one, priced)
    yield from _money_terms(one, priced)


def _speed_terms(one: StageEstimate) -> Iterator[Term]:
    stage, speed = one.stage, one.stage.speed
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
        peak = stage.machine.bf16_tflops
        yield Term(
            stage.name,
            "MFU",
            f"{stage.flops_utilization:.1%}",
            "images/s × FLOP an image ÷ (GPUs × peak)",
            f"{stage.images_per_second:,.1f} × {stage.flops_per_image / 1e12:.4g} TFLOP ÷ "
            f"({stage.world_size} × {peak:g} TFLOP/s)",
            "counted from the preset; peak of dense bf16",
        )


def _seconds_terms(one: StageEstimate, priced: Estimate) -> Iterator[Term]:
    stage, seconds, assumed = one.stage, one.seconds, priced.assumed
    every = checkpoint_steps(stage, assumed)
    if stage.speed is not None and seconds.training is not None:
        yield Term(
            stage.name,
            "training",
            f"{seconds.training:,.1f} s",
            "iterations ÷ it/s",
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
        "whole intervals × checkpoint_blocking_seconds",
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
    if one.failures is None or seconds.restarts is None or seconds.training is None:
        return
    rate = failure_rate(stage, priced.purchase, assumed)
    running = seconds.training + seconds.checkpoints + seconds.evaluation
    yield Term(
        stage.name,
        "failures",
        f"{one.failures:.3g}",
        "rate × GPUs × hours running",
        f"{rate:.3g} × {stage.world_size} × {running / 3600:,.1f}",
        assumed.source("failures_per_gpu_hour"),
    )
    interval = interval_seconds(stage, assumed, seconds.training)
    yield Term(
        stage.name,
        "restarts",
        f"{seconds.restarts:,.1f} s",
        "failures × (restart_seconds + half a checkpoint interval), redone work failing again",
        f"{one.failures:.3g} × ({assumed.restart_seconds:g} + {interval:,.1f} ÷ 2)",
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


def _money_terms(one: StageEstimate, priced: Estimate) -> Iterator[Term]:
    stage, price = one.stage, one.price.usd_per_instance_hour
    if price is not None:
        yield Term(
            stage.name,
            "$/h",
            f"${stage.instances * price:,.4f}",
            "instances × price",
            f"{stage.instances} × ${price:,.6f}",
            f"{one.price.source}, {one.price.date or 'undated'}",
        )
    for name in MACHINE_PARTS:
        amount, seconds = one.breakdown[name], getattr(one.seconds, name)
        if amount:
            yield Term(
                stage.name,
                f"{name} $",
                f"${amount:,.4f}",
                "seconds ÷ 3600 × $/h",
                f"{seconds:,.1f} ÷ 3600 × ${stage.instances * (price or 0):,.4f}",
                "derived",
            )
    yield from _service_terms(one, priced)
    if one.cost is not None:
        yield Term(
            stage.name,
            "cost",
            f"${one.cost:,.4f}",
            "sum of the dollars above",
            " + ".join(f"{part:,.2f}" for part in one.breakdown.values() if part),
            "derived",
        )
    if one.low is not None and one.high is not None:
        yield Term(
            stage.name,
            "range",
            f"${one.low:,.2f} to ${one.high:,.2f}",
            f"P10 and P90 of {DRAWS:,} seeded draws of speed, start-up and failures",
            "seed 0",
            "cost/uncertainty.py",
        )


def _service_terms(one: StageEstimate, priced: Estimate) -> Iterator[Term]:
    stage, prices, assumed = one.stage, service_prices(), priced.assumed
    if one.breakdown.get("storage") is not None:
        size = (checkpoint_bytes(stage) or 0) / 1e9
        yield Term(
            stage.name,
            "storage $",
            f"${one.breakdown['storage']:,.4f}",
            "checkpoints kept × GB × months × price",
            f"{stage.checkpoints_kept} × {size:,.2f} × "
            f"{(one.seconds.billable or 0) / SECONDS_PER_MONTH:.3g} × ${prices['s3_storage'].usd}",
            prices["s3_storage"].source,
        )
    if one.breakdown.get("requests") is not None:
        yield Term(
            stage.name,
            "requests $",
            f"${one.breakdown['requests']:,.4f}",
            "images × bytes_per_image ÷ bytes_per_request × price of a GET",
            f"{stage.images:,} × {assumed.bytes_per_image:,.0f} ÷ {assumed.bytes_per_request:,.0f}"
            f" × ${prices['s3_get'].usd:f}",
            prices["s3_get"].source,
        )
    yield Term(
        stage.name,
        "logs $",
        f"${one.breakdown['logs'] or 0:,.4f}",
        "iterations × log_bytes_per_step × price of a GB",
        f"{stage.max_steps:,} × {assumed.log_bytes_per_step:g} ÷ 10⁹ × "
        f"${prices['logs_ingestion'].usd}",
        prices["logs_ingestion"].source,
    )


def _total_terms(priced: Estimate) -> Iterator[Term]:
    billable = [one.seconds.billable for one in priced.stages]
    if (seconds := total(billable)) is not None:
        yield Term(
            "total",
            "days",
            f"{seconds / 86400:.4g}",
            "sum of the stages, one after another",
            " + ".join(f"{(one or 0) / 86400:.4g}" for one in billable),
            "derived",
        )
    if priced.cost is not None:
        yield Term(
            "total",
            "cost",
            f"${priced.cost:,.4f}",
            "sum of the stages",
            " + ".join(f"{one.cost or 0:,.2f}" for one in priced.stages),
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
