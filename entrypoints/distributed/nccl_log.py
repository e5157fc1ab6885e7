"""Parses what NCCL uses from its log (``NCCL_DEBUG=INFO``, ``NCCL_DEBUG_SUBSYS=INIT,NET``).

The lines are those of NCCL 2.4 to 2.28 (src/transport/net.cc and net_ib.cc, src/graph/paths.cc,
src/init.cc) and of aws-ofi-nccl 1.5 to 1.16 (src/nccl_ofi_net.c). Older releases of both capitalize
differently, so case is ignored. ``doctor``, ``review`` and ``diagnose`` share the parser and the
judgement of the transport.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

Fabric = Literal["efa", "infiniband", "sockets"]

LABELS: dict[Fabric, str] = {"efa": "EFA", "infiniband": "InfiniBand", "sockets": "sockets"}

LITERALS = (
    *("via NET/", "GPU Direct RDMA Disabled", "Selected Provider is", "Selected provider is"),
    *("Using network ", "NET/IB : ", "NCCL_IB_DISABLE set by", "NCCL_NET set by"),
)
"""One of them is in each line that decides about the transport."""

# "Channel 00/0 : 8[0] -> 0[0] [receive] via NET/Libfabric/0/GDRDMA": one network channel; the net's
# name may hold spaces ("AWS Libfabric"), the number is the adapter's, GDRDMA stands for GPUDirect.
_VIA_NET = re.compile(r"via NET/(?P<net>[^/\n]+)/\d+(?P<suffix>\S*)", re.IGNORECASE)
# "NET/IB : GPU Direct RDMA Disabled for HCA 0 'mlx5_0' (no module)",
# "GPU Direct RDMA Disabled for GPU 0 / HCA 3 (distance 8 > 5)"
_RDMA_OFF = re.compile(r"GPU Direct RDMA (Disabled for .+?)\s*$", re.IGNORECASE)
# "NET/IB : Using [0]mlx5_0:1/IB [1]mlx5_1:1/RoCE [RO]; OOB eth0:10.0.1.5<0>"
_IB_ADAPTERS = re.compile(r"NET/IB ?: Using ((?:\[\d+\]\S+ )+)", re.IGNORECASE)
# "NET/OFI Selected Provider is efa (found 4 nics)"
_EFA_ADAPTERS = re.compile(r"Selected provider is .{1,60}?\(found (\d+) nics?\)", re.IGNORECASE)
_NO_ADAPTER = re.compile(r"NET/IB ?: No device found", re.IGNORECASE)
# "NCCL_IB_DISABLE set by environment to 1.", "NCCL_NET set by environment to Socket"
_SOCKETS_SET = re.compile(r"NCCL_(?:IB_DISABLE set by environment to 1|NET set by .* to Socket)\b")
# Each of these appears at most once per log, with the value in its only group.
_SINGLE_VALUES = {
    "network": re.compile(r"Using network (.+?)\s*$", re.IGNORECASE),
    "nccl": re.compile(r"NCCL version (\d+\.\d+\.\d+)", re.IGNORECASE),
    "plugin": re.compile(r"NET/OFI (?:Initializing|Using) aws-ofi-nccl (\S+)", re.IGNORECASE),
    "libfabric": re.compile(r"NET/OFI Using Libfabric version (\S+)", re.IGNORECASE),
    # Layered providers have a semicolon: "tcp;ofi_rxm".
    "provider": re.compile(r"Selected provider is ([\w;-]+)", re.IGNORECASE),
}
_MOST_REASONS = 8


@dataclass(frozen=True)
class NcclLog:
    """What the log of one process or node reports; None if it does not.

    ``fabric`` is between nodes: of the channels if any was opened, else of the network that NCCL
    selected. ``channels`` counts network channels, ``rdma_channels`` those with GPUDirect RDMA, and
    ``rdma_off`` are NCCL's reasons for the others. ``adapters`` is the number of network adapters
    that NCCL found; ``sockets_set`` is the setting that keeps it from using them.
    """

    fabric: Fabric | None
    provider: str | None
    nccl: str | None
    plugin: str | None
    libfabric: str | None
    channels: int
    rdma_channels: int
    rdma_off: Sequence[str] = ()
    adapters: int | None = None
    sockets_set: str | None = None

    def __str__(self) -> str:
        """Describe fabric and channels: ``InfiniBand, GPUDirect RDMA on 4 of 16 channels``."""
        if self.fabric is None:
            return "unknown"
        if self.fabric == "sockets":
            return LABELS[self.fabric]
        if not self.channels:
            rdma = "GPUDirect RDMA disabled" if self.rdma_off else "GPUDirect RDMA unknown"
            return f"{LABELS[self.fabric]}, {rdma}"
        if self.rdma_channels == self.channels:
            return f"{LABELS[self.fabric]} with GPUDirect RDMA"
        return (
            f"{LABELS[self.fabric]}, GPUDirect RDMA on {self.rdma_channels} of {self.channels} "
            "channels"
        )


@dataclass(frozen=True)
class TransportProblem:
    """Why traffic between nodes is slower than the hardware allows, and the fix."""

    code: Literal["transport-sockets", "transport-no-rdma", "adapters-missing"]
    sentence: str
    fix: str


def parse_nccl_log(lines: Iterable[str]) -> NcclLog:
    """Parse a log; skips other lines and truncated ones."""
    values: dict[str, str] = {}
    channels: list[tuple[str, bool]] = []  # (net, uses GPUDirect RDMA)
    reasons: dict[str, None] = {}
    adapters: int | None = None
    sockets_set: str | None = None
    for line in lines:
        for name, pattern in _SINGLE_VALUES.items():
            if match := pattern.search(line):
                values[name] = match[1]
        if match := _VIA_NET.search(line):
            channels.append((match["net"], "/GDRDMA" in match["suffix"].upper()))
        if (match := _RDMA_OFF.search(line)) and len(reasons) < _MOST_REASONS:
            reasons[match[1][:100]] = None
        if match := _EFA_ADAPTERS.search(line):
            adapters = int(match[1])
        elif match := _IB_ADAPTERS.search(line):
            adapters = match[1].count("[")
        elif _NO_ADAPTER.search(line):
            adapters = adapters or 0
        if match := _SOCKETS_SET.search(line):
            sockets_set = match[0].replace(" set by environment to ", "=").rstrip(".")
    net = channels[-1][0] if channels else values.get("network")
    return NcclLog(
        fabric=_fabric(net, values.get("provider")),
        provider=values.get("provider"),
        nccl=values.get("nccl"),
        plugin=values.get("plugin"),
        libfabric=values.get("libfabric"),
        channels=len(channels),
        rdma_channels=sum(rdma for _, rdma in channels),
        rdma_off=tuple(reasons),
        adapters=adapters,
        sockets_set=sockets_set,
    )


def _fabric(net: str | None, provider: str | None) -> Fabric | None:
    name = (net or "").lower()
    if name.startswith("socket"):
        return "sockets"
    if name.startswith("ib"):
        return "infiniband"
    if "libfabric" in name or "ofi" in name:
        # The plugin also runs over libfabric's TCP provider, which is not EFA.
        return "sockets" if provider is not None and "efa" not in provider.lower() else "efa"
    return None


def merge_nccl_logs(logs: Sequence[NcclLog]) -> NcclLog:
    """Return what the processes of one node report together.

    Raises:
        ValueError: there is no log.
    """
    if not logs:
        raise ValueError("no log")
    fabrics = [log.fabric for log in logs if log.fabric is not None]
    known = [log.adapters for log in logs if log.adapters is not None]
    return replace(
        logs[0],
        # One process on sockets slows all of them down.
        fabric="sockets" if "sockets" in fabrics else next(iter(fabrics), None),
        channels=sum(log.channels for log in logs),
        rdma_channels=sum(log.rdma_channels for log in logs),
        rdma_off=tuple(dict.fromkeys(text for log in logs for text in log.rdma_off))[
            :_MOST_REASONS
        ],
        adapters=min(known, default=None),
        sockets_set=next((log.sockets_set for log in logs if log.sockets_set), None),
    )


def transport_problem(
    log: NcclLog,
    *,
    has_rdma: bool | None,
    adapters: int | None = None,
    devices: Sequence[str] = (),
) -> TransportProblem | None:
    """Return what is wrong with a node's transport; None if nothing is, or nothing is known.

    ``has_rdma`` is whether the node has EFA, None if that is unknown, and ``adapters`` how many
    adapters it has. ``devices`` are InfiniBand and RoCE devices that were found on the node.
    """
    if log.fabric == "sockets":
        return _sockets_problem(log, has_rdma, devices)
    if log.fabric is None:
        return None
    if log.rdma_channels < log.channels or (not log.channels and log.rdma_off):
        reason = f"; NCCL: {'; '.join(log.rdma_off[:2])}" if log.rdma_off else ""
        path = "traffic passes through host memory"
        return TransportProblem("transport-no-rdma", f"{log}: {path}{reason}", _rdma_fix(log))
    if adapters and log.adapters is not None and log.adapters < adapters:
        return TransportProblem(
            "adapters-missing",
            f"NCCL found {log.adapters} of {adapters} {LABELS[log.fabric]} adapters",
            "give each container all adapters of its node, and leave NCCL_IB_HCA unset",
        )
    return None


def _sockets_problem(
    log: NcclLog, has_rdma: bool | None, devices: Sequence[str]
) -> TransportProblem | None:
    code: Literal["transport-sockets"] = "transport-sockets"
    if log.sockets_set is not None:
        sentence = f"sockets, because of {log.sockets_set}"
        return TransportProblem(code, sentence, f"remove {log.sockets_set.partition('=')[0]}")
    if devices:
        found = f"sockets, although the node has {', '.join(devices)}"
        fix = (
            "use an image with libibverbs, give the container /dev/infiniband and IPC_LOCK, and "
            "leave NCCL_NET and NCCL_IB_HCA unset"
        )
        return TransportProblem(code, found, fix)
    if has_rdma:
        return TransportProblem(
            code,
            "sockets: EFA is not used",
            "use an image with libfabric and aws-ofi-nccl (`sm-train image`) and a security group "
            "that allows all traffic between its members, and leave FI_PROVIDER and NCCL_NET unset",
        )
    if log.adapters:
        found = f"sockets, although NCCL found {log.adapters} InfiniBand adapters"
        return TransportProblem(code, found, "check the links (ibstat), and leave NCCL_NET unset")
    if has_rdma is None:
        return TransportProblem(
            code,
            "sockets: NCCL found no RDMA adapter"
            if log.adapters == 0
            else "sockets: EFA and InfiniBand are not used",
            "if the nodes have EFA or InfiniBand, give the containers its devices and an image "
            "with its libraries",
        )
    return None


def _rdma_fix(log: NcclLog) -> str:
    if log.fabric == "efa":
        return "use a newer EFA installer in the image"
    reasons = " ".join(log.rdma_off)
    if "distance" in reasons:
        return (
            "place each GPU's process next to its adapter, or set NCCL_NET_GDR_LEVEL=SYS in "
            "cluster.environment"
        )
    return (
        "load nvidia_peermem on the nodes (or use a driver and kernel with DMA-BUF), and turn off "
        "PCIe ACS and the IOMMU where GPUs and adapters share a switch"
    )
