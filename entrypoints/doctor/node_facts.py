"""What a node is and has: the facts that are looked up, not measured."""

from __future__ import annotations

import os
import platform
import re
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_BOARD = Path("/sys/devices/virtual/dmi/id/board_asset_tag")
"""Nitro machines show their instance id there (EC2 user guide, "Identify EC2 Linux instances")."""

_EFA_PACKAGES = Path("/opt/amazon/efa_installed_packages")
"""The EFA installer's list of what it installed."""

_PACKAGES = {
    "libfabric": re.compile(r"libfabric1?-aws[-_](\d+\.\d+\.\d+)"),
    "plugin": re.compile(r"(?:libnccl-ofi|aws-ofi-nccl)[a-z0-9-]*[-_](\d+\.\d+\.\d+)"),
}


def versions() -> dict[str, str | None]:
    """Of what must be the same on all nodes; None where there is none, or it cannot be seen."""
    import torch

    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "nccl": _nccl_version(),
        **dict.fromkeys(_PACKAGES),
        **(installed_by_efa(_read(_EFA_PACKAGES)) or _fabric_by_tool()),
    }


def _nccl_version() -> str | None:
    import torch

    if not torch.cuda.is_available():
        return None
    nccl: Any = torch.cuda.nccl
    return ".".join(map(str, nccl.version()))


def installed_by_efa(text: str) -> dict[str, str]:
    """Versions of libfabric and of the NCCL plugin in the installer's list, where it has them."""
    return {
        name: match[1] for name, pattern in _PACKAGES.items() if (match := pattern.search(text))
    }


def _fabric_by_tool() -> dict[str, str]:
    """libfabric's own tool, for images that were built without the installer."""
    try:
        text = subprocess.run(
            ["fi_info", "--version"], capture_output=True, text=True, timeout=10, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return {}
    match = re.search(r"libfabric: (\d+\.\d+\.\d+)", text)
    return {"libfabric": match[1]} if match else {}


def instance_id() -> str | None:
    """The machine's EC2 instance id where the container shows it."""
    tag = _read(_BOARD).strip()
    return tag if re.fullmatch(r"i-[0-9a-f]{8,17}", tag) else None


def cores() -> int:
    """CPU cores that this process may use."""
    return len(os.sched_getaffinity(0))


def free_memory() -> int:
    """Bytes of host memory that a process could still take (MemAvailable)."""
    match = re.search(r"MemAvailable:\s+(\d+) kB", _read(Path("/proc/meminfo")))
    return int(match[1]) * 1024 if match else 2**30


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def different(values: Mapping[int, Mapping[str, Any]]) -> dict[str, dict[int, Any]]:
    """Node → name → value, turned into: name → the nodes that have another value than most."""
    names = {name for one in values.values() for name in one}
    result = {}
    for name in sorted(names):
        seen = {node: one.get(name) for node, one in values.items()}
        counts: dict[Any, int] = {}
        for value in seen.values():
            counts[value] = counts.get(value, 0) + 1
        usual = max(counts, key=lambda value: counts[value])
        if len(counts) > 1:
            result[name] = {node: value for node, value in seen.items() if value != usual}
    return result
