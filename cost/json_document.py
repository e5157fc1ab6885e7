"""The document of ``cost --json``: dollars are floats, unknown is None."""

from __future__ import annotations

from collections.abc import Sequence
from decimal import Decimal
from typing import Any

from sm_train.cost.estimate import (
    SECONDS_PER_HOUR,
    CheckpointInterval,
    Estimate,
    StageEstimate,
    checkpoint_interval,
    total,
)
from sm_train.cost.explain import sensitivities
from sm_train.cost.prices import ON_DEMAND, TRAINING_PLAN
from sm_train.cost.services import blocking

_HOURS_PER_DAY = 24
_MILLION = 10**6


def as_document(priced: Estimate) -> dict[str, Any]:
    """Return stages, total, assumptions and the sensitivity of the total to them."""
    stages = priced.stages
    seconds = total([stage.seconds.billable for stage in stages])
    return {
        "stages": [_stage(stage, priced) for stage in stages],
        "total": {
            "billable_seconds": seconds,
            "wall_seconds": seconds,
            "wall_seconds_low": priced.seconds_range and priced.seconds_range.low,
            "wall_seconds_high": priced.seconds_range and priced.seconds_range.high,
            "instance_hours": total([stage.instance_hours for stage in stages]),
            "cost_usd": usd(priced.cost),
            "cost_low_usd": usd(priced.low),
            "cost_high_usd": usd(priced.high),
            "cost_at_least_usd": usd(priced.known_cost),
            "cost_at_most_usd": usd(priced.at_most),
        },
        "assumptions": _sentences(priced),
        "sensitivity": [
            {"assumption": move.name, "change": move.change, "cost_delta_usd": usd(move.delta)}
            for move in sensitivities(priced)
        ],
    }


def _stage(estimate: StageEstimate, priced: Estimate) -> dict[str, Any]:
    stage, price, speed = estimate.stage, estimate.price, estimate.stage.speed
    return {
        "name": stage.name,
        "resolution": stage.resolution,
        "instance_type": stage.instance_type,
        "instances": stage.instances,
        "world_size": stage.world_size,
        "effective_batch_size": stage.effective_batch_size,
        "max_steps": stage.max_steps,
        "images": stage.images,
        "samples": stage.samples,
        "epochs": stage.epochs,
        "steps_per_second": speed and speed.steps_per_second,
        "steps_per_second_low": speed and speed.low,
        "steps_per_second_high": speed and speed.high,
        "throughput_basis": speed.basis if speed else "unknown",
        "throughput_source": speed and speed.why,
        "images_per_second": stage.images_per_second,
        "flops_utilization": stage.flops_utilization,
        "training_seconds": estimate.seconds.training,
        "overhead_seconds": estimate.seconds.overhead,
        "billable_seconds": estimate.seconds.billable,
        "billable_seconds_low": estimate.seconds_range and estimate.seconds_range.low,
        "billable_seconds_high": estimate.seconds_range and estimate.seconds_range.high,
        "expected_failures": estimate.failures,
        "instance_hours": estimate.instance_hours,
        "price_per_instance_hour_usd": usd(price.usd_per_instance_hour),
        "cluster_per_day_usd": _per_day(estimate),
        "price_low_usd": usd(price.least),
        "price_high_usd": usd(price.most),
        "price_status": price.status,
        "price_source": price.source,
        "price_date": price.date,
        "cost_usd": usd(estimate.cost),
        "cost_low_usd": usd(estimate.low),
        "cost_high_usd": usd(estimate.high),
        "cost_at_least_usd": usd(estimate.known_cost),
        "job_at_most_usd": usd(estimate.job_at_most),
        "training_per_million_images_usd": _per_million(estimate),
        "breakdown_usd": {name: usd(part) for name, part in estimate.breakdown.items()},
        "checkpoint_interval": _interval(_best_interval(estimate, priced)),
    }


def _per_day(estimate: StageEstimate) -> float | None:
    price = estimate.price.usd_per_instance_hour
    return None if price is None else usd(usd_per_day(estimate.stage.instances, price))


def _per_million(estimate: StageEstimate) -> float | None:
    images, price = estimate.stage.images_per_second, estimate.price.usd_per_instance_hour
    if images is None or price is None:
        return None
    return usd(usd_per_million_images(images, estimate.stage.instances, price))


def usd_per_day(instances: int, usd_per_instance_hour: Decimal) -> Decimal:
    """Dollars for 24 hours of ``instances``: the most that a day can cost."""
    return instances * usd_per_instance_hour * _HOURS_PER_DAY


def usd_per_million_images(
    images_per_second: float, instances: int, usd_per_instance_hour: Decimal
) -> Decimal:
    """Dollars for a million images at ``images_per_second`` of the whole cluster.

    Training only, without start-up, restarts and checkpoints.
    """
    seconds = Decimal(_MILLION) / Decimal(images_per_second)
    return seconds * instances * usd_per_instance_hour / SECONDS_PER_HOUR


def _best_interval(estimate: StageEstimate, priced: Estimate) -> CheckpointInterval | None:
    return checkpoint_interval(estimate, priced.purchase, priced.assumed)


def _interval(interval: CheckpointInterval | None) -> dict[str, Any] | None:
    if interval is None:
        return None
    return {
        "configured_seconds": interval.seconds,
        "best_seconds": interval.best_seconds,
        "best_steps": interval.best_steps,
        "configured_extra_usd": usd(interval.extra),
    }


def usd(amount: Decimal | None) -> float | None:
    """Dollars as a JSON number."""
    return None if amount is None else float(amount)


def _sentences(priced: Estimate) -> list[str]:
    """Return everything the total rests on; unknown inputs first."""
    sentences = [
        *_unknown(priced),
        *_speeds(priced.stages),
        *_encoding(priced.stages),
        *_figures(priced),
        *_checkpoint_intervals(priced),
        *_capacity(priced),
        *_prices(priced),
        "range: P10 to P90 of seeded draws (80 % of outcomes)",
    ]
    return list(dict.fromkeys(sentences))


def _speeds(stages: Sequence[StageEstimate]) -> list[str]:
    return [
        f"it/s of {stage.name} ({stage.speed.basis}): {stage.speed.why}"
        for stage in (priced_stage.stage for priced_stage in stages)
        if stage.speed
    ]


def _encoding(stages: Sequence[StageEstimate]) -> list[str]:
    """Return for which stages the job is assumed to encode images and captions."""
    sentences = []
    for stage in (priced.stage for priced in stages):
        if stage.holds_latents:
            sentences.append(
                f"encoding of {stage.name}: none in the job, the shards hold latents of "
                f"{stage.resolution} px"
            )
        elif stage.encoder_flops_per_image and stage.flops_per_image:
            encoder = stage.encoder_flops_per_image
            share = encoder / (encoder + stage.flops_per_image)
            sentences.append(
                f"encoding of {stage.name}: images and captions are encoded in the job ({share:.0%}"
                f" of its FLOPs), as no index has latents of {stage.resolution} px"
            )
    return sentences


def _figures(priced: Estimate) -> list[str]:
    """Return the cost model's own parameters."""
    assumed = priced.assumed
    per_1000 = assumed.failures_per_gpu_hour * 24 * 1000
    interval = ""
    if any(priced_stage.stage.checkpoint_every is None for priced_stage in priced.stages):
        interval = f" ({assumed.checkpoint_every:,.0f} steps if none is stated)"
    sentences = [
        f"start-up: {assumed.start_up_seconds:g} s billed per stage "
        f"({assumed.source('start_up_seconds')})",
        *_compiling(priced),
        _blocking(priced),
        f"failures: {per_1000:.2g} per 1,000 GPU-days ({assumed.source('failures_per_gpu_hour')})",
        f"each failure loses {assumed.restart_seconds:g} s ({assumed.source('restart_seconds')}) "
        f"and half a checkpoint interval{interval}",
    ]
    if assumed.evaluation_seconds:
        sentences.append(
            f"evaluation: {assumed.evaluation_seconds:g} s per stage "
            f"({assumed.source('evaluation_seconds')})"
        )
    if any(stage.breakdown.get("requests") for stage in priced.stages):
        sentences.append(
            f"storage and requests: {assumed.bytes_per_image / 1000:g} kB per image in requests of "
            f"{assumed.bytes_per_request / 2**20:g} MiB ({assumed.source('bytes_per_image')}); "
            "checkpoints of 16 bytes per parameter, priced as in us-east-1"
        )
    return sentences


def _compiling(priced: Estimate) -> list[str]:
    """Return which stages are compiled, and how long that takes."""
    names = [stage.stage.name for stage in priced.stages if stage.stage.compiled]
    if not names:
        return []
    seconds, source = priced.assumed.compile_seconds, priced.assumed.source("compile_seconds")
    which = "all stages" if len(names) == len(priced.stages) else ", ".join(names)
    return [f"compilation of {which}: {seconds:g} s after each start ({source})"]


def _blocking(priced: Estimate) -> str:
    assumed = priced.assumed
    stops = {blocking(priced_stage.stage, assumed).value for priced_stage in priced.stages}
    known = [f"{seconds:.3g}" for seconds in sorted(stop for stop in stops if stop is not None)]
    if not known:
        return "checkpoints: their time is not included, because the model is unknown"
    source = assumed.source("checkpoint_blocking_seconds")
    if assumed.checkpoint_blocking_seconds is None:
        rate = assumed.checkpoint_bytes_per_second
        source = (
            "each GPU copies its share of 16 bytes per parameter to host memory at "
            f"{rate / 1e9:.2g} GB/s ({assumed.source('checkpoint_bytes_per_second')}), overlapped "
            "with the next step; the overlap is measured by benchmarks/checkpoint.py"
        )
    return f"checkpoints: each delays training by {' or '.join(known)} s ({source})"


def _checkpoint_intervals(priced: Estimate) -> list[str]:
    intervals = [
        (priced_stage.stage.name, _best_interval(priced_stage, priced))
        for priced_stage in priced.stages
    ]
    return [
        f"checkpoint interval of {name}: {interval.seconds:,.0f} s configured; "
        f"{interval.best_seconds:,.0f} s ({interval.best_steps:,} steps) would cost "
        f"${interval.extra:,.0f} less (Daly, 2006)"
        for name, interval in intervals
        if interval and interval.extra is not None and interval.extra >= 1
    ]


def _capacity(priced: Estimate) -> list[str]:
    purchase = priced.purchase
    if purchase.is_spot:
        return [
            "spot: one instance in five is reclaimed per month (the Spot Instance advisor's band "
            "above 20 % begins there; assumed for training)"
        ]
    if purchase.capacity == TRAINING_PLAN:
        return ["training plan: the fee is prepaid for the reserved time, used or not"]
    if purchase.capacity == "warm-pool":
        return ["warm pool: instances are kept and billed for keep_alive_period after each stage"]
    if purchase.kind != ON_DEMAND:
        return [f"{purchase.kind}: the commitment is billed whether it is used or not"]
    return []


def _prices(priced: Estimate) -> list[str]:
    return [
        f"price of {priced_stage.stage.instance_type}: {priced_stage.price.source}"
        for priced_stage in priced.stages
        if priced_stage.price.status in ("derived", "assumed")
    ]


def _unknown(priced: Estimate) -> list[str]:
    """Return why the total is only a lower bound: one sentence for each unknown input."""
    known = priced.known_cost
    least = f"at least ${known:,.2f}" if known >= 1 else "total unknown"
    speeds = [
        f"{least}: stage {priced_stage.stage.name} has no known it/s (measure it; set "
        "steps_per_second in the run file, or --its)"
        for priced_stage in priced.stages
        if priced_stage.stage.speed is None
    ]
    prices = [
        f"{least}: the price of {priced_stage.stage.instance_type} (stage "
        f"{priced_stage.stage.name}) is unknown: {priced_stage.price.source}"
        for priced_stage in priced.stages
        if priced_stage.price.usd_per_instance_hour is None
    ]
    return speeds + prices
