"""Messages between the watchdogs of a job's nodes, so that the first one can name the culprit.

Each poll sends one small datagram to a port next to the rendezvous's. Messages only name a culprit:
every watchdog decides about its own processes alone, so neither a lost nor a forged datagram ends
anything. If nothing arrives, each node sees only itself.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

from sm_train.entrypoints.monitoring.heartbeat import Phase
from sm_train.entrypoints.monitoring.stall_detector import RankStatus

SILENT_POLLS = 5
"""A node that has sent nothing for this many polls is silent."""

_RESOLVE_SECONDS = 10.0
"""Time between attempts to resolve the first node's name."""

_MAX_DATAGRAM_BYTES = 60_000

KINDS = ("stall", "failure")
_MAX_TEXT_LENGTH = 1000


@dataclass(frozen=True)
class PeerFault:
    """What the first node sends alerts about: a stall while it lasts, a failure forever.

    ``seconds`` is the silence before a stall was detected.
    """

    kind: str
    text: str
    seconds: float = 0.0


class PeerLink:
    """One node's end: the first node listens and replies, the others send it their status."""

    def __init__(
        self,
        job: str,
        node: int,
        nodes: int,
        address: tuple[str, int],
        *,
        poll_seconds: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._job, self._node, self._nodes, self._address = job, node, nodes, address
        self._clock, self._silent_after = clock, SILENT_POLLS * poll_seconds
        self._started = clock()
        # The last message of each node: when, its ranks and its fault.
        self._received_at: dict[int, float] = {}
        self._statuses: dict[int, list[RankStatus]] = {}
        self._faults: dict[int, PeerFault] = {}
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._socket.setblocking(False)
        self._resolved: tuple[str, int] | None = None
        self._next_resolve = clock()
        if node == 0:
            self._socket.bind(("", address[1]))

    def exchange(self, own: Sequence[RankStatus], fault: PeerFault | None) -> None:
        """Send this node's ranks and fault to the first node, and receive what has arrived."""
        if self._node and (first := self._first_node()) is not None:
            document = None if fault is None else asdict(fault)
            self._send({"ranks": [asdict(one) for one in own], "fault": document}, first)
        self._receive()

    def _first_node(self) -> tuple[str, int] | None:
        """Return the first node's address; retries resolving its name, but not at every poll."""
        if self._resolved is None and self._clock() >= self._next_resolve:
            self._next_resolve = self._clock() + _RESOLVE_SECONDS
            with contextlib.suppress(OSError):
                self._resolved = (socket.gethostbyname(self._address[0]), self._address[1])
        return self._resolved

    def statuses(self) -> list[RankStatus]:
        """Return what the other nodes last reported about their ranks."""
        return [one for ranks in self._statuses.values() for one in ranks]

    def silent_nodes(self) -> dict[int, float]:
        """Return node → seconds since its last message, for those that send nothing any more.

        On the first node, one that never sent anything counts once any other node has: then
        datagrams do arrive.
        """
        now, received_at = self._clock(), dict(self._received_at)
        if self._node == 0 and received_at:
            others = range(1, self._nodes)
            received_at = {node: received_at.get(node, self._started) for node in others}
        ages = {node: now - at for node, at in received_at.items()}
        return {node: age for node, age in ages.items() if age > self._silent_after}

    def faults(self) -> dict[int, PeerFault]:
        """Return node → the fault in its last message, if it had one."""
        return dict(self._faults)

    @property
    def is_reporter(self) -> bool:
        """Whether this node sends alerts: the first one does, and one that is cut off from it."""
        return self._node == 0 or 0 not in self._received_at or 0 in self.silent_nodes()

    def _send(self, document: dict[str, object], address: tuple[str, int]) -> None:
        message = json.dumps({"job": self._job, "node": self._node, **document}).encode()
        with contextlib.suppress(OSError):
            self._socket.sendto(message, address)

    def _receive(self) -> None:
        replied: set[int] = set()
        for _ in range(4 * self._nodes):
            try:
                message, address = self._socket.recvfrom(_MAX_DATAGRAM_BYTES)
            except OSError:
                return
            node = self._parse(message)
            if self._node == 0 and node is not None and node not in replied:
                replied.add(node)
                self._send({"ranks": [], "fault": None}, address)

    def _parse(self, message: bytes) -> int | None:
        """Record a datagram of this job; returns its node, or None for any other datagram."""
        try:
            document = json.loads(message)
            node = document["node"]
            ranks = [_parse_status(one) for one in document["ranks"]]
            fault = _parse_fault(document["fault"])
            is_ours = document["job"] == self._job
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return None
        if not is_ours or not isinstance(node, int) or not 0 <= node < self._nodes:
            return None
        if node == self._node or any(one.node != node for one in ranks):
            return None
        self._received_at[node], self._statuses[node] = self._clock(), ranks
        self._faults.pop(node, None)
        if fault is not None:
            self._faults[node] = fault
        return node


def _parse_fault(document: dict[str, object] | None) -> PeerFault | None:
    if document is None:
        return None
    kind, text, seconds = (document[name] for name in ("kind", "text", "seconds"))
    if kind not in KINDS or not isinstance(text, str) or not isinstance(seconds, float):
        raise ValueError
    return PeerFault(str(kind), text[:_MAX_TEXT_LENGTH], seconds)


def _parse_status(document: dict[str, object]) -> RankStatus:
    rank, node, step, sequence = (document[name] for name in ("rank", "node", "step", "sequence"))
    phase, state, in_collective = (document[name] for name in ("phase", "state", "in_collective"))
    if not all(isinstance(one, int) for one in (rank, node, step, sequence)):
        raise ValueError
    if not (isinstance(state, str) and len(state) == 1 and in_collective in (None, True, False)):
        raise ValueError
    return RankStatus(rank, node, Phase(phase), step, sequence, state, in_collective)  # type: ignore[arg-type]


def rendezvous_address() -> tuple[str, int] | None:
    """Return the first node's address with the port next to the rendezvous's; None if unknown."""
    host, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
    if not host or not port or not port.isdigit():
        return None
    number = int(port)
    return host, number + 1 if number < 65535 else number - 1
