"""Fit the speed model to published points, and validate it on sources that the fit has not seen.

    python benchmarks/speed_calibration.py

It prints the fitted constants and the table of docs/cost.md. ``data/speeds.csv`` holds one
published throughput per row, with source, URL, date and what the source does not state. A
resolution is pixels a side for images, and tokens for language models, whose activations are
34 × tokens × width × layers bytes (Korthikanti et al. 2022, with a fused attention kernel).
"""

from __future__ import annotations

import csv
import math
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from functools import cache
from pathlib import Path
from statistics import median, quantiles

from sm_train.cost.accelerators import accelerator
from sm_train.cost.network import GpuNetwork, gpu_network
from sm_train.cost.speed_model import (
    CALIBRATION,
    Calibration,
    GpuFigures,
    StepWork,
    images_per_second,
    spread,
)

_TABLE = Path(__file__).parent / "data" / "speeds.csv"

_BOUNDS = Calibration(0.95, 0.90, 60.0, 1.0, 0.2), Calibration(0.4, 0.3, 3.0, 0.1, 0.005)
"""Upper and lower limits of the constants: beyond them they have no physical meaning."""

_SOFTNESS = 0.1
"""Relative error below which the loss is quadratic, and above which it is linear: one outlier does
not decide a constant."""


@dataclass(frozen=True)
class SpeedPoint:
    """One published throughput of a whole cluster."""

    source: str
    url: str
    date: str
    model: str
    resolution: int
    work: StepWork
    gpu: GpuFigures
    network: GpuNetwork
    images_per_second: float

    def ratio(self, calibration: Calibration = CALIBRATION) -> float:
        """Return published ÷ predicted throughput."""
        predicted = images_per_second(self.work, self.gpu, self.network, calibration)
        return self.images_per_second / predicted


@dataclass(frozen=True)
class SourceValidation:
    """Published ÷ predicted for the points of one source, predicted without that source."""

    source: str
    ratios: tuple[float, ...]
    inside: int
    """Points within the predicted P10 to P90."""


@dataclass(frozen=True)
class Validation:
    """The leave-one-source-out validation."""

    sources: tuple[SourceValidation, ...]
    median_width: float
    """Median of P90 ÷ P10."""

    @property
    def ratios(self) -> list[float]:
        return [ratio for source in self.sources for ratio in source.ratios]

    @property
    def median_ratio(self) -> float:
        return median(self.ratios)

    @property
    def share_inside(self) -> float:
        return sum(source.inside for source in self.sources) / len(self.ratios)


@cache
def speed_points() -> tuple[SpeedPoint, ...]:
    """Return the published points."""
    with _TABLE.open(encoding="utf-8", newline="") as file:
        return tuple(_point(row) for row in csv.DictReader(file))


def _point(row: dict[str, str]) -> SpeedPoint:
    specification = accelerator(row["accelerator"])
    precision, per_node = row["precision"], int(row["gpus_per_node"])
    gpu = specification.gpu(precision)
    assert gpu is not None, f"{row['accelerator']}: no peak in {precision}"
    return SpeedPoint(
        source=row["source"],
        url=row["url"],
        date=row["date"],
        model=row["model"],
        resolution=int(row["resolution"]),
        work=StepWork(
            images=int(row["images_per_pass"]),
            passes=int(row["passes"]),
            flops=float(row["tflops"]) * 1e12,
            activation_bytes=float(row["activation_mbytes"]) * 1e6,
            parameters=int(row["parameters"]),
            precision=precision,
            sharding=row["sharding"],
            activation_checkpointing=row["activation_checkpointing"] == "true",
            compiled=row["compiled"] == "true",
            encoder_flops=float(row["encoder_tflops"]) * 1e12,
        ),
        gpu=gpu,
        network=gpu_network(
            int(row["gpus"]) // per_node,
            per_node,
            float(row["network_gbps"]),
            specification.link_gbytes,
        ),
        images_per_second=float(row["images_per_second"]),
    )


def fit(points: Sequence[SpeedPoint], start: Calibration = CALIBRATION) -> Calibration:
    """Return the constants of the smallest loss: a pattern search from ``start``.

    Each source counts by the square root of its number of points.
    """
    best, values, steps = _loss(points, start), list(astuple(start)), [0.2] * len(astuple(start))
    most, least = map(astuple, _BOUNDS)
    while max(steps) > 0.002:
        for index, step in enumerate(steps):
            for factor in (math.exp(step), math.exp(-step)):
                tried = list(values)
                tried[index] = min(max(values[index] * factor, least[index]), most[index])
                loss = _loss(points, Calibration(*tried))
                if loss < best - 1e-9:
                    best, values = loss, tried
                    break
            else:
                steps[index] = step / 2
    return Calibration(*values)


def _loss(points: Sequence[SpeedPoint], calibration: Calibration) -> float:
    by_source: dict[str, list[float]] = {}
    for point in points:
        by_source.setdefault(point.source, []).append(math.log(point.ratio(calibration)))
    return sum(
        sum(math.hypot(error, _SOFTNESS) for error in errors) / math.sqrt(len(errors))
        for errors in by_source.values()
    )


def validate(points: Sequence[SpeedPoint]) -> Validation:
    """Predict each source's points with constants fitted to the other sources."""
    sources = []
    for source in dict.fromkeys(point.source for point in points):
        left_out = [point for point in points if point.source == source]
        calibration = fit([point for point in points if point.source != source])
        ratios = tuple(point.ratio(calibration) for point in left_out)
        inside = sum(
            1 / spread(point.gpu.name, point.work.precision)
            <= ratio
            <= spread(point.gpu.name, point.work.precision)
            for point, ratio in zip(left_out, ratios, strict=True)
        )
        sources.append(SourceValidation(source, ratios, inside))
    return Validation(
        tuple(sources),
        median(spread(point.gpu.name, point.work.precision) ** 2 for point in points),
    )


def markdown(validation: Validation) -> str:
    """Return the validation as the table of docs/cost.md."""
    lines = [
        "| left-out source | points | published ÷ predicted, median | P10 | P90 | in range |",
        "|---|---|---|---|---|---|",
    ]
    total = SourceValidation(
        "**all**", tuple(validation.ratios), sum(source.inside for source in validation.sources)
    )
    for source in (*validation.sources, total):
        deciles = (
            quantiles(source.ratios, n=10, method="inclusive") if len(source.ratios) > 1 else []
        )
        low, high = (deciles[0], deciles[-1]) if deciles else (source.ratios[0], source.ratios[0])
        lines.append(
            f"| {source.source} | {len(source.ratios)} | {median(source.ratios):.2f} | {low:.2f} | "
            f"{high:.2f} | {source.inside / len(source.ratios):.0%} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Print the fitted constants and the validation."""
    points = speed_points()
    validation = validate(points)
    print(fit(points))
    print(markdown(validation))
    print(
        f"median {validation.median_ratio:.2f}, {validation.share_inside:.0%} in range, "
        f"P90 ÷ P10 {validation.median_width:.2f}"
    )


if __name__ == "__main__":
    main()
