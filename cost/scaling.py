"""Predict throughput at one cluster size from throughput at others.

If every GPU does the same work at all sizes, a step is compute plus communication that compute does
not hide (:func:`scale_steps`), and only the network's speed is unknown.

Otherwise two laws, both with two parameters:

- contention (Amdahl 1967; Gunther's universal scalability law without its retrograde term):
  n ÷ X(n) = α + β·n, for X images per second on n GPUs;
- a power law: X(n) = a·n^b.

On the ten published rows of mosaicml/diffusion's README the contention law's residual is the
smaller (0.09 against 0.14 at 256 px, 0.015 against 0.016 at 512 px), so it gives the median; the
two laws together, widened by the residual, give the range. The range is wide where the laws
disagree, as between two points that are far apart.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from sm_train.cost.network import GpuNetwork

PUBLISHED_SPREAD = 0.063
"""Relative RMS residual of the contention law, pooled over those ten rows (6 degrees of freedom):
used for two points, which leave no residual."""

EFFICIENCY_PER_DOUBLING = (0.87, 0.95, 1.0)
"""Low, median and high share of the throughput per GPU that remains when GPUs double. High:
mosaicml/diffusion at 512 px, 8 to 128 A100 (0.997). Low: MLPerf Training v4.0 Stable Diffusion,
8 to 1,024 H100 (0.872); mosaicml/diffusion at 256 px is between (0.901)."""

# Student's t, one-sided 90 %, by degrees of freedom (any table of quantiles).
_T90 = (3.078, 1.886, 1.638, 1.533, 1.476, 1.440, 1.415, 1.397, 1.383, 1.372)
_NORMAL90 = 1.2816


STEP_NOISE = 0.02
"""Relative standard deviation of a measured step time: two jobs of the same work (assumed)."""

NETWORK_DEVIATION = 0.5
"""Standard deviation of the logarithm of a network's speed ÷ its nominal one, before a measurement
(P10 to P90: 0.53 to 1.9 times; assumed)."""

JITTER_PER_DOUBLING = (0.0, 0.01, 0.04)
"""Low, median and high share by which a step takes longer when the GPUs double beyond the measured
sizes, and shorter when they are halved: every step waits for the slowest rank. Weak scaling in
``benchmarks/data/speeds.csv`` lies within it."""

_NETWORK_SPEEDS = tuple(8 ** (step / 14) for step in range(-14, 15))


@dataclass(frozen=True)
class Throughput:
    """Images per second of a whole cluster: median, P10 and P90."""

    images_per_second: float
    low: float
    high: float


@dataclass(frozen=True)
class ScalingFit:
    """Both laws, fitted to ``points`` measurements.

    ``residual`` is the contention law's relative RMS residual; None for two points.
    """

    points: int
    serial: float
    """α: seconds per image on one GPU."""
    contention: float
    """β: seconds added per GPU."""
    exponent: float
    factor: float
    residual: float | None
    smallest: int
    """GPUs of the smallest measured cluster."""

    def predict(self, gpus: int) -> Throughput:
        """Return images per second on ``gpus`` GPUs."""
        contended = gpus / (self.serial + self.contention * gpus)
        power = self.factor * gpus**self.exponent
        spread = math.exp(self._deviations() * self._spread())
        low, high = min(contended, power) / spread, max(contended, power) * spread
        if gpus < self.smallest:
            # Each GPU waits less than on the smallest cluster, and is at least as fast as there.
            there = self.predict(self.smallest)
            low = max(low, there.low * gpus / self.smallest)
        return Throughput(max(contended, low), low, high)

    def _spread(self) -> float:
        # Points that follow neither law still give a finite range.
        return PUBLISHED_SPREAD if self.residual is None else min(self.residual, 1.0)

    def _deviations(self) -> float:
        freedom = self.points - 2
        return _T90[freedom - 1] if 0 < freedom <= len(_T90) else _NORMAL90


def fit_scaling(points: Sequence[tuple[int, float]]) -> ScalingFit:
    """Fit ``(GPUs, images per second)`` points at two or more cluster sizes.

    Least squares of the relative errors. Throughput per GPU that rises with the cluster size
    (noise, caches) counts as no contention.

    Raises:
        ValueError: fewer than two cluster sizes.
    """
    if len({gpus for gpus, _ in points}) < 2:
        raise ValueError("a scaling fit needs measurements at two or more cluster sizes")
    sizes = [float(gpus) for gpus, _ in points]
    times = [gpus / images for gpus, images in points]
    weights = [(images / gpus) ** 2 for gpus, images in points]
    alpha, beta = _line(sizes, times, weights)
    if beta < 0:
        alpha, beta = _ratio([1.0] * len(points), times, weights), 0.0
    elif alpha < 0:
        # More GPUs give fewer images: all of an image's time is contention.
        alpha, beta = 0.0, _ratio(sizes, times, weights)
    logarithm, exponent = _line(
        [math.log(gpus) for gpus, _ in points],
        [math.log(images) for _, images in points],
        [1.0] * len(points),
    )
    errors = [gpus / (alpha + beta * gpus) / images - 1 for gpus, images in points]
    freedom = len(points) - 2
    residual = math.sqrt(sum(error**2 for error in errors) / freedom) if freedom else None
    smallest = min(gpus for gpus, _ in points)
    return ScalingFit(len(points), alpha, beta, exponent, math.exp(logarithm), residual, smallest)


def scale_one(gpus: int, images_per_second: float, to_gpus: int) -> Throughput:
    """Scale one measurement to another cluster size.

    By a published range of efficiency: what each GPU loses on more GPUs, it gains on fewer, where
    it is at least as fast as measured.
    """
    doublings = math.log2(to_gpus / gpus)
    linear = images_per_second * to_gpus / gpus
    ends = sorted(linear * share**doublings for share in EFFICIENCY_PER_DOUBLING)
    return Throughput(ends[1], ends[0], ends[2])


@dataclass(frozen=True)
class StepScaling:
    """Seconds of a step on another cluster: median, P10 and P90.

    ``network_speed`` is the median of the network's speed ÷ its nominal one.
    """

    seconds: float
    low: float
    high: float
    network_speed: float


def scale_steps(
    points: Sequence[tuple[GpuNetwork, float]],
    to: GpuNetwork,
    exposed: Callable[[GpuNetwork, float], float],
) -> StepScaling:
    """Predict a step's seconds on ``to`` from (network, seconds) of measured clusters.

    Every GPU does the same work on all of them. ``exposed`` returns the seconds of communication
    that a step's compute (seconds) does not hide. The network's speed is weighted by how well it
    explains the measurements; one cluster alone leaves it nearly as uncertain as before.
    """
    fits = []
    for speed in _NETWORK_SPEEDS:
        compute = _compute_seconds(points, speed, exposed)
        errors = [
            (compute + exposed(_at_speed(network, speed), compute)) / seconds - 1
            for network, seconds in points
        ]
        misfit = sum((error / STEP_NOISE) ** 2 for error in errors)
        misfit += (math.log(speed) / NETWORK_DEVIATION) ** 2
        seconds = compute + exposed(_at_speed(to, speed), compute)
        fits.append((misfit, seconds, speed))
    best = min(misfit for misfit, *_ in fits)
    weights = [math.exp((best - misfit) / 2) for misfit, *_ in fits]
    low, middle, high = (
        _weighted_quantile([fit[1] for fit in fits], weights, share) for share in (0.1, 0.5, 0.9)
    )
    sizes = [network.gpus for network, _ in points]
    nearest = min(max(to.gpus, min(sizes)), max(sizes))
    doublings = math.log2(to.gpus / nearest)
    jitter = sorted((1 + share) ** doublings for share in JITTER_PER_DOUBLING)
    return StepScaling(
        middle * jitter[1],
        low * jitter[0] * (1 - STEP_NOISE),
        high * jitter[2] * (1 + STEP_NOISE),
        _weighted_quantile([fit[2] for fit in fits], weights, 0.5),
    )


def _compute_seconds(
    points: Sequence[tuple[GpuNetwork, float]],
    speed: float,
    exposed: Callable[[GpuNetwork, float], float],
) -> float:
    """Return the compute that, with the exposed communication, gives the measured step times."""
    compute = min(seconds for _, seconds in points)
    for _ in range(20):  # a contraction: compute hides at most as much as it grows
        rest = [
            seconds - exposed(_at_speed(network, speed), compute) for network, seconds in points
        ]
        previous, compute = compute, max(0.05 * compute, sum(rest) / len(rest))
        if abs(compute - previous) < 1e-4 * previous:
            break
    return compute


def _at_speed(network: GpuNetwork, speed: float) -> GpuNetwork:
    return replace(
        network,
        between_nodes=network.between_nodes * speed,
        inside_node=network.inside_node * speed,
    )


def _weighted_quantile(values: Sequence[float], weights: Sequence[float], share: float) -> float:
    ordered = sorted(zip(values, weights, strict=True))
    threshold = share * sum(weights)
    for value, weight in ordered:
        threshold -= weight
        if threshold <= 0:
            return value
    return ordered[-1][0]


def _ratio(xs: Sequence[float], ys: Sequence[float], weights: Sequence[float]) -> float:
    """Return the slope of the weighted least-squares line through the origin."""
    across = sum(w * x * y for w, x, y in zip(weights, xs, ys, strict=True))
    return across / sum(w * x * x for w, x in zip(weights, xs, strict=True))


def _line(
    xs: Sequence[float], ys: Sequence[float], weights: Sequence[float]
) -> tuple[float, float]:
    """Return the intercept and slope of the weighted least-squares line."""
    total = sum(weights)
    mean_x = sum(w * x for w, x in zip(weights, xs, strict=True)) / total
    mean_y = sum(w * y for w, y in zip(weights, ys, strict=True)) / total
    across = sum(w * (x - mean_x) * (y - mean_y) for w, x, y in zip(weights, xs, ys, strict=True))
    slope = across / sum(w * (x - mean_x) ** 2 for w, x in zip(weights, xs, strict=True))
    return mean_y - slope * mean_x, slope
