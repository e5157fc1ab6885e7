"""The verdict on a cluster: each part against what is expected, and what that does to the run.

The sentence a person reads is like "network at 12 % of expected → 5.9× slower → $41,200 instead of
$7,000". All of it is pure.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import Any, Literal

from sm_train.entrypoints.common.job_config import ExpectedPerformance, JobConfig
from sm_train.entrypoints.doctor.expectations import (
    MATMUL,
    NETWORK,
    NVLINK,
    Band,
    Reference,
    expected_fabric,
    measured_fabric,
    reference,
    workload,
)
from sm_train.entrypoints.doctor.findings import OUTLIER, REPLACE, ClusterFinding, findings
from sm_train.entrypoints.doctor.history import Earlier, compare
from sm_train.entrypoints.doctor.measurements import ClusterMeasurements
from sm_train.entrypoints.doctor.step_time_model import StepTime, predict_step


@dataclass(frozen=True)
class MeasuredFigure:
    """One measured figure of ``unit``; ``share`` is of what is expected, None if nothing is."""

    name: str
    measured: float
    unit: str
    expected: float | None
    share: float | None
    level: Literal["ok", "warn"]
    source: str


@dataclass(frozen=True)
class Prediction:
    """The run as it should go and as it will; dollars are of the stage's training alone."""

    expected_steps_per_second: float | None
    predicted_steps_per_second: float
    exposed_share: float
    slowdown: float | None
    expected_usd: float | None
    predicted_usd: float | None
    basis: str


@dataclass(frozen=True)
class DoctorVerdict:
    level: Literal["ok", "warn", "fail"]
    sentence: str
    parts: tuple[MeasuredFigure, ...]
    findings: tuple[ClusterFinding, ...]
    prediction: Prediction | None
    network: float | None
    """The bandwidth by which runs are compared, bytes a second."""

    def as_document(self, evidence: ClusterMeasurements) -> dict[str, Any]:
        return {
            "level": self.level,
            "sentence": self.sentence,
            "parts": [asdict(one) for one in self.parts],
            "findings": [
                asdict(one) | {"nodes": [evidence.name(node) for node in one.nodes]}
                for one in self.findings
            ],
            "prediction": self.prediction and asdict(self.prediction),
        }


def judge(
    settings: JobConfig, evidence: ClusterMeasurements, earlier: Sequence[Earlier] = ()
) -> DoctorVerdict:
    """Everything that the evidence says of the cluster and of this run on it."""
    expected = None
    # A local run has other instances than those that the figures are about.
    if settings.expected.instance_type == evidence.instance_type:
        expected = settings.expected
    given = reference(evidence, expected)
    parts = tuple(_parts(evidence, expected, given))
    prediction = _predict(settings, evidence, expected, given)
    network = evidence.world.best() if evidence.world else None
    found = [
        *findings(evidence, expected),
        *_slow_parts(parts),
        *_too_slow(settings, prediction, firm=given.firm),
        *_loading(settings, evidence, prediction),
        *compare(evidence, network, earlier),
    ]
    level = _level(found)
    return DoctorVerdict(
        level,
        _sentence(evidence, parts, found, prediction),
        parts,
        tuple(found),
        prediction,
        network,
    )


def _level(found: Sequence[ClusterFinding]) -> Literal["ok", "warn", "fail"]:
    levels = {one.level for one in found}
    return "fail" if "fail" in levels else "warn" if levels else "ok"


def _part(
    name: str, measured: float, unit: str, expected: float | None, band: Band, source: str
) -> MeasuredFigure:
    share = measured / expected if expected else None
    low = band.low / band.usual
    level: Literal["ok", "warn"] = "warn" if share is not None and share < low else "ok"
    return MeasuredFigure(name, measured, unit, expected, share, level, source)


def _parts(
    evidence: ClusterMeasurements, expected: ExpectedPerformance | None, given: Reference
) -> Iterator[MeasuredFigure]:
    many = len(evidence.nodes) > 1
    if evidence.world and (best := evidence.world.best()):
        if many:
            yield _part("network", best, "B/s", given.network, NETWORK, given.why)
        else:
            yield _part("within nodes", best, "B/s", given.inside, NVLINK, NVLINK.source)
    worst = min(evidence.intra.items(), key=lambda one: one[1].best() or 0.0, default=None)
    if worst and (best := worst[1].best()):
        source = f"slowest node: {evidence.name(worst[0])}; {NVLINK.source}"
        yield _part("within nodes", best, "B/s", given.inside, NVLINK, source)
    if evidence.inter:
        total = sum(one.best() or 0.0 for one in evidence.inter.values())
        yield _part("between nodes", total, "B/s", given.network, NETWORK, given.why)
    rates = [one.matmul_tflops for one in evidence.speeds.values() if one.matmul_tflops]
    if rates:
        peak = expected.bf16_tflops if expected else None
        whole = peak * MATMUL.usual if peak else None
        yield _part("matrix products", min(rates), "TFLOP/s", whole, MATMUL, MATMUL.source)
    for name, values in (
        ("host to device", [one.host_to_device for one in evidence.speeds.values()]),
        ("disk", [one.disk for one in evidence.speeds.values()]),
        ("train channel", [one.channel for one in evidence.speeds.values()]),
    ):
        known = [value for value in values if value]
        if known:
            yield MeasuredFigure(name, min(known), "B/s", None, None, "ok", "the slowest")
    latencies = [one.latency for one in evidence.pairs if one.latency]
    if latencies:
        yield MeasuredFigure(
            "latency", max(latencies), "s", None, None, "ok", "the slowest pair of nodes"
        )


def _slow_parts(parts: Sequence[MeasuredFigure]) -> Iterator[ClusterFinding]:
    for one in parts:
        if one.level == "warn" and one.share is not None:
            yield ClusterFinding(
                f"{one.name.replace(' ', '-')}-slow",
                "warn",
                f"{one.name} at {one.share:.0%} of expected ({one.source})",
                "see which node or transport is found fault with; if none is, "
                f"all are alike: {REPLACE}",
            )


def _predict(
    settings: JobConfig,
    evidence: ClusterMeasurements,
    expected: ExpectedPerformance | None,
    given: Reference,
) -> Prediction | None:
    ideal = expected_fabric(evidence, given)
    real = measured_fabric(evidence)
    found = workload(settings, evidence, expected, ideal)
    if found is None or (real is None and evidence.world_size > 1):
        return None
    work, basis = found
    slower = replace(work, compute_seconds=work.compute_seconds * _slowest_device(evidence))
    step = (
        predict_step(slower, real) if real else StepTime(*_alone(slower.compute_seconds, settings))
    )
    whole = predict_step(work, ideal) if ideal else None
    if step is None:
        return None
    slowdown = max(1.0, step.seconds / whole.seconds) if whole else None
    seconds = whole.seconds * slowdown if whole and slowdown else step.seconds
    return Prediction(
        expected_steps_per_second=1 / whole.seconds if whole else None,
        predicted_steps_per_second=1 / seconds,
        exposed_share=step.exposed_seconds / step.seconds,
        slowdown=slowdown,
        expected_usd=_usd(settings, evidence, expected, whole.seconds) if whole else None,
        predicted_usd=_usd(settings, evidence, expected, seconds),
        basis=basis,
    )


def _alone(compute: float, settings: JobConfig) -> tuple[float, float, float]:
    return compute * settings.stage.gradient_accumulation_steps, 0.0, 0.0


def _slowest_device(evidence: ClusterMeasurements) -> float:
    """How much longer the slowest device computes than the usual one, if it stands out."""
    rates = [one.matmul_tflops for one in evidence.speeds.values() if one.matmul_tflops]
    least = OUTLIER.get(evidence.backend, OUTLIER["nccl"])
    if len(rates) < 3 or min(rates) >= least * median(rates):
        return 1.0
    return median(rates) / min(rates)


def _usd(
    settings: JobConfig,
    evidence: ClusterMeasurements,
    expected: ExpectedPerformance | None,
    step_seconds: float,
) -> float | None:
    if expected is None or expected.usd_per_instance_hour is None:
        return None
    hours = settings.stage.max_steps * step_seconds / 3600
    return hours * len(evidence.hosts) * expected.usd_per_instance_hour


def _too_slow(
    settings: JobConfig, prediction: Prediction | None, *, firm: bool
) -> Iterator[ClusterFinding]:
    most = settings.doctor.max_slowdown
    if prediction and prediction.slowdown and prediction.slowdown > most:
        yield ClusterFinding(
            "too-slow",
            "fail" if firm else "warn",
            f"this run would be {_times(prediction.slowdown)} slower than expected, "
            f"doctor.max_slowdown allows {_times(most)}",
            "mend what is found above, or raise doctor.max_slowdown",
        )


def _loading(
    settings: JobConfig, evidence: ClusterMeasurements, prediction: Prediction | None
) -> Iterator[ClusterFinding]:
    """Whether each node's loader keeps up with the step, at the speed that is expected."""
    if prediction is None:
        return
    speed = prediction.expected_steps_per_second or prediction.predicted_steps_per_second
    stage = settings.stage
    for one in evidence.members:
        rate = evidence.speeds[one.rank].decoded_images if one.rank in evidence.speeds else None
        lanes = sum(other.node == one.node for other in evidence.members)
        need = speed * stage.per_device_batch_size * stage.gradient_accumulation_steps * lanes
        if rate and rate < need:
            yield ClusterFinding(
                "loader-slow",
                "warn",
                f"{evidence.name(one.node)} loads {rate:.0f} images/s and a step needs {need:.0f}: "
                f"{_times(need / rate)} slower",
                "raise training.decode_workers if cores are left, or pack smaller images or "
                "latents",
                (one.node,),
            )


def _sentence(
    evidence: ClusterMeasurements,
    parts: Sequence[MeasuredFigure],
    found: Sequence[ClusterFinding],
    prediction: Prediction | None,
) -> str:
    chain = []
    known = [one for one in parts if one.share is not None]
    low = [one for one in known if one.level == "warn"]
    if known:
        told = min(low, key=lambda one: one.share or 0.0) if low else known[0]
        chain.append(f"{told.name} at {told.share:.0%} of expected")
    elif evidence.world and (best := evidence.world.best()):
        chain.append(f"network at {best / 1e9:.3g} GB/s")
    if prediction and prediction.slowdown is not None:
        slower = prediction.slowdown
        chain.append(f"{_times(slower)} slower" if slower >= 1.05 else "no slower than expected")
        if prediction.predicted_usd is not None and prediction.expected_usd is not None:
            money = f"${prediction.predicted_usd:,.0f}"
            if slower >= 1.05:
                money += f" instead of ${prediction.expected_usd:,.0f}"
            chain.append(money)
    elif prediction:
        chain.append(f"about {prediction.predicted_steps_per_second:.3g} it/s")
    grave = [one.message for one in found if one.level == "fail" and one.code != "too-slow"]
    sentence = " → ".join(chain) or "nothing was measured"
    return "; ".join([sentence, *grave[:3]])


def _times(value: float) -> str:
    return f"{value:.1f}×" if value < 10 else f"{value:.0f}×"
