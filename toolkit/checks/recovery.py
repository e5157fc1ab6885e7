"""What an interruption costs the run, and who begins it again."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from sm_train.estimators.config.schema import RunConfig
from sm_train.toolkit.checks.finding import Check, Finding
from sm_train.toolkit.terminal.formatting import format_duration, format_usd

_LONG_SECONDS = 4 * 3600
_LONG_SPOT_SECONDS = 1800
_WORTH_USD, _WORTH_SHARE = 100, 0.01

_RETRY_SOURCE = "SageMaker API reference, RetryStrategy (2026-11)"

NO_RETRIES = Check(
    "no-retries",
    ("warning",),
    means="`cluster.retries` is 0 and the job runs on several instances, or for longer than a day.",
    impact="An InternalServerError of SageMaker's own then ends the job. Until somebody sees it "
    "nothing is trained; the machines have to be had again.",
    fix="Write `retries: 3` or more. Attempts cost nothing unless they are made, and share "
    "`max_runtime`.",
    source=_RETRY_SOURCE,
)
INTERRUPTIONS_EXPECTED = Check(
    "interruptions-expected",
    ("info",),
    means="By published failure rates (`sm-train cost RUN --explain` names them) at least one "
    "interruption is expected. SageMaker's retries cover InternalServerError and nothing else: a "
    "GPU that fails, a peer that is lost or a reclaimed spot machine ends the job.",
    impact="The estimate counts them: each loses a restart and half a checkpoint interval.",
    fix="Have somebody or something start the stage again: the same checkpoints are resumed.",
    source=_RETRY_SOURCE,
)
NO_CHECKPOINTS = Check(
    "no-checkpoints",
    ("error", "warning"),
    means="`checkpoint.every_steps` is no less than the stage's iterations, so the only "
    "checkpoint is "
    "the last. An error on spot machines, which are taken away as a matter of course.",
    impact="An interruption loses everything that the stage has trained until then.",
    fix="Write the `checkpoint.every_steps` that the finding names.",
)
CHECKPOINT_INTERVAL = Check(
    "checkpoint-interval",
    ("warning", "info"),
    means="Another `checkpoint.every_steps` would be cheaper, by more than $100 and 1 % of the "
    "stage: "
    "what failures lose between two checkpoints, against the time that checkpoints take. A "
    "warning on spot machines.",
    impact="The dollars that the finding names.",
    fix="Write the `checkpoint.every_steps` that the finding names.",
    source="Daly, A higher order estimate of the optimum checkpoint interval (2006)",
)


def recovery_findings(config: RunConfig, document: dict[str, Any]) -> Iterator[Finding]:
    """By the document of ``cost --json``."""
    for index, stage in enumerate(document["stages"]):
        where = f"stages[{index}]"
        yield from _retries(config, stage, where)
        if config.checkpoint.every_steps >= stage["max_steps"]:
            yield from _no_checkpoints(config, stage)
    # One key for all stages: the one that it costs most.
    dearest = max(document["stages"], key=_extra)
    if config.checkpoint.every_steps < dearest["max_steps"]:
        yield from _interval(config, dearest)


def _retries(config: RunConfig, stage: dict[str, Any], where: str) -> Iterator[Finding]:
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
            f"an internal error of SageMaker's ends {stage['name']}, on {stage['instances']} "
            "instances" + (f"; {expected}" if expected else ""),
            "write retries: 3",
        )
    if failures is not None and failures >= 1:
        yield INTERRUPTIONS_EXPECTED.found(
            "info",
            where,
            f"{expected}; retries cover SageMaker's internal errors only",
            "have the stage started again when it fails: it goes on from its newest checkpoint",
        )


def _no_checkpoints(config: RunConfig, stage: dict[str, Any]) -> Iterator[Finding]:
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
        f"{stage['name']} has {stage['max_steps']:,} iterations and a checkpoint every "
        f"{config.checkpoint.every_steps:,}: an interruption loses all of it"
        + (f", up to {format_usd(stage['cost_usd'])}" if stage["cost_usd"] else ""),
        f"write every_steps: {every}",
    )


def _extra(stage: dict[str, Any]) -> float:
    """Dollars that the interval costs more than the best one; 0 where that is not known."""
    interval = stage["checkpoint_interval"]
    extra: float | None = interval and interval["configured_extra_usd"]
    return extra or 0.0


def _interval(config: RunConfig, stage: dict[str, Any]) -> Iterator[Finding]:
    interval, extra = stage["checkpoint_interval"], _extra(stage)
    if extra < max(_WORTH_USD, _WORTH_SHARE * (stage["cost_usd"] or 0)):
        return
    yield CHECKPOINT_INTERVAL.found(
        "warning" if config.cluster.capacity == "spot" else "info",
        "checkpoint.every_steps",
        f"a checkpoint of {stage['name']} every "
        f"{format_duration(interval['configured_seconds'])} costs {format_usd(extra)} more "
        f"than one every {format_duration(interval['best_seconds'])}",
        f"write every_steps: {interval['best_steps']}",
    )
