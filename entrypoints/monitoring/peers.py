"""What the machines of a job tell the first one, so that it can name the worst of all.

One small datagram a look, to a port beside the rendezvous'. It only names: every machine decides
on its own processes by itself, so neither a lost nor a forged datagram ends anything. Where
nothing arrives, each machine sees itself alone.
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
"""A machine that has not been heard of for so many looks is named as silent."""

_SEARCH_SECONDS = 10.0

_LARGEST = 60_000

KINDS = ("stall", "failure")
_LONGEST = 1000
"""Letters of a trouble."""


@dataclass(frozen=True)
class PeerFault:
    """What a machine has the first one tell people: a stall while it lasts, a failure for good.

    ``seconds`` are those of silence before it was found.
    """

    kind: str
    text: str
    seconds: float = 0.0


class PeerLink:
    """This machine's end: the first one listens and answers, the others tell it."""

    def __init__(
        self,
        job: str,
        node: int,
        nodes: int,
        address: tuple[str, int],
        *,
        look_seconds: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._job, self._node, self._nodes, self._address = job, node, nodes, address
        self._clock, self._silent_after = clock, SILENT_POLLS * look_seconds
        self._began = clock()
        self._heard: dict[int, float] = {}
        self._told: dict[int, list[RankStatus]] = {}
        self._troubles: dict[int, PeerFault] = {}
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._socket.setblocking(False)
        self._found: tuple[str, int] | None = None
        self._next_search = clock()
        if node == 0:
            self._socket.bind(("", address[1]))

    def exchange(self, own: Sequence[RankStatus], trouble: PeerFault | None) -> None:
        """Tell what this machine sees, or hear what the others do."""
        if self._node and (first := self._first()) is not None:
            told = None if trouble is None else asdict(trouble)
            self._send({"seen": [asdict(one) for one in own], "trouble": told}, first)
        self._receive()

    def _first(self) -> tuple[str, int] | None:
        """Where the first machine is; a name is looked up once, and not too often until then."""
        if self._found is None and self._clock() >= self._next_search:
            self._next_search = self._clock() + _SEARCH_SECONDS
            with contextlib.suppress(OSError):
                self._found = (socket.gethostbyname(self._address[0]), self._address[1])
        return self._found

    def others(self) -> list[RankStatus]:
        """What the other machines last told of their processes."""
        return [one for seen in self._told.values() for one in seen]

    def silent(self) -> dict[int, float]:
        """Machines that are not heard, or no more → seconds since.

        On the first one: one that was never heard counts where any other was, for datagrams
        arrive there.
        """
        now, heard = self._clock(), dict(self._heard)
        if self._node == 0 and heard:
            heard = {node: heard.get(node, self._began) for node in range(1, self._nodes)}
        ages = {node: now - at for node, at in heard.items()}
        return {node: age for node, age in ages.items() if age > self._silent_after}

    def troubles(self) -> dict[int, PeerFault]:
        """Machine → what it last said of trouble, where it did."""
        return dict(self._troubles)

    @property
    def speaks(self) -> bool:
        """Whether alerts are this machine's to send: the first one's, or of one cut off from it."""
        return self._node == 0 or 0 not in self._heard or 0 in self.silent()

    def _send(self, document: dict[str, object], address: tuple[str, int]) -> None:
        message = json.dumps({"job": self._job, "node": self._node, **document}).encode()
        with contextlib.suppress(OSError):
            self._socket.sendto(message, address)

    def _receive(self) -> None:
        answered: set[int] = set()
        for _ in range(4 * self._nodes):
            try:
                message, address = self._socket.recvfrom(_LARGEST)
            except OSError:
                return
            node = self._take(message)
            if self._node == 0 and node is not None and node not in answered:
                answered.add(node)
                self._send({"seen": [], "trouble": None}, address)

    def _take(self, message: bytes) -> int | None:
        """The machine that a datagram of this job comes from; anything else is left alone."""
        try:
            document = json.loads(message)
            node = document["node"]
            seen = [_seen(one) for one in document["seen"]]
            trouble = _trouble(document["trouble"])
            ours = document["job"] == self._job
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return None
        if not ours or not isinstance(node, int) or not 0 <= node < self._nodes:
            return None
        if node == self._node or any(one.node != node for one in seen):
            return None
        self._heard[node], self._told[node] = self._clock(), seen
        self._troubles.pop(node, None)
        if trouble is not None:
            self._troubles[node] = trouble
        return node


def _trouble(document: dict[str, object] | None) -> PeerFault | None:
    if document is None:
        return None
    kind, text, seconds = (document[name] for name in ("kind", "text", "seconds"))
    if kind not in KINDS or not isinstance(text, str) or not isinstance(seconds, float):
        raise ValueError
    return PeerFault(str(kind), text[:_LONGEST], seconds)


def _seen(document: dict[str, object]) -> RankStatus:
    rank, node, step, marks = (document[name] for name in ("rank", "node", "step", "marks"))
    section, state, waits = (document[name] for name in ("section", "state", "waits"))
    if not all(isinstance(one, int) for one in (rank, node, step, marks)):
        raise ValueError
    if not (isinstance(state, str) and len(state) == 1 and waits in (None, True, False)):
        raise ValueError
    return RankStatus(rank, node, Phase(section), step, marks, state, waits)  # type: ignore[arg-type]


def rendezvous_address() -> tuple[str, int] | None:
    """The first machine's address, with the port beside that of the rendezvous."""
    address, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
    if not address or not port or not port.isdigit():
        return None
    number = int(port)
    return address, number + 1 if number < 65535 else number - 1
