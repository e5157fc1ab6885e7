"""Chooses, from all processes that failed or died, the one that ended the job. Pure.

When one process is killed, the others fail a moment later: their collective loses its connection,
and the launcher sends them SIGTERM. The first failure that is seen is therefore rarely the cause.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

SETTLE_SECONDS = 2.0
"""Time from the first failure to the alert: a death on another node is known after one poll."""

LOST_NODE_SECONDS = 8.0
"""The same, if only consequences are known: a lost node is known after several polls without a
message."""

KINDS = ("killed", "died", "error", "lost", "aborted", "disconnected", "terminated")
"""How a process can fail, the likeliest cause first.

========================  =====================================================================
``killed``                a signal such as SIGKILL or SIGSEGV, or an exit without a report
``died``                  the same, but the signal is unknown: it may have been SIGTERM
``error``                 an exception
``lost``                  the process's whole node sends nothing any more
``aborted``               SIGABRT: NCCL's watchdog ends a process whose peer is gone
``disconnected``          an exception because a peer closed its connection
``terminated``            SIGTERM: the launcher ends the others after one has failed
========================  =====================================================================
"""

CONSEQUENCES = frozenset({"aborted", "disconnected", "terminated"})
"""The kinds that most often follow from another process's failure."""

_DISCONNECTED = re.compile(
    r"(?:reset|closed) by (?:remote )?peer|broken pipe|connection (?:refused|closed|was reset)"
    r"|got 0 bytes|remote process exit|ncclRemoteError|communicator was aborted|DistNetworkError"
    r"|socket (?:closed|timeout)|timed out waiting",
    re.IGNORECASE,
)

_USUAL_REASONS = {
    signal.SIGKILL: "the kernel out of memory, or a user",
    signal.SIGSEGV: "an invalid memory access in native code",
    signal.SIGBUS: "a truncated memory-mapped file, or a full /dev/shm",
    signal.SIGABRT: "a failed check in native code",
    signal.SIGTERM: "the launcher, after another process failed",
}


@dataclass(frozen=True)
class Failure:
    """One failed process, or a lost node, whose ``rank`` is None.

    ``kind`` is one of :data:`KINDS`, ``text`` one line that names the rank or the node.
    """

    kind: str
    text: str
    node: int
    rank: int | None


def is_disconnection(error: str) -> bool:
    """Return whether an exception's text is what a process raises when a peer is gone."""
    return _DISCONNECTED.search(error) is not None


def death(exit_code: int | None, *, node: int, rank: int, where: str) -> Failure:
    """Return the failure of a process that ended without an exception.

    ``exit_code`` is as from :func:`os.waitstatus_to_exitcode`: negative for a signal, None if
    unknown. ``where`` says what the process was doing.
    """
    text = f"rank {rank} died without an error {where}"
    if exit_code is None:
        return Failure("died", f"{text}: killed, or out of memory", node, rank)
    if exit_code >= 0:
        return Failure("killed", f"{text}: exit code {exit_code}", node, rank)
    try:
        number = signal.Signals(-exit_code)
    except ValueError:
        return Failure("killed", f"{text}: signal {-exit_code}", node, rank)
    kinds = {signal.SIGTERM: "terminated", signal.SIGABRT: "aborted"}
    reason = _USUAL_REASONS.get(number)
    text += f": {number.name}{f' (usually {reason})' if reason else ''}"
    return Failure(kinds.get(number, "killed"), text, node, rank)


def exception(error: str, *, node: int, rank: int, where: str) -> Failure:
    """Return the failure of a process that ended with an exception, of which ``error`` is the text.

    Only its first line is kept.
    """
    line = (error.strip().splitlines() or [""])[0][:500]
    kind = "disconnected" if is_disconnection(error) else "error"
    return Failure(kind, f"rank {rank} failed {where}{f': {line}' if line else ''}", node, rank)


def lost_node(node: int, silent_seconds: float, consequence: Failure) -> Failure:
    """Return the failure of a node that sends nothing any more; ``consequence`` followed from it.

    The kernel of a node that is lost reports nothing: an instance that is terminated, a pod that is
    evicted, or a network that is gone.
    """
    text = f"node {node} was lost: it has sent nothing for {silent_seconds:.0f} s"
    return Failure("lost", f"{text}; then {consequence.text}", node, None)


def cause(failures: Sequence[Failure]) -> Failure:
    """Return the failure that caused the others; ``failures`` in the order in which they were seen.

    Raises:
        ValueError: ``failures`` is empty.
    """
    first_error = next((n for n, failure in enumerate(failures) if failure.kind == "error"), None)

    def order(item: tuple[int, Failure]) -> tuple[int, int]:
        number, failure = item
        kind = failure.kind
        # After an exception the launcher terminates the other processes; one of those whose signal
        # was not seen is not the cause.
        if kind == "died" and first_error is not None and first_error < number:
            kind = "terminated"
        return KINDS.index(kind), number

    return min(enumerate(failures), key=order)[1]


class FailureLog:
    """The failures that one watchdog has seen, its own node's and the other nodes'.

    ``reported`` is the last one that :meth:`take_report` returned. A consequence waits
    ``consequence_seconds`` for its cause.
    """

    def __init__(self, consequence_seconds: float = SETTLE_SECONDS) -> None:
        self._consequence_seconds = consequence_seconds
        self._failures: list[Failure] = []
        self._first_at = 0.0
        self.reported: Failure | None = None

    def add(self, failures: Iterable[Failure], now: float) -> None:
        """Add the failures that are new; ``now`` is in seconds of any clock."""
        for failure in failures:
            if failure not in self._failures:
                self._first_at = self._first_at if self._failures else now
                self._failures.append(failure)

    def has(self, node: int, rank: int) -> bool:
        """Return whether the failure of this process is known."""
        return any((failure.node, failure.rank) == (node, rank) for failure in self._failures)

    def likeliest(self, node: int | None = None) -> Failure | None:
        """Return the likeliest cause, of one node or of all; None without a failure."""
        failures = [failure for failure in self._failures if node in (None, failure.node)]
        return cause(failures) if failures else None

    def is_settled(self, now: float) -> bool:
        """Return whether the failures have had time to be seen, in this node and by the others."""
        found = self.likeliest()
        if found is None:
            return False
        waits = self._consequence_seconds if found.kind in CONSEQUENCES else SETTLE_SECONDS
        return now - self._first_at >= waits

    def take_report(self, now: float, *, final: bool) -> Failure | None:
        """Return the failure to report, once; None if there is nothing new to report.

        A killed process is the cause for certain. Any other failure waits for those that may still
        be seen, unless this is the ``final`` call. A likelier cause that is seen later is reported
        as well.
        """
        found = self.likeliest()
        if found is None:
            return None
        if not final and not self.is_settled(now) and found.kind != KINDS[0]:
            return None
        if self.reported is not None and KINDS.index(found.kind) >= KINDS.index(self.reported.kind):
            return None
        self.reported = found
        return found
