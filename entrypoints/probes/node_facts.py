"""Facts of a node that are looked up, not measured: versions, instance id, cores, memory."""

from __future__ import annotations

import os
import platform
import re
import subprocess
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sm_train.entrypoints.job_interface.node_description import machine_name

_BOARD = Path("/sys/devices/virtual/dmi/id/board_asset_tag")
"""Nitro instances have their id there (EC2 user guide, "Identify EC2 Linux instances")."""

_EFA_PACKAGES = Path("/opt/amazon/efa_installed_packages")
"""The EFA installer's list of installed packages."""

# A package's name and version, as Debian (libfabric1-aws_1.22.0amzn4.0_amd64) and as RPM
# (libfabric-aws-1.17.0-1.el8.x86_64) write them; libfabric-aws-bin comes before the library, has
# no version right after its name and does not match.
_PACKAGES = {
    "libfabric": re.compile(r"libfabric1?-aws[-_](\d+\.\d+\.\d+)"),
    "plugin": re.compile(r"(?:libnccl-ofi|aws-ofi-nccl)[a-z0-9-]*[-_](\d+\.\d+\.\d+)"),
}


def versions() -> dict[str, str | None]:
    """Return versions that must be equal on all nodes; None for what is missing or unknown."""
    import torch

    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "nccl": _nccl_version(),
        **dict.fromkeys(_PACKAGES),
        **(installed_by_efa(_read(_EFA_PACKAGES)) or _libfabric_from_fi_info()),
    }


def _nccl_version() -> str | None:
    import torch

    if not torch.cuda.is_available():
        return None
    nccl: Any = torch.cuda.nccl
    return ".".join(map(str, nccl.version()))


def installed_by_efa(text: str) -> dict[str, str]:
    """Parse the versions of libfabric and the NCCL plugin from the EFA installer's list."""
    return {
        name: match[1] for name, pattern in _PACKAGES.items() if (match := pattern.search(text))
    }


def _libfabric_from_fi_info() -> dict[str, str]:
    """Return versions from libfabric's ``fi_info``, for images without the EFA installer."""
    try:
        text = subprocess.run(
            ["fi_info", "--version"], capture_output=True, text=True, timeout=10, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return {}
    match = re.search(r"libfabric: (\d+\.\d+\.\d+)", text)
    return {"libfabric": match[1]} if match else {}


def instance_id() -> str | None:
    """Return the EC2 instance id, or the machine's name in its cluster; None if none is known."""
    tag = _read(_BOARD).strip()
    return machine_name() or (tag if re.fullmatch(r"i-[0-9a-f]{8,17}", tag) else None)


def cores() -> int:
    """Return the number of CPU cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1  # macOS


def free_memory() -> int:
    """Return the bytes of host memory that a process can still allocate (MemAvailable)."""
    match = re.search(r"MemAvailable:\s+(\d+) kB", _read(Path("/proc/meminfo")))
    return int(match[1]) * 1024 if match else 2**30


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def minority_values(values: Mapping[int, Mapping[str, Any]]) -> dict[str, dict[int, Any]]:
    """Return name → {node: value} of the nodes whose value differs from the most frequent one.

    ``values`` maps nodes to their named values.
    """
    minorities = {}
    for name in sorted({name for by_name in values.values() for name in by_name}):
        by_node = {node: by_name.get(name) for node, by_name in values.items()}
        counts = Counter(by_node.values())
        [(usual, _)] = counts.most_common(1)
        if len(counts) > 1:
            minorities[name] = {node: value for node, value in by_node.items() if value != usual}
    return minorities
