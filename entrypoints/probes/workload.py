"""This run's optimizer step: its compute and collectives, and its time on a network."""

from __future__ import annotations

from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from statistics import median

from sm_train.cost.network import CallTimes, CollectiveCalls, communication, step_collectives
from sm_train.cost.speed_model import RECOMPUTATION
from sm_train.entrypoints.job_interface.job_config import (
    ExpectedPerformance,
    JobConfig,
    choose_modulation,
)
from sm_train.entrypoints.planning.memory import (
    UnplannedModelError,
    plan_job,
    plan_model,
)
from sm_train.entrypoints.probes.measurements import ClusterMeasurements

MATMUL_SHARE = 1 / 3
"""Share of a large matrix product's rate that training reaches: 20 to 31 % MFU (BRIA's published
1.8 it/s, MLPerf Training v4.0) over 0.7. Used for runs whose it/s is unknown."""


@dataclass(frozen=True)
class Workload:
    """The work of one rank in a step: ``passes`` of ``compute_seconds`` each, and its ``calls``."""

    compute_seconds: float
    passes: int
    calls: tuple[CollectiveCalls, ...]


@dataclass(frozen=True)
class StepTime:
    """Seconds of one optimizer step: compute, communication, and its exposed part."""

    compute_seconds: float
    communication_seconds: float
    exposed_seconds: float

    @property
    def seconds(self) -> float:
        return self.compute_seconds + self.exposed_seconds


def predict_step(work: Workload, network: CallTimes) -> StepTime:
    """Return the step's times on ``network``."""
    time = communication(work.calls, network, work.compute_seconds)
    return StepTime(work.compute_seconds * work.passes, time.seconds, time.exposed)


def workload(
    config: JobConfig,
    cluster: ClusterMeasurements,
    expected: ExpectedPerformance | None,
    network: CallTimes | None,
) -> tuple[Workload, str] | None:
    """Return the run's step and the basis of its compute time; None for models without a plan.

    A known speed (``expected``) is that of a step on ``network``.
    """
    stage, training = config.stage, config.training
    pytorch, lora = _pytorch(), config.model.lora
    try:
        plan = plan_model(
            config.model,
            stage.resolution,
            precision=training.precision,
            plan=config.expected.model_plan,
            modulation=choose_modulation(training.modulation, stage.sharding, pytorch, lora),
        )
    except UnplannedModelError:
        return None
    calls = step_collectives(
        stage.sharding,
        plan.parameters - plan.exchanged_parameters,
        cluster.topology,
        trained=plan.trained_parameters - plan.exchanged_parameters,
        units=plan.communication_units(stage.sharding),
        bf16=training.bf16,
        reduce_bf16=training.reduce_dtype == "bf16",
        passes=stage.gradient_accumulation_steps,
        unsharded_gradients=plan_job(
            config,
            len(cluster.ranks),
            cluster.topology.per_node,
            _min_gpu_memory(cluster),
            pytorch,
        ).unsharded_gradients,
    )
    work = Workload(0.0, stage.gradient_accumulation_steps, calls)
    if expected is not None and expected.steps_per_second and network is not None:
        speed = expected.steps_per_second
        basis = f"{speed:.3g} it/s ({expected.speed_source})"
        return fit_compute(work, network, 1 / speed), basis
    rates = [speeds.matmul_tflops for speeds in cluster.speeds.values() if speeds.matmul_tflops]
    if not rates:
        return None
    flops = plan.training_flops_per_image * stage.per_device_batch_size
    flops = int(flops * RECOMPUTATION[stage.activation_checkpointing])
    compute_seconds = flops / (median(rates) * 1e12 * MATMUL_SHARE)
    basis = f"{flops / 1e12:.3g} TFLOP a pass at a third of what a matrix product reaches here"
    return replace(work, compute_seconds=compute_seconds), basis


def _pytorch() -> str | None:
    """Return the version of the PyTorch that is installed here."""
    try:
        return version("torch")
    except PackageNotFoundError:
        return None


def _min_gpu_memory(cluster: ClusterMeasurements) -> int | None:
    """Return the bytes of the smallest GPU; None if there are no GPUs."""
    mebibytes = [gpu["memory_mib"] for speeds in cluster.speeds.values() for gpu in speeds.gpus]
    return min((2**20 * size for size in mebibytes if size), default=None)


def fit_compute(work: Workload, network: CallTimes, step_seconds: float) -> Workload:
    """Return the workload whose step takes ``step_seconds``; at least 1 % of it is compute.

    Bisects: a step's time rises with its compute time.
    """
    high = step_seconds / work.passes
    low = 0.01 * high
    for _ in range(60):
        middle = (low + high) / 2
        if predict_step(replace(work, compute_seconds=middle), network).seconds < step_seconds:
            low = middle
        else:
            high = middle
    return replace(work, compute_seconds=high)
