"""Finds the processes of a node that failed or died, and reports the one that ended the job."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from sm_train.entrypoints.monitoring import procfs
from sm_train.entrypoints.monitoring.first_failure import (
    CONSEQUENCES,
    LOST_NODE_SECONDS,
    SETTLE_SECONDS,
    Failure,
    FailureLog,
    death,
    exception,
)
from sm_train.entrypoints.monitoring.heartbeat import (
    ExitState,
    HeartbeatReader,
    HeartbeatSample,
    WatchedProcess,
    error_file,
)
from sm_train.entrypoints.monitoring.timeouts import call_with_timeout
from sm_train.entrypoints.monitoring.watchdog.watched_node import DISK_TIMEOUT, WatchedNode


class FailureWatch:
    """The failures that one node knows; ``exit_codes`` maps pids of ended processes to exit codes.

    ``patience`` is how long a failure waits for its cause, in seconds. A failure is taken from
    ``failures`` once; it is unsent until this node may decide who sends the alert.
    """

    def __init__(self, node: WatchedNode, exit_codes: Mapping[int, int | None]) -> None:
        self._node, self._exit_codes = node, exit_codes
        # Only other nodes' silence takes longer to notice.
        self.patience = LOST_NODE_SECONDS if node.peers is not None else SETTLE_SECONDS
        self.failures = FailureLog(self.patience)
        self._unsent: Failure | None = None

    def check(self, readers: Sequence[HeartbeatReader], now: float) -> None:
        """Find the processes that failed, or died without reporting an end."""
        info = self._node.info
        for reader in readers:
            process, exit_state = reader.process, reader.exit_state
            if self.failures.has(info.node, process.rank):
                continue
            dead = exit_state is ExitState.RUNNING and procfs.state(process.pid) in "ZX"
            # It may have reported its end between the two reads.
            if dead and reader.exit_state is ExitState.RUNNING:
                sample = reader.sample()
                found = self._death(process, sample)
                step = None if sample is None else sample.step
                fields = {"step": step, "rank_died": process.rank, "death": found.kind}
                self._node.events.warn("rank-died", found.text, **fields)
            elif exit_state is ExitState.FAILED:
                found = self._error(process, reader.sample())
            else:
                continue
            if info.nodes > 1:
                found = replace(found, text=f"node {found.node}: {found.text}")
            self.failures.add([found], now)

    def report(self, now: float, *, final: bool = False) -> None:
        """Write the failure that caused the others as the job's, and send an alert for it.

        The first node's alert names every node's failure. Another node sends one only if it does
        not hear from the first node; it waits for that before it decides.
        """
        node = self._node
        found = self.failures.take_report(now, final=final)
        if found is not None:
            text = f"{found.text}\n"
            call_with_timeout(DISK_TIMEOUT, lambda: node.paths.write_failure(text), None)
            self._unsent = found
        may_decide = final or not node.info.node or self.failures.is_settled(now)
        if self._unsent is not None and may_decide:
            if node.is_reporter:
                node.dispatcher.send(node.formatter.failure(self._unsent))
            self._unsent = None

    @property
    def has_cause(self) -> bool:
        """Whether a failure has been reported that no other node has to explain."""
        reported = self.failures.reported
        is_cause = reported is not None and reported.kind not in CONSEQUENCES
        return is_cause and self._unsent is None

    def _death(self, process: WatchedProcess, sample: HeartbeatSample | None) -> Failure:
        exit_code = self._exit_codes.get(process.pid)
        node = self._node.info.node
        return death(exit_code, node=node, rank=process.rank, where=_where(sample))

    def _error(self, process: WatchedProcess, sample: HeartbeatSample | None) -> Failure:
        path = error_file(self._node.ranks.heartbeats, process.local_rank)
        error = call_with_timeout(DISK_TIMEOUT, lambda: path.read_text(errors="replace"), "")
        node = self._node.info.node
        return exception(error, node=node, rank=process.rank, where=_where(sample))


def _where(sample: HeartbeatSample | None) -> str:
    if sample is None:
        return "in an unknown phase: no valid heartbeat record"
    return f"in {sample.activity} after step {sample.step}"
