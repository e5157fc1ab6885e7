"""Instance types of SageMaker training, from a table.

Sources of ``data/instances.csv``: AWS instance pages and Karpenter's generated instance types
(2026-07/08). Prices are in :mod:`sm_train.cost.prices`.
"""

from __future__ import annotations

import csv
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

_TABLE = Path(__file__).parent / "data" / "instances.csv"


class UnknownInstanceTypeError(ValueError):
    """The name is not in the table; the message lists the nearest ones."""


@dataclass(frozen=True)
class InstanceType:
    """One row of the table; None is unknown."""

    name: str
    accelerator: str
    accelerators: int
    accelerator_memory_gib: float | None
    network_gbps: float | None
    efa_interfaces: int | None
    local_nvme_gb: float | None
    bf16_tflops: float | None
    """Peak dense bf16 TFLOP/s of one accelerator."""
    nvlink_gbytes: float | None = None
    """NVLink GB/s of one accelerator in one direction: half of the bidirectional figure in NVIDIA's
    data sheets of the A100, H100, H200, B200 and B300 (2020 to 2025)."""

    @property
    def supports_smddp(self) -> bool:
        """SMDDP's all-reduce runs on A100 instances only (SageMaker developer guide, 2024)."""
        return self.name.startswith(("ml.p4d.", "ml.p4de."))

    @property
    def supports_efa(self) -> bool:
        """Whether the type has an Elastic Fabric Adapter for NCCL to use."""
        return bool(self.efa_interfaces)


def instance_types() -> tuple[InstanceType, ...]:
    """Return every instance type, in the order of the table."""
    return tuple(_by_name().values())


def instance_type(name: str) -> InstanceType:
    """Return the instance type ``name``.

    Raises:
        UnknownInstanceTypeError: the table has no such type.
    """
    by_name = _by_name()
    if name not in by_name:
        from difflib import get_close_matches

        near = get_close_matches(name, by_name, n=3, cutoff=0.5)
        hint = f"nearest: {', '.join(near)}" if near else f"known: {', '.join(by_name)}"
        raise UnknownInstanceTypeError(f"{name!r} is not a known training instance type; {hint}")
    return by_name[name]


@cache
def _by_name() -> dict[str, InstanceType]:
    with _TABLE.open(encoding="utf-8", newline="") as file:
        return {row["instance_type"]: _from_row(row) for row in csv.DictReader(file)}


def _from_row(row: Mapping[str, str]) -> InstanceType:
    return InstanceType(
        name=row["instance_type"],
        accelerator=row["accelerator"],
        accelerators=int(row["accelerators"]),
        accelerator_memory_gib=_number(row["accelerator_memory_gib"]),
        network_gbps=_number(row["network_gbps"]),
        efa_interfaces=int(row["efa_interfaces"]) if row["efa_interfaces"] else None,
        local_nvme_gb=_number(row["local_nvme_gb"]),
        bf16_tflops=_number(row["bf16_tflops"]),
        nvlink_gbytes=_number(row["nvlink_gbytes"]),
    )


def _number(text: str) -> float | None:
    return float(text) if text else None
