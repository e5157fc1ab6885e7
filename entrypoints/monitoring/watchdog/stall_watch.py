"""Finds, reports and ends the stalls of a job: its own node's, and those of the other nodes."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime

from sm_train.entrypoints.monitoring import stall_report
from sm_train.entrypoints.monitoring.alerts import Alert
from sm_train.entrypoints.monitoring.first_failure import FailureLog
from sm_train.entrypoints.monitoring.heartbeat import ExitState, HeartbeatSample, Phase
from sm_train.entrypoints.monitoring.peers import PeerStall
from sm_train.entrypoints.monitoring.stall_detector import (
    MIN_OBSERVATIONS,
    Culprit,
    StallDetector,
    find_culprit,
)
from sm_train.entrypoints.monitoring.timeouts import call_with_timeout
from sm_train.entrypoints.monitoring.watchdog.watched_node import DISK_TIMEOUT, WatchedNode

LEARN_SECONDS = 10.0
REPORT_TIMEOUT = 40.0
"""Longest wait for a stall report, in seconds."""

LAST_ALERT_TIMEOUT = 20.0
"""Longest wait for alerts to arrive before the job is killed, in seconds."""

PEER_DETECTION_SECONDS = 10.0
"""A node waits this long before it kills its processes, so that others detect the stall, too."""


@dataclass(frozen=True)
class StallState:
    """A stall that lasts: ``since`` (monotonic seconds), and each rank's sequence number then.

    ``alert`` is None if another node sends it.
    """

    since: float
    sequences: Mapping[int, int]
    alert: Alert | None = None


class StallWatch:
    """The stalls that one node sees.

    ``own`` is this node's stall as the other nodes get it, ``killed`` whether it has ended the job.
    A stall of the node lasts from the first overdue rank until every rank has progressed; during it
    the other nodes' stalls are part of it. ``failures`` are those that the exchange adds to.
    """

    def __init__(self, node: WatchedNode, detector: StallDetector, failures: FailureLog) -> None:
        self._node, self._detector, self._failures = node, detector, failures
        self._stall: StallState | None = None
        # rank → sequence number at which it was overdue at the last poll
        self._suspects: dict[int, int] = {}
        self.own: PeerStall | None = None
        self._peers_since: float | None = None
        self._learn_at = self._remind_at = node.clock()
        self.killed = False

    def learn(self, now: float) -> None:
        """Derive the timeouts from the durations so far, every few seconds."""
        if now >= self._learn_at:
            least = self._node.config.heartbeat.min_timeout
            self._learn_at = now + min(LEARN_SECONDS, least)
            ranks = self._node.ranks
            durations = {phase: ranks.durations(phase) for phase in MIN_OBSERVATIONS}
            self._detector.learn(durations, len(ranks.readers))

    def check(
        self, samples: Sequence[HeartbeatSample], overdue: Sequence[HeartbeatSample], now: float
    ) -> None:
        """Begin, continue or end a stall; ``overdue`` are the ranks beyond their timeouts.

        A stall begins once two polls in succession find a rank overdue in the same phase.
        """
        before, self._suspects = self._suspects, {rank.rank: rank.sequence for rank in overdue}
        if self._stall is None:
            confirmed = [rank for rank in overdue if before.get(rank.rank) == rank.sequence]
            if confirmed:
                self._begin(samples, confirmed[0], now)
        elif not overdue and _has_progressed(samples, self._stall):
            self._end(samples, self._stall, now)
        elif self._stall.alert is not None and now >= self._remind_at:
            self._remind_at = now + LEARN_SECONDS
            # The dispatcher's rate limit decides whether it is time for another alert.
            silent = now - self._stall.since
            burned = self._node.formatter.burned_usd(silent)
            self._node.dispatcher.send(
                replace(self._stall.alert, silent_seconds=silent, burned_usd=burned)
            )

    def _begin(
        self, samples: Sequence[HeartbeatSample], first: HeartbeatSample, now: float
    ) -> None:
        """Write a stall report, send an alert, and kill the job if configured."""
        node, timeout = self._node, self._detector.timeout(first)
        silent = now - first.since
        symptom = (
            f"no heartbeat for {silent:.3g} s in {first.activity} after step {first.step} "
            f"(timeout {timeout:.3g} s, {self._usual_duration(first.phase)})"
        )
        if (missing := node.info.processes - len(node.ranks.readers)) > 0:
            symptom += f"; {missing} of {node.info.processes} processes have not started"
        if unread := sorted(node.ranks.unread(samples)):
            symptom += f"; no valid heartbeat record of ranks {', '.join(map(str, unread))}"
        self._stall = StallState(first.since, {sample.rank: sample.sequence for sample in samples})
        self.own = PeerStall(symptom, silent)
        report = call_with_timeout(
            REPORT_TIMEOUT, lambda: self._write_report(samples, symptom), None
        )
        # Writing the report took a while in which the training processes could run.
        self._detector.resume(node.clock())
        culprit = self._find_culprit(samples, report.in_collective if report else {})
        if node.is_reporter:
            alert = node.formatter.stall(symptom, culprit, silent)
            self._stall = replace(self._stall, alert=alert)
            node.dispatcher.send(alert)
        kill = node.config.heartbeat.on_stall == "kill"
        node.events.warn(
            "stall",
            f"{symptom}; {culprit.reason}",
            step=first.step,
            phase=first.phase.name.lower(),
            silent_seconds=round(silent, 1),
            limit_seconds=round(timeout, 1),
            blamed_rank=culprit.rank,
            blamed_node=culprit.node,
            reason=culprit.reason,
            evidence=report and report.folder.relative_to(node.paths.checkpoints).as_posix(),
            files=list(report.files) if report else [],
            ends=kill,
        )
        if kill:
            self._kill_job(f"stall: {symptom}; {culprit.reason}")

    def _end(self, samples: Sequence[HeartbeatSample], stall: StallState, now: float) -> None:
        self._stall = self.own = None
        silent, step = now - stall.since, max(sample.step for sample in samples)
        message = f"training resumed at step {step} after {silent:.3g} s of silence"
        self._node.dispatcher.send(self._node.formatter.resumed(message, silent))
        fields = {"step": step, "silent_seconds": round(silent, 1)}
        self._node.events.warn("stall-resolved", message, **fields)

    def report_peers(self, samples: Sequence[HeartbeatSample], now: float) -> None:
        """Send alerts for the other nodes' stalls; a stall of several nodes is one alert."""
        node, stall = self._node, None
        if node.info.node or node.peers is None:
            return
        for number, reported in node.peers.stalls().items():
            stall = replace(reported, text=f"node {number}: {reported.text}")
        if stall is not None and self._peers_since is None and self._stall is None:
            self._peers_since = now - stall.seconds
            culprit = self._find_culprit(samples, {})
            node.dispatcher.send(node.formatter.stall(stall.text, culprit, stall.seconds))
        elif stall is None and self._peers_since is not None and self._stall is None:
            silent, self._peers_since = now - self._peers_since, None
            node.dispatcher.send(node.formatter.resumed("the other nodes resumed", silent))

    def _usual_duration(self, phase: Phase) -> str:
        durations = self._detector.durations(phase)
        median, longest = durations.quantile(0.5), durations.longest
        if median is None or longest is None:
            return "no earlier durations"
        return f"usually {median:.3g} s, at most {longest:.3g} s"

    def _write_report(
        self, samples: Sequence[HeartbeatSample], symptom: str
    ) -> stall_report.StallReport:
        return stall_report.collect(
            self._node.paths.checkpoints,
            samples,
            node=self._node.info.node,
            heartbeats=self._node.ranks.heartbeats,
            timestamp=datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ"),
            summary=f"{symptom}\n",
        )

    def _find_culprit(
        self, samples: Sequence[HeartbeatSample], in_collective: Mapping[int, bool | None]
    ) -> Culprit:
        node, silent = self._node, dict[int, float]()
        statuses = node.ranks.statuses(samples, in_collective)
        if node.peers is not None:
            node.exchange(statuses, self.own, self._failures)
            statuses, silent = statuses + node.peers.statuses(), node.peers.silent_nodes()
        return find_culprit(statuses, silent)

    def _kill_job(self, cause: str) -> None:
        """Kill this node's processes; the launcher then fails the job, which can be resumed.

        SIGKILL, because a process that hangs runs no Python signal handler.
        """
        node = self._node
        node.events.write("error", f"killing the job: {cause}", code="stall", message=cause)
        call_with_timeout(DISK_TIMEOUT, lambda: node.paths.write_failure(f"{cause}\n"), None)
        if node.info.nodes > 1:
            time.sleep(PEER_DETECTION_SECONDS)
        node.dispatcher.finish(LAST_ALERT_TIMEOUT)
        self.killed = True
        for reader in node.ranks.readers:
            if reader.exit_state is ExitState.RUNNING:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(reader.process.pid, signal.SIGKILL)


def _has_progressed(samples: Sequence[HeartbeatSample], stall: StallState) -> bool:
    """Return whether every rank has ended or entered another phase, as far as records are valid."""
    progressed = {
        sample.rank
        for sample in samples
        if sample.sequence != stall.sequences.get(sample.rank)
        or sample.exit_state is not ExitState.RUNNING
    }
    return progressed >= stall.sequences.keys() | {sample.rank for sample in samples}
