"""Accelerators by their data sheets, from a table.

``data/accelerators.csv`` names the source of each row. Peaks are dense FLOP/s without sparsity; an
empty one is unknown, or the accelerator lacks the precision.
"""

from __future__ import annotations

import csv
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from sm_train.cost.speed_model import BF16_PRECISIONS, GpuFigures

_WITH_FP8 = ("H100", "H200", "B200", "B300", "GB200", "L4", "RTX PRO")
"""Beginnings of the names of GPUs whose tensor cores multiply fp8; L4 is also that of an L40S."""

_TABLE = Path(__file__).parent / "data" / "accelerators.csv"


@dataclass(frozen=True)
class Accelerator:
    """One row of the table; None is unknown."""

    name: str
    memory_gib: float | None
    bf16_tflops: float | None
    fp8_tflops: float | None
    """Half of the data sheet's figure, which assumes sparsity."""
    fp32_tflops: float | None
    """The peak without TF32: the trainer leaves it off for matrix products, as PyTorch does."""
    memory_gbytes: float | None
    """GB/s of the accelerator's memory."""
    link_gbytes: float | None
    """NVLink GB/s in one direction: half of the data sheet's bidirectional figure."""

    def gpu(self, precision: str) -> GpuFigures | None:
        """Return the figures of the speed model; None if one is unknown."""
        peak = self.bf16_tflops if precision in BF16_PRECISIONS else self.fp32_tflops
        fp8 = self.fp8_tflops if precision == "fp8" else None
        if peak is None or self.memory_gbytes is None or (precision == "fp8" and fp8 is None):
            return None
        fp8_flops = None if fp8 is None else fp8 * 1e12
        return GpuFigures(self.name, peak * 1e12, self.memory_gbytes * 1e9, fp8_flops)

    @property
    def has_fp8(self) -> bool:
        """Whether its matrix products take fp8: compute capability 8.9 (Ada, Hopper) or newer."""
        return self.name.startswith(_WITH_FP8)


def accelerator(name: str) -> Accelerator:
    """Return the accelerator ``name`` of the table."""
    return _by_name()[name]


@cache
def _by_name() -> dict[str, Accelerator]:
    with _TABLE.open(encoding="utf-8", newline="") as file:
        return {row["accelerator"]: _from_row(row) for row in csv.DictReader(file)}


def _from_row(row: Mapping[str, str]) -> Accelerator:
    return Accelerator(
        name=row["accelerator"],
        memory_gib=_number(row["memory_gib"]),
        bf16_tflops=_number(row["bf16_tflops"]),
        fp8_tflops=_number(row["fp8_tflops"]),
        fp32_tflops=_number(row["fp32_tflops"]),
        memory_gbytes=_number(row["memory_gbytes"]),
        link_gbytes=_number(row["link_gbytes"]),
    )


def _number(text: str) -> float | None:
    return float(text) if text else None
