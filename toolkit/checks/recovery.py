"""Checks what an interruption costs the run, and whether the run is restarted automatically."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from sm_train.estimators.config.schema import RunConfig
from sm_train.toolkit.checks.finding import Check, Finding
from sm_train.toolkit.terminal.formatting import format_duration, format_usd

_LONG_SECONDS = 4 * 3600
_LONG_SPOT_SECONDS = 1800
_WORTH_USD, _WORTH_SHARE = 100, 0.01


NO_RETRIES = Check("no-retries", ("warning",))
INTERRUPTIONS_EXPECTED = Check("interruptions-expected", ("info",))
NO_CHECKPOINTS = Check("no-checkpoints", ("error", "warning"))
CHECKPOINT_INTERVAL = Check("checkpoint-interval", ("warning", "info"))


def recovery_findings(config: RunConfig, document: dict[str, Any]) -> Iterator[Finding]:
    """Check each stage of ``document``, that of ``cost --json``."""
    for index, stage in enumerate(document["stages"]):
        where = f"stages[{index}]"
        yield from _retry_findings(config, stage, where)
        if config.checkpoint.every_steps >= stage["max_steps"]:
            yield from _no_checkpoint_findings(config, stage)
    # All stages share one interval, so report the stage where it costs the most.
    worst = max(document["stages"], key=_extra_usd)
    if config.checkpoint.every_steps < worst["max_steps"]:
        yield from _interval_findings(config, worst)


def _retry_findings(config: RunConfig, stage: dict[str, Any], where: str) -> Iterator[Finding]:
    seconds, failures = stage["billable_seconds"], stage["expected_failures"]
    expected = (
        f"{failures:.1f} interruptions are expected in {format_duration(seconds)}"
        if failures
        else ""
    )
    if config.cluster.retries == 0 and (stage["instances"] > 1 or (seconds or 0) > 86400):
        yield NO_RETRIES.found(
            "warning",
            "cluster.retries",
            f"a SageMaker internal error ends {stage['name']} on {stage['instances']} "
            "instances" + (f"; {expected}" if expected else ""),
            "set retries: 3",
        )
    if failures is not None and failures >= 1:
        yield INTERRUPTIONS_EXPECTED.found(
            "info",
            where,
            f"{expected}; retries cover only SageMaker's internal errors",
            "restart the stage when it fails: it resumes from its latest checkpoint",
        )


def _no_checkpoint_findings(config: RunConfig, stage: dict[str, Any]) -> Iterator[Finding]:
    spot = config.cluster.capacity == "spot"
    seconds = stage["billable_seconds"]
    if seconds is None and not spot:
        return
    if seconds is not None and seconds <= (_LONG_SPOT_SECONDS if spot else _LONG_SECONDS):
        return
    best = stage["checkpoint_interval"]
    every = best["best_steps"] if best else max(1, stage["max_steps"] // 20)
    yield NO_CHECKPOINTS.found(
        "error" if spot else "warning",
        "checkpoint.every_steps",
        f"{stage['name']} has {stage['max_steps']:,} steps and saves a checkpoint every "
        f"{config.checkpoint.every_steps:,}: an interruption loses all of it"
        + (f", up to {format_usd(stage['cost_usd'])}" if stage["cost_usd"] else ""),
        f"set every_steps: {every}",
    )


def _extra_usd(stage: dict[str, Any]) -> float:
    """Return the dollars lost by not using the best interval; 0 where unknown."""
    interval = stage["checkpoint_interval"]
    extra: float | None = interval and interval["configured_extra_usd"]
    return extra or 0.0


def _interval_findings(config: RunConfig, stage: dict[str, Any]) -> Iterator[Finding]:
    interval, extra = stage["checkpoint_interval"], _extra_usd(stage)
    if extra < max(_WORTH_USD, _WORTH_SHARE * (stage["cost_usd"] or 0)):
        return
    yield CHECKPOINT_INTERVAL.found(
        "warning" if config.cluster.capacity == "spot" else "info",
        "checkpoint.every_steps",
        f"a checkpoint of {stage['name']} every "
        f"{format_duration(interval['configured_seconds'])} costs {format_usd(extra)} more "
        f"than one every {format_duration(interval['best_seconds'])}",
        f"set every_steps: {interval['best_steps']}",
    )
