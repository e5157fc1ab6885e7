"""Messages between the watchdogs of a job's nodes, so that the first one can name the culprit.

Each poll sends one small datagram to a port next to the rendezvous's, and gets a reply. The first
node also sends the cause of a failure as soon as it knows it: it may end before the others poll
again. A datagram carries a code that only
the nodes of the job can compute (HMAC, RFC 2104), and its time, so that other programs in the
network can neither forge nor repeat messages. Messages only name a culprit: every watchdog decides
about its own processes alone, so a lost datagram ends nothing. If nothing arrives, each node sees
only itself.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from sm_train.entrypoints.base.digests import seal, unseal
from sm_train.entrypoints.monitoring.first_failure import KINDS, Failure
from sm_train.entrypoints.monitoring.heartbeat import Phase
from sm_train.entrypoints.monitoring.stall_detector import RankStatus
from sm_train.entrypoints.monitoring.stragglers import BusyTotals

SILENT_POLLS = 5
"""A node that has sent nothing for this many polls is silent."""

_RESOLVE_SECONDS = 10.0
"""Time between attempts to resolve the first node's name."""

_MAX_DATAGRAM_BYTES = 60_000

_MAX_TEXT_LENGTH = 1000

_MAX_AGE_NS = 3600 * 10**9
"""Age of a node's first message, at most. An older one repeats an earlier attempt of the job, whose
key is the same; clocks of nodes differ by less."""


@dataclass(frozen=True)
class PeerStall:
    """A stall while it lasts; ``seconds`` is the silence before it was detected."""

    text: str
    seconds: float = 0.0


@dataclass(frozen=True)
class NodeStatus:
    """What a node's watchdog sends: its ranks, and the likeliest cause of the job's failure.

    The first node's ``failure`` is the likeliest one of all nodes, any other node's its own.
    ``machine`` is its administrator's name for the node.
    """

    ranks: Sequence[RankStatus] = ()
    stall: PeerStall | None = None
    failure: Failure | None = None
    busy: Sequence[BusyTotals] = ()
    machine: str | None = None


@dataclass(frozen=True)
class _Received:
    """The last message of a node: when it arrived, and when it was sent, on the sender's clock.

    ``at`` is in seconds of this node's clock, ``sent_ns`` in Unix nanoseconds.
    """

    status: NodeStatus
    at: float
    sent_ns: int


class PeerLink:
    """One node's end: the first node listens and replies, the others send it their status.

    All nodes have the same ``key``; datagrams with another one are ignored.
    """

    def __init__(
        self,
        job: str,
        node: int,
        nodes: int,
        address: tuple[str, int],
        *,
        key: bytes,
        poll_seconds: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._job, self._node, self._nodes, self._address = job, node, nodes, address
        self._key, self._clock, self._silent_after = key, clock, SILENT_POLLS * poll_seconds
        self._started = clock()
        self._own = NodeStatus()
        self._received: dict[int, _Received] = {}
        # On the first node, where its replies go.
        self._addresses: dict[int, tuple[str, int]] = {}
        self._oldest_ns = time.time_ns() - _MAX_AGE_NS
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._socket.setblocking(False)
        self._resolved: tuple[str, int] | None = None
        self._next_resolve = clock()
        if node == 0:
            self._socket.bind(("", address[1]))

    def exchange(self, own: NodeStatus) -> None:
        """Send this node's status to the first node, and receive what has arrived.

        The first node sends a new failure to every node that it has heard from.
        """
        is_new_failure = own.failure is not None and own.failure != self._own.failure
        self._own = own
        if self._node and (first := self._first_node()) is not None:
            self._send(own, first)
        self._receive()
        if is_new_failure:
            for address in self._addresses.values():
                self._reply(address)

    def _first_node(self) -> tuple[str, int] | None:
        """Return the first node's address; retries resolving its name, but not at every poll."""
        if self._resolved is None and self._clock() >= self._next_resolve:
            self._next_resolve = self._clock() + _RESOLVE_SECONDS
            with contextlib.suppress(OSError):
                self._resolved = (socket.gethostbyname(self._address[0]), self._address[1])
        return self._resolved

    def statuses(self) -> list[RankStatus]:
        """Return what the other nodes last reported about their ranks."""
        return [rank for status in self._latest().values() for rank in status.ranks]

    def busy_totals(self) -> list[BusyTotals]:
        """Return the busy times of the other nodes' ranks."""
        return [busy_rank for status in self._latest().values() for busy_rank in status.busy]

    def machines(self) -> dict[int, str]:
        """Return node → the name of its machine, of nodes that are silent now, too."""
        statuses = {**self._latest(), self._node: self._own}.items()
        return {node: status.machine for node, status in statuses if status.machine is not None}

    def stalls(self) -> dict[int, PeerStall]:
        """Return node → the stall in its last message, if it had one."""
        statuses = self._latest().items()
        return {node: status.stall for node, status in statuses if status.stall is not None}

    def failures(self) -> list[Failure]:
        """Return the failures in the other nodes' last messages."""
        statuses = self._latest().values()
        return [status.failure for status in statuses if status.failure is not None]

    def _latest(self) -> dict[int, NodeStatus]:
        """Return node → its last status."""
        return {node: received.status for node, received in self._received.items()}

    def silent_nodes(self) -> dict[int, float]:
        """Return node → seconds since its last message, for those that send nothing any more.

        On the first node, one that never sent anything counts once any other node has: then
        datagrams do arrive.
        """
        now = self._clock()
        received_at = {node: received.at for node, received in self._received.items()}
        if self._node == 0 and received_at:
            others = range(1, self._nodes)
            received_at = {node: received_at.get(node, self._started) for node in others}
        ages = {node: now - at for node, at in received_at.items()}
        return {node: age for node, age in ages.items() if age > self._silent_after}

    def lost_nodes(self) -> dict[int, float]:
        """Return node → seconds since its last message, for those that ended without a reason.

        A node that failed says so in its last message, and one that finishes is in its last phase.
        """
        lost, statuses = {}, self._latest()
        for node, age in self.silent_nodes().items():
            last = statuses.get(node)
            if last is None or last.failure is not None:
                continue
            if not last.ranks or any(rank.phase is not Phase.FINISH for rank in last.ranks):
                lost[node] = age
        return lost

    @property
    def is_reporter(self) -> bool:
        """Whether this node sends alerts: the first one does, and one that is cut off from it."""
        return self._node == 0 or 0 not in self._received or 0 in self.silent_nodes()

    def _reply(self, address: tuple[str, int]) -> None:
        """Send what other nodes need of the first one's status."""
        own = self._own
        self._send(NodeStatus(failure=own.failure, machine=own.machine), address)

    def _send(self, status: NodeStatus, address: tuple[str, int]) -> None:
        own = {"job": self._job, "node": self._node, "sent_ns": time.time_ns()}
        with contextlib.suppress(OSError):
            self._socket.sendto(seal(json.dumps(own | asdict(status)).encode(), self._key), address)

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
                self._addresses[node] = address
                self._reply(address)

    def _parse(self, message: bytes) -> int | None:
        """Record a datagram of this job; returns its node, or None for any other datagram."""
        content = unseal(message, self._key)
        if content is None:
            return None
        try:
            document = json.loads(content)
            node, is_ours = document["node"], document["job"] == self._job
            sent_ns = int(document["sent_ns"])
            status = _parse_node_status(document)
        except (ValueError, KeyError, TypeError, AttributeError, ArithmeticError, RecursionError):
            return None
        if not is_ours or not isinstance(node, int) or not 0 <= node < self._nodes:
            return None
        nodes = {rank.node for rank in status.ranks} | {busy_rank.node for busy_rank in status.busy}
        if node == self._node or nodes - {node}:
            return None
        if self._node and node:
            return None  # a repeated one: only the first node sends to the others
        last = self._received.get(node)
        if sent_ns <= (self._oldest_ns if last is None else last.sent_ns):
            return None  # a repeated datagram, or one that a later one has overtaken
        self._received[node] = _Received(status, self._clock(), sent_ns)
        return node


def _parse_node_status(document: Mapping[str, Any]) -> NodeStatus:
    return NodeStatus(
        tuple(_parse_status(entry) for entry in document["ranks"]),
        _parse_stall(document["stall"]),
        _parse_failure(document["failure"]),
        tuple(_parse_busy(entry) for entry in document["busy"]),
        _parse_machine(document.get("machine")),
    )


def _parse_machine(name: object) -> str | None:
    if name is not None and not isinstance(name, str):
        raise ValueError
    return name and name[:_MAX_TEXT_LENGTH]


def _parse_stall(document: Mapping[str, object] | None) -> PeerStall | None:
    if document is None:
        return None
    text, seconds = document["text"], document["seconds"]
    if not isinstance(text, str) or not isinstance(seconds, float):
        raise ValueError
    return PeerStall(text[:_MAX_TEXT_LENGTH], seconds)


def _parse_failure(document: Mapping[str, object] | None) -> Failure | None:
    if document is None:
        return None
    kind, text, node, rank = (document[name] for name in ("kind", "text", "node", "rank"))
    if kind not in KINDS or not isinstance(text, str):
        raise ValueError
    if not isinstance(node, int) or not isinstance(rank, int | None):
        raise ValueError
    return Failure(str(kind), text[:_MAX_TEXT_LENGTH], node, rank)


def _parse_busy(document: Mapping[str, object]) -> BusyTotals:
    counts = [document[name] for name in ("rank", "node", "steps")]
    seconds = [document[name] for name in ("busy_seconds", "cpu_wait_seconds")]
    if not all(isinstance(count, int) for count in counts):
        raise ValueError
    if not all(isinstance(value, float) for value in seconds):
        raise ValueError
    return BusyTotals(*counts, *seconds)  # type: ignore[arg-type]


def _parse_status(document: Mapping[str, object]) -> RankStatus:
    rank, node, step, sequence = (document[name] for name in ("rank", "node", "step", "sequence"))
    phase, state, in_collective = (document[name] for name in ("phase", "state", "in_collective"))
    if not all(isinstance(value, int) for value in (rank, node, step, sequence)):
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
