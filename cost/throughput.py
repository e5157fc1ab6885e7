"""The speed of a stage from the available measurements, by the most reliable rule that applies.

An it/s belongs to one configuration: resolution, batch and cluster. To any other one it is carried
by the ratio of the speed model's predictions for both, and the range widens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from sm_train.cost.instances import InstanceType, instance_type
from sm_train.cost.network import GpuNetwork
from sm_train.cost.scaling import Throughput, fit_scaling, scale_one, scale_steps
from sm_train.cost.speed import STEADY, Basis, Speed
from sm_train.cost.speed_model import calibration_words, exposed_communication, step_seconds
from sm_train.cost.speed_model import spread as model_spread
from sm_train.cost.stage import UNKNOWN_PROGRAM, CostStage, StageProgram

CARRY_SPREAD = 1.25
"""P90 ÷ median of a measurement carried by the ratio of two predictions to a cluster of as many
GPUs: 90 % of the pairs of published points of one source and model lie within 1.21
(``benchmarks/data/speeds.csv``, tests/cost/test_throughput.py)."""

RESIZED_SPREAD = 1.6
"""The same for a cluster of another size, whose GPUs get another batch: 90 % lie within 1.55."""

PEAK_CARRY = (0.45, 0.65, 1.0)
"""Share of the peaks' ratio that another GPU generation reaches if the model's figures are unknown:
low, median, high. AWS's pairs reach 0.42 to 0.60 (awsome-distributed-training, p4de to p5)."""


_POSITIVE = (
    *("steps_per_second", "world_size", "resolution", "effective_batch_size", "low", "high"),
    *("per_device_batch_size", "gradient_accumulation_steps", "predicted_images_per_second"),
)


@dataclass(frozen=True)
class Measurement:
    """A measured speed and the configuration it belongs to; None is unknown.

    ``label`` names what was measured. ``low`` and ``high`` are P10 and P90 of its logging
    intervals. A measurement at the stage's batch per GPU and accumulation applies at any number of
    GPUs, whatever its effective batch size. ``predicted_images_per_second`` is what the speed model
    predicts for this configuration, and ``program`` what ran.
    """

    label: str
    steps_per_second: float
    world_size: int
    resolution: int | None = None
    effective_batch_size: int | None = None
    instance_type: str | None = None
    predicted_images_per_second: float | None = None
    low: float | None = None
    high: float | None = None
    on_cpu: bool = False
    per_device_batch_size: int | None = None
    gradient_accumulation_steps: int | None = None
    program: StageProgram = UNKNOWN_PROGRAM

    def __post_init__(self) -> None:
        """Check the figures.

        Raises:
            ValueError: one is not positive, or the instance type is unknown; the message names it.
        """
        for name in _POSITIVE:
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"{name}: {value} is not positive")
        low, high = self.low or self.steps_per_second, self.high or self.steps_per_second
        if not low <= self.steps_per_second <= high:
            raise ValueError(
                f"steps_per_second: {self.steps_per_second} is not between low and high, {low} and "
                f"{high}"
            )
        if self.instance_type is not None:
            instance_type(self.instance_type)


@dataclass(frozen=True)
class StageMeasurement:
    """A measured speed and the name of its stage."""

    stage: str
    measurement: Measurement


def resolve_speed(
    stage: CostStage, measurements: Sequence[Measurement], *, rescale_batch: bool = False
) -> Speed | None:
    """Return the speed of ``stage`` by the most reliable rule that applies; None if none does.

    A measurement of the stage's cluster and resolution at another effective batch size is the
    stage's own if each GPU did the same work, else only with ``rescale_batch``, which converts it
    by images per second.
    """
    usable = [
        measurement
        for measurement in measurements
        if rescale_batch or is_comparable(measurement, stage)
    ]
    gpu_measurements = [measurement for measurement in usable if not measurement.on_cpu]
    same_hardware = [
        measurement for measurement in gpu_measurements if _same_hardware(measurement, stage)
    ]
    return (
        _at_this_resolution(stage, same_hardware)
        or _carried(stage, [measurement for measurement in measurements if not measurement.on_cpu])
        or _by_peak(stage, gpu_measurements)
        or _illustration(stage, [measurement for measurement in usable if measurement.on_cpu])
        or predicted_speed(stage)
    )


def predicted_speed(stage: CostStage) -> Speed | None:
    """Predict it/s from the model's figures and the GPU's (:mod:`speed_model`)."""
    images, batch = stage.predicted_images_per_second, stage.effective_batch_size
    if images is None or batch is None or stage.work is None or stage.gpu is None:
        return None
    seconds = step_seconds(stage.work, stage.gpu, stage.network)
    share = stage.work.flops * images / (stage.world_size * stage.gpu.peak_flops)
    bound = "memory" if seconds.memory > seconds.arithmetic else "arithmetic"
    why = (
        f"not measured: {stage.work.flops / 1e12:.3g} TFLOP per image on "
        f"{stage.instance.accelerator}, bound by {bound}, {share:.0%} MFU; "
        f"{seconds.exposed_communication / seconds.total:.0%} of a step waits for communication "
        f"({calibration_words(stage.gpu.name, stage.precision)})"
    )
    spread = model_spread(stage.gpu.name, stage.precision)
    speed = images / batch
    high = min(speed * spread, _peak_steps_per_second(stage))
    return Speed(min(speed, high), speed / spread, high, "predicted", why)


def _peak_steps_per_second(stage: CostStage) -> float:
    """Return the it/s at the peak of the GPUs, or infinity if it is unknown."""
    peak, flops = stage.peak_tflops, stage.flops_per_image
    if peak is None or flops is None or stage.effective_batch_size is None:
        return math.inf
    # Rounding must not lift a clipped speed above the peak.
    return 0.999999 * peak * 1e12 * stage.world_size / (flops * stage.effective_batch_size)


def same_batch(measurement: Measurement, stage: CostStage) -> bool:
    """Return whether ``one`` has the stage's effective batch size, as far as both are known."""
    known = measurement.effective_batch_size is not None and stage.effective_batch_size is not None
    return not known or measurement.effective_batch_size == stage.effective_batch_size


def same_work(measurement: Measurement, stage: CostStage) -> bool:
    """Return whether each GPU did the stage's work: its batch per GPU and its accumulation."""
    return (measurement.per_device_batch_size, measurement.gradient_accumulation_steps) == (
        stage.per_device_batch_size,
        stage.gradient_accumulation_steps,
    )


def is_comparable(measurement: Measurement, stage: CostStage) -> bool:
    """Return whether ``one`` applies to the stage without a conversion of its batch."""
    return same_batch(measurement, stage) or same_work(measurement, stage)


def _same_hardware(measurement: Measurement, stage: CostStage) -> bool:
    if measurement.instance_type is None:
        return True
    return instance_type(measurement.instance_type).accelerator == stage.instance.accelerator


def _images_per_second(measurement: Measurement, stage: CostStage) -> float:
    """Return images/s of a measurement, or its it/s if no batch is known: only ratios are used."""
    return measurement.steps_per_second * (_batch(measurement, stage) or 1)


def _batch(measurement: Measurement, stage: CostStage) -> int | None:
    if stage.effective_batch_size is None:
        return None
    return measurement.effective_batch_size or stage.effective_batch_size


def _at_this_resolution(stage: CostStage, measured: Sequence[Measurement]) -> Speed | None:
    measured = [
        measurement
        for measurement in measured
        if measurement.resolution in (None, stage.resolution)
        and measurement.program.agrees_with(stage.program)
    ]
    if not measured:
        return None
    exact = [measurement for measurement in measured if measurement.world_size == stage.world_size]
    if exact:
        return _own(stage, exact[-1])
    scaled = _scaled_by_steps(stage, measured)
    sizes = {measurement.world_size for measurement in measured}
    if scaled is None and (len(sizes) > 1 or stage.predicted_images_per_second is None):
        scaled = _scaled(stage, measured)
    return None if scaled is None else _speed(stage, *scaled)


def _own(stage: CostStage, measurement: Measurement) -> Speed:
    batch = stage.effective_batch_size
    speed = _images_per_second(measurement, stage) / (batch or 1)
    low, high = (share * speed for share in _deciles(measurement))
    where = "this resolution, batch and cluster"
    if not same_batch(measurement, stage):
        where = (
            f"batch {measurement.effective_batch_size}, converted to batch {batch} by images/s "
            "(--rescale-batch)"
        )
    why = f"{measurement.label}: {measurement.steps_per_second:.3g} it/s at {where}"
    return Speed(speed, low, high, "measured", why)


def _scaled(stage: CostStage, measured: Sequence[Measurement]) -> tuple[Throughput, Basis, str]:
    """Return the throughput of the stage's cluster from measurements at other cluster sizes."""
    points = [
        (measurement.world_size, _images_per_second(measurement, stage)) for measurement in measured
    ]
    labels = ", ".join(dict.fromkeys(measurement.label for measurement in measured))
    if len({gpus for gpus, _ in points}) == 1:
        measurement = measured[-1]
        throughput = scale_one(*points[-1], stage.world_size)
        why = (
            f"{labels}: {measurement.steps_per_second:.3g} it/s on {measurement.world_size} GPUs, "
            f"extrapolated to {stage.world_size} "
            f"{_scaling_words(measurement.world_size, stage.world_size)}"
        )
        return throughput, "scaled", why
    fit = fit_scaling(points)
    sizes = "/".join(str(gpus) for gpus in sorted({gpus for gpus, _ in points}))
    residual = "no residual" if fit.residual is None else f"residual {fit.residual:.1%}"
    why = f"{labels}: fit over {sizes} GPUs ({residual}), evaluated at {stage.world_size}"
    return fit.predict(stage.world_size), "scaling fit", why


def _scaled_by_steps(
    stage: CostStage, measured: Sequence[Measurement]
) -> tuple[Throughput, Basis, str] | None:
    """Scale measurements of the same work per GPU by the communication of each cluster size.

    None if there is none, or the model's figures are unknown.
    """
    work = stage.work
    newest = {
        measurement.world_size: measurement
        for measurement in measured
        if same_work(measurement, stage)
    }
    points = [
        (cluster_network(stage.instance, measurement.world_size), 1 / measurement.steps_per_second)
        for measurement in newest.values()
    ]
    if work is None or not points:
        return None

    def exposed(network: GpuNetwork, compute: float) -> float:
        return exposed_communication(work, network, compute / work.passes)

    images = work.images * work.passes * stage.world_size
    smallest = min(newest)
    labels = ", ".join(measurement.label for measurement in newest.values())
    step = scale_steps(points, stage.network, exposed)
    if stage.world_size < smallest:
        # They wait less for each other: a step takes no longer than measured.
        longest = 1 / newest[smallest].steps_per_second
        step = replace(
            step,
            seconds=min(step.seconds, longest),
            low=min(step.low, longest),
            high=min(step.high, longest / STEADY[0]),
        )
    sizes = " and ".join(str(gpus) for gpus in sorted(newest))
    why = (
        f"{labels}: {', '.join(f'{1 / seconds:.3g} it/s' for _, seconds in points)} on {sizes} "
        f"GPUs; on {stage.world_size}, communication at {step.network_speed:.2g} × the network's "
        "nominal speed"
    )
    basis: Basis = "scaling fit" if len(points) > 1 else "scaled"
    return Throughput(images / step.seconds, images / step.high, images / step.low), basis, why


def cluster_network(instance: InstanceType, gpus: int) -> GpuNetwork:
    """Return the network of a cluster of ``gpus``, which may use a part of its instances."""
    per_node = instance.accelerators
    if gpus % per_node == 0:
        return instance.network(gpus // per_node)
    nodes = -(-gpus // per_node)
    return replace(instance.network(nodes), nodes=nodes, per_node=gpus // nodes)


def _scaling_words(gpus: int, to_gpus: int) -> str:
    if to_gpus > gpus:
        return "at 87–100 % efficiency per doubling (published)"
    return "which each lose 0–13 % less per halving (published)"


def _carried(stage: CostStage, measured: Sequence[Measurement]) -> Speed | None:
    """Carry the nearest measurement by the ratio of the speed model's predictions.

    None if the model's figures are unknown.
    """
    usable = [measurement for measurement in measured if measurement.predicted_images_per_second]
    predicted, batch = stage.predicted_images_per_second, stage.effective_batch_size
    if not usable or predicted is None or batch is None:
        return None
    measurement = min(reversed(usable), key=lambda measurement: _distance(measurement, stage))
    images = measurement.steps_per_second * (measurement.effective_batch_size or batch)
    found = images / (measurement.predicted_images_per_second or 1.0)
    speed = predicted * found / batch
    spread = CARRY_SPREAD if measurement.world_size == stage.world_size else RESIZED_SPREAD
    low, high = _deciles(measurement)
    why = (
        f"{measurement.label}: {measurement.steps_per_second:.3g} it/s"
        f"{_differences(measurement, stage)}, {found:.2f} × the speed "
        f"model's prediction there; the same share of its prediction here, "
        f"{predicted / batch:.3g} it/s"
    )
    basis: Basis = "scaled"
    if not _same_hardware(measurement, stage):
        basis = "other hardware"
    elif measurement.resolution != stage.resolution:
        basis = "other resolution"
    return _within_peak(
        stage, Speed(speed, speed * low / spread, speed * high * spread, basis, why)
    )


def _differences(measurement: Measurement, stage: CostStage) -> str:
    """Return the settings of the measured program that the stage's does not have."""
    other = measurement.program.differences(stage.program)
    return f" with {', '.join(f'{name}: {ran}' for name, ran in other.items())}" if other else ""


def _distance(measurement: Measurement, stage: CostStage) -> tuple[bool, float, float]:
    """Return how much a measurement's configuration differs from the stage's, to compare."""
    resolution = measurement.resolution or stage.resolution or 1
    return (
        not _same_hardware(measurement, stage),
        abs(math.log(resolution / (stage.resolution or resolution))),
        abs(math.log(measurement.world_size / stage.world_size)),
    )


def _deciles(measurement: Measurement) -> tuple[float, float]:
    """Return P10 and P90 of a measurement, relative to it."""
    low = min(
        STEADY[0], (measurement.low or measurement.steps_per_second) / measurement.steps_per_second
    )
    high = max(
        STEADY[1], (measurement.high or measurement.steps_per_second) / measurement.steps_per_second
    )
    return low, high


def _by_peak(stage: CostStage, measured: Sequence[Measurement]) -> Speed | None:
    """Carry a measurement on other GPUs by the ratio of their peaks: the model is unknown."""
    for measurement in reversed(measured):
        if measurement.instance_type is None:
            continue
        source = instance_type(measurement.instance_type)
        peak, measured_peak = stage.instance.bf16_tflops, source.bf16_tflops
        # The same number of GPUs, as if the measured type came one GPU at a time.
        measured_speed = _at_this_resolution(stage, [measurement])
        if measured_speed is None or peak is None or measured_peak is None:
            continue
        low, middle, high = (peak / measured_peak * share for share in PEAK_CARRY)
        why = (
            f"{measured_speed.why}; and from {source.accelerator} to "
            f"{stage.instance.accelerator} × {middle:.3g} (by peak FLOP/s)"
        )
        speed = Speed(
            measured_speed.steps_per_second * middle,
            measured_speed.low * low,
            measured_speed.high * high,
            "other hardware",
            why,
        )
        return _within_peak(stage, speed)
    return None


def _within_peak(stage: CostStage, speed: Speed) -> Speed:
    """Clip ``speed`` at the hardware's peak: an extrapolation cannot exceed it."""
    peak = _peak_steps_per_second(stage)
    if speed.high <= peak:
        return speed
    return replace(
        speed,
        steps_per_second=min(speed.steps_per_second, peak),
        low=min(speed.low, peak),
        high=peak,
    )


def _illustration(stage: CostStage, measured: Sequence[Measurement]) -> Speed | None:
    if not measured:
        return None
    newest = measured[-1]
    speed = _own(stage, newest)
    cluster = f"{stage.instances} × {stage.instance_type}, {stage.world_size} GPUs"
    if stage.effective_batch_size is not None:
        cluster += f", {stage.resolution} px, batch {stage.effective_batch_size}"
    why = (
        f"{newest.label}: {newest.steps_per_second:.3g} it/s was measured on a CPU, not on "
        f"{stage.name} ({cluster}): illustration only"
    )
    return replace(speed, basis="illustration", why=why)


def _speed(stage: CostStage, throughput: Throughput, basis: Basis, why: str) -> Speed:
    batch = stage.effective_batch_size or 1
    return _within_peak(
        stage,
        Speed(
            throughput.images_per_second / batch,
            throughput.low / batch,
            throughput.high / batch,
            basis,
            why,
        ),
    )
