"""Finds the adapters and peers that messages about InfiniBand and RoCE name."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from sm_train.toolkit.analysis.diagnose.matches import Match

_MOST_NAMED = 4

# "… hca mlx5_2", "on dev mlx5_4:1, curr state INIT", "NET/IB : mlx5_0:1 Got async event",
# "Transport retry count exceeded on mlx5_0:1/IB", "on md[5]=mlx5_0:"
_ADAPTER = re.compile(
    r"\bhca (?P<hca>[\w.]+)|\bon dev (?P<dev>\w+(?::\d+)?)|NET/IB ?: (?P<event>\w+:\d+) "
    r"|\b(?P<name>(?:mlx5|bnxt_re|irdma|hns|ionic)_?(?:bond_)?\d+(?::\d+)?)\b"
    r"|\bmlx5_core (?P<pci>[\da-f]{4}:[\da-f]{2}:[\da-f]{2}\.\d)"
)
# "Got completion from peer 10.0.1.5<40110>", "from peer fe80::966d:ae03:8b:df54%ib0<33397>"
_PEER = re.compile(r"\bfrom peer (?P<peer>[^\s<]+)<")


def is_network_fault(code: str) -> bool:
    """Return whether a signature is about InfiniBand or RoCE."""
    return code == "infiniband-error" or code.startswith("ib-")


def named_in(matches: Iterable[Match]) -> Iterator[str]:
    """Yield a sentence on the adapters that messages name by node, and one on the peers."""
    adapters: dict[str, None] = {}
    peers: dict[str, None] = {}
    for match in matches:
        if not is_network_fault(match.code):
            continue
        for found in _ADAPTER.finditer(match.text):
            place = f" of {match.node}" if match.node else ""
            adapters[f"{found[found.lastgroup or 0]}{place}"] = None
        for found in _PEER.finditer(match.text):
            peers[found["peer"]] = None
    if adapters:
        yield f"named adapters: {_listed(adapters)}"
    if peers:
        yield f"named peers: {_listed(peers)}"


def _listed(names: dict[str, None]) -> str:
    shown = ", ".join(list(names)[:_MOST_NAMED])
    more = len(names) - _MOST_NAMED
    return f"{shown} and {more} more" if more > 0 else shown
