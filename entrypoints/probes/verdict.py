"""The verdict on a cluster: each figure against what is expected, and what that does to the run.

Its sentence reads like "network at 12 % of expected → 5.9× slower → $41,200 instead of $7,000".
Everything here is pure.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import Any, Literal

from sm_train.cost.instances import InstanceType, instance_type
from sm_train.entrypoints.job_interface.job_config import ExpectedPerformance, JobConfig
from sm_train.entrypoints.probes.doctor_history import EarlierResult, compare
from sm_train.entrypoints.probes.expectations import (
    MATMUL,
    NETWORK,
    NVLINK,
    Band,
    Reference,
    reference_bandwidths,
)
from sm_train.entrypoints.probes.findings import REPLACE, ClusterFinding, findings, outlier_share
from sm_train.entrypoints.probes.measured_network import measured_network
from sm_train.entrypoints.probes.measurements import ClusterMeasurements
from sm_train.entrypoints.probes.workload import StepTime, predict_step, workload


@dataclass(frozen=True)
class MeasuredFigure:
    """One measured figure in ``unit``; ``share`` is measured ÷ expected, None if unexpected."""

    name: str
    measured: float
    unit: str
    expected: float | None
    share: float | None
    level: Literal["ok", "warn"]
    source: str


@dataclass(frozen=True)
class Prediction:
    """The run as expected and as predicted; dollars are for the stage's training alone."""

    expected_steps_per_second: float | None
    predicted_steps_per_second: float
    exposed_share: float
    slowdown: float | None
    expected_usd: float | None
    predicted_usd: float | None
    basis: str


@dataclass(frozen=True)
class DoctorVerdict:
    """The verdict; ``network`` is the bandwidth by which runs are compared, in bytes per second."""

    level: Literal["ok", "warn", "fail"]
    sentence: str
    figures: tuple[MeasuredFigure, ...]
    findings: tuple[ClusterFinding, ...]
    prediction: Prediction | None
    network: float | None

    def as_document(self, cluster: ClusterMeasurements) -> dict[str, Any]:
        """Return a JSON document that names nodes as ``cluster`` does."""
        return {
            "level": self.level,
            "sentence": self.sentence,
            "parts": [asdict(figure) for figure in self.figures],
            "findings": [
                asdict(finding) | {"nodes": [cluster.name(node) for node in finding.nodes]}
                for finding in self.findings
            ],
            "prediction": self.prediction and asdict(self.prediction),
        }


def judge(
    config: JobConfig, cluster: ClusterMeasurements, earlier: Sequence[EarlierResult] = ()
) -> DoctorVerdict:
    """Judge the cluster, and this run on it, from its measurements and ``earlier`` results."""
    expected = instance = None
    # The figures of a local run are of another instance type.
    if config.expected.instance_type == cluster.instance_type:
        expected, instance = config.expected, instance_type(config.expected.instance_type)
    reference = reference_bandwidths(cluster, instance)
    figures = tuple(_figures(cluster, instance, reference))
    prediction = _predict(config, cluster, expected, reference)
    network = cluster.world.best_busbw() if cluster.world else None
    found = [
        *(_with_slowdown(finding, prediction) for finding in findings(cluster, instance)),
        *_low_figures(figures),
        *_too_slow(config, prediction, binding=reference.binding),
        *_slow_loaders(config, cluster, prediction),
        *compare(cluster, network, earlier),
    ]
    return DoctorVerdict(
        _level(found),
        _sentence(cluster, figures, found, prediction),
        figures,
        tuple(found),
        prediction,
        network,
    )


def _with_slowdown(finding: ClusterFinding, prediction: Prediction | None) -> ClusterFinding:
    """Add the run's predicted slowdown to a finding about the transport between nodes."""
    slowdown = prediction.slowdown if prediction else None
    if not finding.is_transport or slowdown is None:
        return finding
    effect = f"; this run is predicted to be {_times(slowdown)} slower than expected"
    return replace(finding, message=finding.message + effect)


def _level(found: Sequence[ClusterFinding]) -> Literal["ok", "warn", "fail"]:
    levels = {finding.level for finding in found}
    return "fail" if "fail" in levels else "warn" if levels else "ok"


def _figure(
    name: str, measured: float, unit: str, expected: float | None, band: Band, source: str
) -> MeasuredFigure:
    """Compare ``measured`` with ``expected``, which is ``band.usual`` of the nominal figure."""
    share = measured / expected if expected else None
    level: Literal["ok", "warn"] = (
        "warn" if share is not None and share < band.low / band.usual else "ok"
    )
    return MeasuredFigure(name, measured, unit, expected, share, level, source)


def _figures(
    cluster: ClusterMeasurements, instance: InstanceType | None, reference: Reference
) -> Iterator[MeasuredFigure]:
    yield from _network_figures(cluster, reference)
    rates = [speed.matmul_tflops for speed in cluster.speeds.values() if speed.matmul_tflops]
    if rates:
        nominal = instance.bf16_tflops if instance else None
        usual = nominal * MATMUL.usual if nominal else None
        yield _figure("matrix products", min(rates), "TFLOP/s", usual, MATMUL, MATMUL.source)
    for name, values in (
        ("host to device", [speed.host_to_device for speed in cluster.speeds.values()]),
        ("disk", [speed.disk for speed in cluster.speeds.values()]),
        ("train channel", [speed.channel for speed in cluster.speeds.values()]),
    ):
        known = [value for value in values if value]
        if known:
            yield MeasuredFigure(name, min(known), "B/s", None, None, "ok", "the slowest")
    latencies = [pair.latency for pair in cluster.pairs if pair.latency]
    if latencies:
        source = "the slowest pair of nodes"
        yield MeasuredFigure("latency", max(latencies), "s", None, None, "ok", source)


def _network_figures(
    cluster: ClusterMeasurements, reference: Reference
) -> Iterator[MeasuredFigure]:
    intra_node, inter_node = reference.intra_node, reference.inter_node
    if cluster.world and (busbw := cluster.world.best_busbw()):
        if len(cluster.nodes) > 1:
            yield _figure("network", busbw, "B/s", inter_node, NETWORK, reference.source)
        else:
            yield _figure("within nodes", busbw, "B/s", intra_node, NVLINK, NVLINK.source)
    slowest = min(
        cluster.intra_node.items(),
        key=lambda sweeps_of_node: sweeps_of_node[1].best_busbw() or 0.0,
        default=None,
    )
    if slowest and (busbw := slowest[1].best_busbw()):
        source = f"slowest node: {cluster.name(slowest[0])}; {NVLINK.source}"
        yield _figure("within nodes", busbw, "B/s", intra_node, NVLINK, source)
    if cluster.inter_node:
        # All local ranks share the node's network.
        total = sum(sweeps.best_busbw() or 0.0 for sweeps in cluster.inter_node.values())
        yield _figure("between nodes", total, "B/s", inter_node, NETWORK, reference.source)


def _low_figures(figures: Sequence[MeasuredFigure]) -> Iterator[ClusterFinding]:
    for figure in figures:
        if figure.level == "warn" and figure.share is not None:
            yield ClusterFinding(
                f"{figure.name.replace(' ', '-')}-slow",
                "warn",
                f"{figure.name} at {figure.share:.0%} of expected ({figure.source})",
                "see which node or transport has a finding; if none has, "
                f"all nodes are alike: {REPLACE}",
            )


def _predict(
    config: JobConfig,
    cluster: ClusterMeasurements,
    expected: ExpectedPerformance | None,
    reference: Reference,
) -> Prediction | None:
    estimate = workload(config, cluster, expected, reference.network)
    if estimate is None:
        return None
    work, basis = estimate
    slowed = replace(work, compute_seconds=work.compute_seconds * _slowest_device_factor(cluster))
    measured = measured_network(cluster)
    if measured is not None and measured.knows(work.calls):
        step = predict_step(slowed, measured)
    elif cluster.world_size == 1:
        step = StepTime(slowed.compute_seconds * slowed.passes, 0.0, 0.0)
    else:
        return None
    ideal_step = predict_step(work, reference.network) if reference.network else None
    slowdown = max(1.0, step.seconds / ideal_step.seconds) if ideal_step else None
    seconds = ideal_step.seconds * slowdown if ideal_step and slowdown else step.seconds
    return Prediction(
        expected_steps_per_second=1 / ideal_step.seconds if ideal_step else None,
        predicted_steps_per_second=1 / seconds,
        exposed_share=step.exposed_seconds / step.seconds,
        slowdown=slowdown,
        expected_usd=_usd(config, cluster, expected, ideal_step.seconds) if ideal_step else None,
        predicted_usd=_usd(config, cluster, expected, seconds),
        basis=basis,
    )


def _slowest_device_factor(cluster: ClusterMeasurements) -> float:
    """Return how much longer the slowest device computes than the median one; 1 if no outlier."""
    rates = [speed.matmul_tflops for speed in cluster.speeds.values() if speed.matmul_tflops]
    if len(rates) < 3 or min(rates) >= outlier_share(cluster) * median(rates):
        return 1.0
    return median(rates) / min(rates)


def _usd(
    config: JobConfig,
    cluster: ClusterMeasurements,
    expected: ExpectedPerformance | None,
    step_seconds: float,
) -> float | None:
    if expected is None or expected.usd_per_instance_hour is None:
        return None
    hours = config.stage.max_steps * step_seconds / 3600
    return hours * len(cluster.node_names) * expected.usd_per_instance_hour


def _too_slow(
    config: JobConfig, prediction: Prediction | None, *, binding: bool
) -> Iterator[ClusterFinding]:
    limit = config.doctor.max_slowdown
    if prediction and prediction.slowdown and prediction.slowdown > limit:
        yield ClusterFinding(
            "too-slow",
            "fail" if binding else "warn",
            f"this run would be {_times(prediction.slowdown)} slower than expected, "
            f"doctor.max_slowdown allows {_times(limit)}",
            "fix the findings above, or raise doctor.max_slowdown",
        )


def _slow_loaders(
    config: JobConfig, cluster: ClusterMeasurements, prediction: Prediction | None
) -> Iterator[ClusterFinding]:
    """Find nodes whose loader cannot keep up with the step at its expected speed."""
    if prediction is None:
        return
    speed = prediction.expected_steps_per_second or prediction.predicted_steps_per_second
    stage = config.stage
    for rank in cluster.ranks:
        rate = cluster.speeds[rank.rank].decoded_images if rank.rank in cluster.speeds else None
        processes = sum(other.node == rank.node for other in cluster.ranks)
        per_step = stage.per_device_batch_size * stage.gradient_accumulation_steps * processes
        required = speed * per_step
        if rate and rate < required:
            yield ClusterFinding(
                "loader-slow",
                "warn",
                f"{cluster.name(rank.node)} loads {rate:.0f} images/s and training needs "
                f"{required:.0f}: {_times(required / rate)} slower",
                "raise training.decode_workers if cores are idle, or pack smaller images or "
                "latents",
                (rank.node,),
            )


def _sentence(
    cluster: ClusterMeasurements,
    figures: Sequence[MeasuredFigure],
    found: Sequence[ClusterFinding],
    prediction: Prediction | None,
) -> str:
    clauses = []
    compared = [figure for figure in figures if figure.share is not None]
    low = [finding for finding in compared if finding.level == "warn"]
    if compared:
        shown = min(low, key=lambda finding: finding.share or 0.0) if low else compared[0]
        clauses.append(f"{shown.name} at {shown.share:.0%} of expected")
    elif cluster.world and (busbw := cluster.world.best_busbw()):
        clauses.append(f"network at {busbw / 1e9:.3g} GB/s")
    if prediction and prediction.slowdown is not None:
        slowdown = prediction.slowdown
        is_slower = slowdown >= 1.05
        clauses.append(f"{_times(slowdown)} slower" if is_slower else "no slower than expected")
        if prediction.predicted_usd is not None and prediction.expected_usd is not None:
            cost = f"${prediction.predicted_usd:,.0f}"
            if is_slower:
                cost += f" instead of ${prediction.expected_usd:,.0f}"
            clauses.append(cost)
    elif prediction:
        clauses.append(f"about {prediction.predicted_steps_per_second:.3g} it/s")
    severe = [
        finding.message
        for finding in found
        if finding.level == "fail" and finding.code != "too-slow"
    ]
    sentence = " → ".join(clauses) or "nothing was measured"
    return "; ".join([sentence, *severe[:3]])


def _times(value: float) -> str:
    return f"{value:.1f}×" if value < 10 else f"{value:.0f}×"
