"""Runs ``sm-train measure``: plan, question, measurements, record."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from sm_train.cost.instances import instance_type
from sm_train.estimators.config.schema import RunConfig
from sm_train.estimators.config.stage import StageSection
from sm_train.toolkit.aws.session import price_region, resolve_region
from sm_train.toolkit.base.errors import UserError
from sm_train.toolkit.base.extras import require_local_run
from sm_train.toolkit.memory.sharding_choice import with_sharding
from sm_train.toolkit.planning.estimate_inputs import usage_errors
from sm_train.toolkit.planning.measured_speeds import (
    MeasuredSpeed,
    add_to_bucket,
    add_to_file,
    applicable,
    as_document,
    read_measured_file,
)
from sm_train.toolkit.planning.run_price import stages_to_price
from sm_train.toolkit.probes.measuring import measurement_view
from sm_train.toolkit.probes.measuring.measurement_plan import (
    MeasurementPlan,
    PlannedMeasurement,
    Sweep,
    plan_measurements,
)
from sm_train.toolkit.run_file.run_file import load
from sm_train.toolkit.submit.submission import choose_stages
from sm_train.toolkit.terminal.confirmation import ask
from sm_train.toolkit.terminal.console import note, write_json
from sm_train.toolkit.terminal.formatting import parse_duration


@dataclass(frozen=True)
class MeasureOptions:
    """The options of ``measure``, by the names of the command's."""

    run: Path
    stage: str | None
    instances: str | None
    steps: int
    sweep: tuple[str, ...]
    synthetic: bool
    local: bool
    max_runtime: str | None
    dry_run: bool
    yes: bool
    as_json: bool
    region: str | None
    profile: str | None


class _Measurer(Protocol):
    def measure(self, planned: PlannedMeasurement) -> MeasuredSpeed: ...


def measure(options: MeasureOptions) -> None:
    """Measure a stage, record its speeds and print them.

    Raises:
        UserError: an option does not apply, the user did not confirm, a job failed, or AWS returns
            an error. What was measured before is recorded.
    """
    config = with_sharding(load(options.run))
    kind = instance_type(config.cluster.instance_type)
    if kind.is_own and not options.local:
        raise UserError(
            f"cluster.instance_type: {kind.name} {kind.obstacle}; measure on it with --local"
        )
    stage = choose_stages(config, options.stage or config.stages[0].name)[0]
    if options.local:
        _measure_here(options, config, stage)
    else:
        _measure_in_jobs(options, config, stage)


def _measure_here(options: MeasureOptions, config: RunConfig, stage: StageSection) -> None:
    from sm_train.toolkit.probes.measuring.local import LocalMeasurer

    if options.max_runtime is not None:
        raise UserError("--max-runtime: limits jobs on SageMaker; remove it or --local")
    require_local_run()
    base, region = options.run.parent, price_region(options.region or config.region)
    cores = os.cpu_count() or 1
    instances = _numbers("--instances", options.instances) or tuple(
        dict.fromkeys((1, min(2, cores, stage.instances)))
    )
    shards = config.data.local
    synthetic = options.synthetic or shards is None or not (base / shards).is_dir()
    if synthetic and not options.synthetic:
        missing = "not set" if shards is None else f"{base / shards}: no such folder"
        note(f"data.local: {missing}; measuring with synthetic images")
    plan = _plan(options, config, stage, region, instances, synthetic=synthetic)
    measurer = LocalMeasurer(config, stage, base)
    known = {
        measurement.stage.name: str(measurer.folder(measurement))
        if measurer.is_done(measurement)
        else None
        for measurement in plan.measurements
    }
    document = measurement_view.plan_document(plan, lambda planned: known[planned.stage.name])
    if _only_shown(options, document):
        return
    _run(options, config, plan, measurer, lambda speed: None)


def _measure_in_jobs(options: MeasureOptions, config: RunConfig, stage: StageSection) -> None:
    region = resolve_region(options.region, config.region, options.profile)
    instances = _numbers("--instances", options.instances)
    plan = _plan(options, config, stage, region, instances, synthetic=options.synthetic)
    if options.dry_run:
        _only_shown(options, measurement_view.plan_document(plan, lambda planned: None))
        return
    from sm_train.toolkit.probes.measuring.jobs import JobMeasurer
    from sm_train.toolkit.probes.short_jobs.short_job import ShortJobs

    base = options.run.parent
    measurer = JobMeasurer(config, stage, ShortJobs.open(config, base, region, options.profile))
    jobs = {measurement.stage.name: measurer.find(measurement) for measurement in plan.measurements}
    names = {name: None if job is None else job.name for name, job in jobs.items()}
    document = measurement_view.plan_document(plan, lambda planned: names[planned.stage.name])
    measurement_view.show_plan(document, local=False)
    if any(name is None for name in names.values()) and not options.yes:
        ask(measurement_view.question(document))

    def record(speed: MeasuredSpeed) -> None:
        try:
            note(f"Recorded in {add_to_bucket(measurer.jobs.session, config, region, [speed])}")
        except UserError as error:
            note(f"warning: `submit` does not know this speed: {error}")

    _run(options, config, plan, measurer, record)


def _plan(
    options: MeasureOptions,
    config: RunConfig,
    stage: StageSection,
    region: str,
    instances: tuple[int, ...],
    *,
    synthetic: bool,
) -> MeasurementPlan:
    limit = options.max_runtime
    with usage_errors():
        return plan_measurements(
            config,
            stage,
            options.run.parent,
            region,
            instances=instances,
            steps=options.steps,
            sweep=_sweep(options.sweep),
            synthetic=synthetic,
            max_runtime=None if limit is None else int(parse_duration("--max-runtime", limit)),
        )


def _only_shown(options: MeasureOptions, document: dict[str, Any]) -> bool:
    """Show the plan; return whether the command ends with it."""
    if options.dry_run and options.as_json:
        write_json(document)
    else:
        measurement_view.show_plan(document, local=options.local)
    return options.dry_run


def _run(
    options: MeasureOptions,
    config: RunConfig,
    plan: MeasurementPlan,
    measurer: _Measurer,
    record: Callable[[MeasuredSpeed], None],
) -> None:
    """Take the measurements one after the other; record each, and print all at the end."""
    base, speeds = options.run.parent, []
    for planned in plan.measurements:
        speed = measurer.measure(planned)
        path = add_to_file(config, base, [speed])
        record(speed)
        speeds.append(speed)
    used, unused = applicable(config, read_measured_file(config, base))
    priced = None
    if used:
        priced = next(
            stage for stage in stages_to_price(config, used) if stage.name == plan.stage.name
        )
    if options.as_json:
        fitted = priced and priced.speed
        write_json(
            {
                "stage": plan.stage.name,
                "speeds": [as_document(speed) for speed in speeds],
                "skipped": list(plan.skipped),
                "steps_per_second": fitted and fitted.steps_per_second,
                "steps_per_second_low": fitted and fitted.low,
                "steps_per_second_high": fitted and fitted.high,
                "basis": fitted and fitted.basis,
                "notes": unused,
                "recorded": str(path),
            }
        )
    else:
        measurement_view.show_result(config, speeds, priced, unused)
    note(f"Recorded in {path}; commit it")
    note(f"Next: sm-train cost {options.run}")


def _numbers(option: str, text: str | None) -> tuple[int, ...]:
    """Parse ``1,2,4``.

    Raises:
        UserError: a part is no positive number.
    """
    if text is None:
        return ()
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise UserError(f"{option}: {text!r} must be positive numbers such as 1,2")
    return tuple(map(int, parts))


def _sweep(values: tuple[str, ...]) -> Sweep:
    """Parse ``batch=8,16`` and ``accumulation=1,2``.

    Raises:
        UserError: it is neither.
    """
    found: dict[str, tuple[int, ...]] = {}
    for value in values:
        key, equals, numbers = value.partition("=")
        if key not in ("batch", "accumulation") or not equals:
            raise UserError(
                f"--sweep: {value!r} must be batch=N,N or accumulation=N,N, such as batch=8,16"
            )
        found[key] = _numbers(f"--sweep {key}", numbers)
    return Sweep(found.get("batch", ()), found.get("accumulation", ()))
