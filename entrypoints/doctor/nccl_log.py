"""Parses what NCCL uses from its log (``NCCL_DEBUG=INFO``, ``NCCL_DEBUG_SUBSYS=INIT,NET``).

The lines are those of NCCL 2.18 to 2.28 (src/transport/net.cc, src/init.cc) and of aws-ofi-nccl 1.5
to 1.16 (src/nccl_ofi_net.c). Older releases of both capitalize differently, so case is ignored.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

Transport = Literal["efa-rdma", "efa", "infiniband", "sockets"]

# "Channel 00/0 : 8[0] -> 0[0] [receive] via NET/Libfabric/0/GDRDMA": one network channel; the net's
# name may hold spaces ("AWS Libfabric"), the number is the adapter's, GDRDMA stands for GPUDirect.
_VIA_NET = re.compile(r"via NET/(?P<net>[^/\n]+)/\d+(?P<suffix>\S*)", re.IGNORECASE)
# Each of these appears at most once per log, with the value in its only group.
_SINGLE_VALUES = {
    "network": re.compile(r"Using network (.+?)\s*$", re.IGNORECASE),
    "nccl": re.compile(r"NCCL version (\d+\.\d+\.\d+)", re.IGNORECASE),
    "plugin": re.compile(r"NET/OFI Initializing aws-ofi-nccl (\S+)", re.IGNORECASE),
    "libfabric": re.compile(r"NET/OFI Using Libfabric version (\S+)", re.IGNORECASE),
    # Layered providers have a semicolon: "tcp;ofi_rxm".
    "provider": re.compile(r"Selected provider is ([\w;-]+)", re.IGNORECASE),
}


@dataclass(frozen=True)
class NcclLog:
    """What one process's log reports; None if it does not.

    ``transport`` is between nodes: of the channels if any was opened, else of the network that NCCL
    selected. ``channels`` counts network channels, ``rdma_channels`` those with GPUDirect RDMA.
    """

    transport: Transport | None
    provider: str | None
    nccl: str | None
    plugin: str | None
    libfabric: str | None
    channels: int
    rdma_channels: int


def parse_nccl_log(lines: Iterable[str]) -> NcclLog:
    """Parse a log; skips other lines and truncated ones."""
    values: dict[str, str] = {}
    channels: list[tuple[str, bool]] = []  # (net, uses GPUDirect RDMA)
    for line in lines:
        for name, pattern in _SINGLE_VALUES.items():
            if match := pattern.search(line):
                values[name] = match[1]
        if match := _VIA_NET.search(line):
            channels.append((match["net"], "/GDRDMA" in match["suffix"].upper()))
    rdma_channels = sum(rdma for _, rdma in channels)
    net = channels[-1][0] if channels else values.get("network")
    return NcclLog(
        transport=_transport(net, values.get("provider"), rdma=rdma_channels > 0),
        provider=values.get("provider"),
        nccl=values.get("nccl"),
        plugin=values.get("plugin"),
        libfabric=values.get("libfabric"),
        channels=len(channels),
        rdma_channels=rdma_channels,
    )


def _transport(net: str | None, provider: str | None, *, rdma: bool) -> Transport | None:
    name = (net or "").lower()
    if name.startswith("socket"):
        return "sockets"
    if name.startswith("ib"):
        return "infiniband"
    if "libfabric" in name or "ofi" in name:
        # The plugin also runs over libfabric's TCP provider, which is not EFA.
        if provider is not None and "efa" not in provider.lower():
            return "sockets"
        return "efa-rdma" if rdma else "efa"
    return None
