"""Print what a measurement will cost, and what it found."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import click
from sm_train.cost.stage import CostStage
from sm_train.estimators.config.schema import RunConfig
from sm_train.estimators.cost_stages import cost_stages
from sm_train.toolkit.planning.measured_speeds import MeasuredSpeed
from sm_train.toolkit.planning.run_price import with_model_figures
from sm_train.toolkit.probes.measuring.measurement_plan import MeasurementPlan, PlannedMeasurement
from sm_train.toolkit.terminal.formatting import (
    format_days,
    format_number,
    format_percent,
    format_usd,
)
from sm_train.toolkit.terminal.text_table import terminal_width, text_table

_GIB = 2**30


def plan_document(
    plan: MeasurementPlan, known: Callable[[PlannedMeasurement], str | None]
) -> dict[str, Any]:
    """Return the document of ``measure --dry-run --json``; ``known`` names an earlier job."""
    rows = [_plan_row(measurement, known(measurement)) for measurement in plan.measurements]
    new = [row for row in rows if row["measured_by"] is None]
    return {
        "stage": plan.stage.name,
        "measurements": rows,
        "skipped": list(plan.skipped),
        "expected_usd": _sum(row["expected_usd"] for row in new),
        "most_usd": _sum(row["most_usd"] for row in new),
    }


def _plan_row(measurement: PlannedMeasurement, job: str | None) -> dict[str, Any]:
    stage, [expected] = measurement.stage, measurement.expected.stages
    cost = measurement.expected.cost
    return {
        "run": measurement.config.name,
        "stage": stage.name,
        "instance_type": measurement.config.cluster.instance_type,
        "instances": stage.instances,
        "per_device_batch_size": stage.per_device_batch_size,
        "gradient_accumulation_steps": stage.gradient_accumulation_steps,
        "steps": measurement.steps,
        "warm_up_steps": stage.max_steps - measurement.steps,
        "expected_seconds": expected.seconds.billable,
        "max_runtime_seconds": measurement.config.cluster.max_runtime,
        "expected_usd": None if cost is None else float(cost),
        "most_usd": measurement.most_usd,
        "gpu_memory_planned": measurement.gpu_memory_planned,
        "measured_by": job,
    }


def _sum(amounts: Any) -> float | None:
    values = list(amounts)
    return None if None in values else float(sum(values))


def show_plan(document: dict[str, Any], *, local: bool) -> None:
    """Print the plan on standard error, before the question."""
    rows = [
        (
            f"{row['instances']} × {row['instance_type']}",
            f"{row['per_device_batch_size']}×{row['gradient_accumulation_steps']}",
            f"{row['warm_up_steps']}+{row['steps']}",
            *(() if local else _prices(row)),
        )
        for row in document["measurements"]
    ]
    header: tuple[str, ...] = ("cluster", "batch×acc.", "warm-up+steps")
    if not local:
        header += ("time", "limit", "cost", "at most")
    click.echo(f"Measure {document['stage']}", err=True)
    for line in text_table(header, rows, left=1, width=terminal_width()):
        click.echo(line, err=True)
    for line in document["skipped"]:
        click.echo(f"not measured: {line}", err=True)


def _prices(row: dict[str, Any]) -> tuple[str, ...]:
    limit = format_days(row["max_runtime_seconds"])
    if row["measured_by"] is not None:
        return ("done", limit, "$0.00", "$0.00")
    return (
        format_days(row["expected_seconds"]),
        limit,
        format_usd(row["expected_usd"]),
        format_usd(row["most_usd"]),
    )


def question(document: dict[str, Any]) -> str:
    """Return the question before jobs start."""
    count = sum(row["measured_by"] is None for row in document["measurements"])
    return (
        f"Start {count} job{'s' * (count != 1)}, one after the other: about "
        f"{format_usd(document['expected_usd'])}, at most {format_usd(document['most_usd'])}?"
    )


def show_result(
    config: RunConfig,
    speeds: Sequence[MeasuredSpeed],
    priced: CostStage | None,
    notes: Sequence[str],
) -> None:
    """Print the measured speeds and what the stage's own cluster follows from them."""
    rows = [_result_row(config, speed) for speed in speeds]
    header = ("cluster", "batch×acc.", "it/s", "img/s/GPU", "memory (plan)", "data wait")
    for line in text_table(header, rows, left=1, width=terminal_width()):
        click.echo(line)
    kinds = dict.fromkeys(speed.input_kind for speed in speeds)
    click.echo(f"Input: {', '.join(kinds)}")
    if priced is not None and priced.speed is not None:
        speed = priced.speed
        click.echo(
            f"{priced.name} on {priced.instances} × {priced.instance_type}: "
            f"{format_number(speed.steps_per_second)} it/s "
            f"({format_number(speed.low)}–{format_number(speed.high)}), {speed.basis}"
        )
    for line in _to_paste(config, speeds):
        click.echo(line)
    for line in notes:
        click.echo(f"note: {line}", err=True)


def _to_paste(config: RunConfig, speeds: Sequence[MeasuredSpeed]) -> Iterator[str]:
    """Yield the lines of the run file that state each stage's newest speed on instances."""
    newest = {speed.stage: speed for speed in speeds if speed.instances is not None}
    for stage, speed in newest.items():
        measurement = speed.measurement
        if not _ran_the_stage(config, speed):
            yield f"The job of stage {stage} ran another program than the run: `cost` converts it."
            continue
        kind = measurement.instance_type or config.cluster.instance_type
        yield f"To state it in the run file, at stage {stage}:"
        yield f"    steps_per_second: {measurement.steps_per_second:.4g}"
        yield (
            f"    measured_on: {{instance_type: {kind}, instances: {speed.instances}, "
            f"per_device_batch_size: {measurement.per_device_batch_size}, "
            f"gradient_accumulation_steps: {measurement.gradient_accumulation_steps}}}"
        )


def _ran_the_stage(config: RunConfig, speed: MeasuredSpeed) -> bool:
    """Return whether a job ran the program of its stage on the measured number of instances."""
    [stage] = [stage for stage in cost_stages(config) if stage.name == speed.stage]
    stage = replace(stage, instances=speed.instances or stage.instances)
    return with_model_figures(stage, config).program.agrees_with(speed.measurement.program)


def _result_row(config: RunConfig, speed: MeasuredSpeed) -> tuple[str, ...]:
    measurement = speed.measurement
    cluster = (
        f"this machine, {measurement.world_size} process{'es' * (measurement.world_size != 1)}"
    )
    if speed.instances is not None:
        cluster = f"{speed.instances} × {measurement.instance_type or config.cluster.instance_type}"
    memory = "–"
    if speed.gpu_memory_peak is not None:
        memory = f"{speed.gpu_memory_peak / _GIB:.1f} GiB"
        if speed.gpu_memory_planned is not None:
            memory += f" ({speed.gpu_memory_planned / _GIB:.1f})"
    return (
        cluster,
        f"{measurement.per_device_batch_size}×{measurement.gradient_accumulation_steps}",
        format_number(measurement.steps_per_second),
        format_number(speed.images_per_second / measurement.world_size),
        memory,
        "" if speed.data_wait_share is None else format_percent(speed.data_wait_share),
    )
