"""Instance types of SageMaker training, from a table, and machines that AWS does not sell.

Such a machine is written as its figures: ``own.8xH100-SXM5-80GB.3200gbps.23.5usd`` has eight GPUs
of that data sheet, 3200 Gbit/s between nodes, and costs $23.50 an hour.

Every GPU and Trainium type of botocore's ``TrainingInstanceType`` (1.44.5). Sources of
``data/instances.csv``: Karpenter's generated instance types (2026-08); for P2, P3 and Trn the AWS
instance pages. Prices are in :mod:`sm_train.cost.prices`.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from decimal import Decimal
from functools import cache
from pathlib import Path

from sm_train.cost.accelerators import accelerator
from sm_train.cost.network import GpuNetwork, gpu_network
from sm_train.cost.speed_model import GpuFigures

_TABLE = Path(__file__).parent / "data" / "instances.csv"

USABLE_MEMORY = 0.9
"""Share of a GPU's memory that a plan may use; the rest is for the CUDA context, NCCL buffers and
fragmentation (assumed)."""


_OWN_PREFIX = "own."
_OWN = re.compile(
    r"own\.(?P<gpus>[1-9][0-9]?)x(?P<gpu>[^.]+)\.(?P<gbps>[0-9]+(?:\.[0-9]+)?)gbps"
    r"\.(?P<usd>[0-9]+(?:\.[0-9]+)?)usd"
)

OWN_PATTERN = "^" + re.sub(r"\?P<\w+>", "", _OWN.pattern) + "$"
"""The same for editors, whose regular expressions name groups in another way."""


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
    """NVLink GB/s of one accelerator in one direction: half of the data sheet's figure."""
    own_usd_per_hour: Decimal | None = None
    """The price that its name states; None of a type that AWS sells."""

    @property
    def is_own(self) -> bool:
        """Whether it is a machine that AWS does not sell."""
        return is_own_machine(self.name)

    @property
    def supports_smddp(self) -> bool:
        """SMDDP's all-reduce runs on A100 instances only (SageMaker developer guide, 2024)."""
        return self.name.startswith(("ml.p4d.", "ml.p4de."))

    @property
    def trains(self) -> bool:
        """Whether the trainer runs on it: Trainium needs a PyTorch build that it does not use."""
        return not self.accelerator.startswith("Trainium")

    @property
    def obstacle(self) -> str | None:
        """Why a training job of ours cannot run on it; None if it can.

        A GB200 instance has Grace processors, and its request names its place in an UltraServer
        (``InstancePlacementConfig`` in botocore's service model).
        """
        if self.is_own:
            return "is a machine of your own, which SageMaker does not have"
        if not self.trains:
            return f"has {self.accelerator}, and the training code requires CUDA"
        if self.accelerator.startswith("GB"):
            return (
                "has Arm processors, for which AWS has no training image, and its UltraServers "
                "need a placement, which training jobs of sm-train do not request"
            )
        return None

    def gpu(self, precision: str) -> GpuFigures | None:
        """Return the GPU's figures for the speed model; None if one is unknown."""
        return accelerator(self.accelerator).gpu(precision)

    def network(self, instances: int) -> GpuNetwork:
        """Return the network of a cluster of ``instances``."""
        return gpu_network(instances, self.accelerators, self.network_gbps, self.nvlink_gbytes)

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
    if is_own_machine(name):
        return _own_machine(name)
    by_name = _by_name()
    if name not in by_name:
        from difflib import get_close_matches

        near = [known for known in by_name if name.lower().removeprefix("ml.") in known][:5]
        near = near or get_close_matches(name, by_name, n=3, cutoff=0.5)
        hint = f"nearest: {', '.join(near)}" if near else "`sm-train instances` lists them"
        raise UnknownInstanceTypeError(f"{name!r} is not a known training instance type; {hint}")
    return by_name[name]


def is_own_machine(name: str) -> bool:
    """Return whether ``name`` is that of a machine that AWS does not sell."""
    return name.startswith(_OWN_PREFIX)


@cache
def _own_machine(name: str) -> InstanceType:
    match = _OWN.fullmatch(name)
    if match is None:
        raise UnknownInstanceTypeError(
            f"{name!r} is not a machine such as own.8xH100-SXM5-80GB.3200gbps.23.5usd: number and "
            "name of the GPUs, Gbit/s between nodes, price per hour"
        )
    gpus = sorted({kind.accelerator for kind in instance_types() if kind.trains})
    if match["gpu"] not in gpus:
        raise UnknownInstanceTypeError(
            f"{name!r}: {match['gpu']} is not a known GPU; write one of {', '.join(gpus)}"
        )
    row = {
        "instance_type": name,
        "accelerator": match["gpu"],
        "accelerators": match["gpus"],
        "network_gbps": match["gbps"] if float(match["gbps"]) else "",
        "efa_interfaces": "",
        "local_nvme_gb": "",
    }
    return replace(_from_row(row), own_usd_per_hour=Decimal(match["usd"]))


@cache
def _by_name() -> dict[str, InstanceType]:
    with _TABLE.open(encoding="utf-8", newline="") as file:
        return {row["instance_type"]: _from_row(row) for row in csv.DictReader(file)}


def _from_row(row: Mapping[str, str]) -> InstanceType:
    specification = accelerator(row["accelerator"])
    # NVLink connects the GPUs of an instance, so one GPU has none.
    linked = int(row["accelerators"]) > 1
    return InstanceType(
        name=row["instance_type"],
        accelerator=row["accelerator"],
        accelerators=int(row["accelerators"]),
        accelerator_memory_gib=specification.memory_gib,
        network_gbps=_number(row["network_gbps"]),
        efa_interfaces=int(row["efa_interfaces"]) if row["efa_interfaces"] else None,
        local_nvme_gb=_number(row["local_nvme_gb"]),
        bf16_tflops=specification.bf16_tflops,
        nvlink_gbytes=specification.link_gbytes if linked else None,
    )


def _number(text: str) -> float | None:
    return float(text) if text else None


def instance_vcpus(instance_type: str) -> int | None:
    """Derive the vCPUs from the name: an xlarge has four, an Nxlarge N times as many."""
    match = re.fullmatch(r"ml\.[a-z0-9-]+\.(\d*)xlarge", instance_type)
    return 4 * int(match[1] or 1) if match else None
