"""Reads a measurement from the events of its job."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from statistics import fmean

from sm_train.cost.accelerators import accelerator
from sm_train.cost.instances import instance_type
from sm_train.cost.timeline import mean_speed
from sm_train.estimators.config.schema import RunConfig
from sm_train.estimators.config.stage import StageSection
from sm_train.toolkit.planning.measured_speeds import (
    DoctorSummary,
    MeasuredSpeed,
    measure_speed,
    work_digest,
)
from sm_train.toolkit.probes.measuring.measurement_plan import PlannedMeasurement
from sm_train.toolkit.records.job_logs import Event


def read_result(
    config: RunConfig,
    stage: StageSection,
    planned: PlannedMeasurement,
    events: Iterable[Event],
    *,
    source: str,
    date: str,
    cost_usd: float | None,
) -> MeasuredSpeed:
    """Return the speed that ``events`` show since the last start, without the warm-up.

    ``config`` and ``stage`` are those of the run file. ``source`` is the job's name, or "this
    machine".

    Raises:
        UserError: there is no step event.
    """
    events = _since_last_start(events)
    measured, speed = measure_speed(events, source).measurement, mean_speed(events)
    start = next(event for event in events if event["kind"] == "start")
    steps = [event for event in events if event["kind"] == "step"]
    steady = steps[1:] or steps
    name = measured.instance_type or _same_machine(config, start)
    where = "a CPU of this machine"
    instances = None
    if name is not None:
        instances = start["world_size"] // instance_type(name).accelerators or 1
        where = f"{instances} × {name}"
    elif not measured.on_cpu:
        where = f"{start['world_size']} × {start.get('accelerator')}"
    measured = replace(
        measured, label=f"measured on {where} ({source}, {date})", instance_type=name
    )
    mfus = [event["mfu"] for event in steady if event["mfu"]]
    return MeasuredSpeed(
        stage=stage.name,
        work=work_digest(planned.config, planned.stage),
        measurement=measured,
        source=source,
        date=date,
        instances=instances,
        steps=steady[-1]["step"] - (steps[0]["step"] if len(steps) > 1 else 0),
        images_per_second=measured.steps_per_second * start["effective_batch_size"],
        data_wait_share=None if speed is None else speed.data_wait_share,
        mfu=fmean(mfus) if mfus else None,
        gpu_memory_peak=_memory_peak(events),
        gpu_memory_planned=planned.gpu_memory_planned,
        input_kind=_input_kind(planned, start),
        doctor=_doctor(events),
        cost_usd=cost_usd,
    )


def _since_last_start(events: Iterable[Event]) -> list[Event]:
    """Return the events of the last start, with the doctor's that came before it."""
    found: list[Event] = []
    for event in events:
        if event["kind"] == "start":
            found = [event for event in found if event["kind"] == "doctor"]
        found.append(event)
    return found


def _memory_peak(events: Iterable[Event]) -> int | None:
    """Return the peak that PyTorch counted; without an end, the most that the driver showed."""
    used = []
    for event in events:
        if event["kind"] == "end" and event.get("gpu_memory_peak"):
            return int(event["gpu_memory_peak"])
        if event["kind"] == "node" and event["gpu_memory_used_max"]:
            used.append(int(event["gpu_memory_used_max"]))
    return max(used, default=None)


def _input_kind(planned: PlannedMeasurement, start: Event) -> str:
    kind: str = start.get("input_kind") or "shards"
    return f"synthetic {kind}" if planned.config.data.synthetic_samples else kind


def _doctor(events: Iterable[Event]) -> DoctorSummary | None:
    found = [event for event in events if event["kind"] == "doctor"]
    if not found:
        return None
    last = found[-1]
    return {
        "level": last["level"],
        "network_bytes_per_second": last["network_bytes_per_second"],
        "slowdown": last["slowdown"],
        "sentence": last["sentence"],
    }


def _same_machine(config: RunConfig, start: Event) -> str | None:
    """Return the run's instance type if a machine without a name has the same GPUs, else None."""
    name, gpu = config.cluster.instance_type, start.get("accelerator")
    instance = instance_type(name)
    generation = accelerator(instance.accelerator).name.split("-")[0]
    same = gpu is not None and generation in str(gpu).replace("-", " ").split()
    return name if same and start["world_size"] == instance.accelerators else None
