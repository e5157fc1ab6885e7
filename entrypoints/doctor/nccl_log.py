"""What NCCL really uses, from its own log (``NCCL_DEBUG=INFO``, ``NCCL_DEBUG_SUBSYS=INIT,NET``).

The lines are those of NCCL 2.18 to 2.28 (src/transport/net.cc, src/init.cc) and of aws-ofi-nccl 1.5
to 1.16 (src/nccl_ofi_net.c); both wrote other capitals in older releases, so capitals do not count.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

Transport = Literal["efa-rdma", "efa", "infiniband", "sockets"]

_VIA_NET = re.compile(r"via NET/(?P<net>[^/\n]+)/\d+(?P<rest>\S*)", re.IGNORECASE)
_USING = re.compile(r"Using network (?P<net>.+?)\s*$", re.IGNORECASE)
_NCCL = re.compile(r"NCCL version (?P<version>\d+\.\d+\.\d+)", re.IGNORECASE)
_PLUGIN = re.compile(r"NET/OFI Initializing aws-ofi-nccl (?P<version>\S+)", re.IGNORECASE)
_LIBFABRIC = re.compile(r"NET/OFI Using Libfabric version (?P<version>\S+)", re.IGNORECASE)
_PROVIDER = re.compile(r"Selected provider is (?P<name>[\w;-]+)", re.IGNORECASE)


@dataclass(frozen=True)
class NcclLog:
    """What one process's log says; None is unsaid.

    ``transport`` is between nodes: of the channels if any was opened, else of what NCCL would use.
    ``channels`` counts those over the network, ``rdma_channels`` those of them by GPUDirect RDMA.
    """

    transport: Transport | None
    provider: str | None
    nccl: str | None
    plugin: str | None
    libfabric: str | None
    channels: int
    rdma_channels: int


def parse_nccl_log(lines: Iterable[str]) -> NcclLog:
    """Read a log; anything else in it, and lines cut short, are passed over."""
    found: dict[str, str] = {}
    nets: list[tuple[str, bool]] = []
    for line in lines:
        for name, pattern in _ONCE.items():
            if match := pattern.search(line):
                found[name] = match[1]
        if match := _VIA_NET.search(line):
            nets.append((match["net"], "/GDRDMA" in match["rest"].upper()))
    rdma = sum(direct for _, direct in nets)
    net = nets[-1][0] if nets else found.get("using")
    return NcclLog(
        transport=_transport(net, found.get("provider"), direct=rdma > 0),
        provider=found.get("provider"),
        nccl=found.get("nccl"),
        plugin=found.get("plugin"),
        libfabric=found.get("libfabric"),
        channels=len(nets),
        rdma_channels=rdma,
    )


_ONCE = {
    "using": _USING,
    "nccl": _NCCL,
    "plugin": _PLUGIN,
    "libfabric": _LIBFABRIC,
    "provider": _PROVIDER,
}


def _transport(net: str | None, provider: str | None, *, direct: bool) -> Transport | None:
    name = (net or "").lower()
    if name.startswith("socket"):
        return "sockets"
    if name.startswith("ib"):
        return "infiniband"
    if "libfabric" in name or "ofi" in name:
        # The plugin also runs over libfabric's TCP provider, which is no EFA.
        if provider is not None and "efa" not in provider.lower():
            return "sockets"
        return "efa-rdma" if direct else "efa"
    return None
