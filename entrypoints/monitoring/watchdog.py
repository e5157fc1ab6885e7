"""The process that watches a node's training processes and reports when they cannot.

It imports no PyTorch, takes part in no collective and holds no lock of theirs. It polls once a
second, ends with the process that started it, and kills the job only if ``heartbeat.on_stall`` is
``kill``.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from sm_train.entrypoints.common import procfs
from sm_train.entrypoints.common.digests import message_key
from sm_train.entrypoints.common.events import EventLog
from sm_train.entrypoints.common.job_config import JobConfig, read_job_config
from sm_train.entrypoints.common.node_description import uploads_checkpoints
from sm_train.entrypoints.common.sagemaker_paths import ResourceConfig, SageMakerPaths
from sm_train.entrypoints.monitoring import stall_report
from sm_train.entrypoints.monitoring.alert_messages import AlertFormatter
from sm_train.entrypoints.monitoring.alert_sinks import AlertDispatcher
from sm_train.entrypoints.monitoring.alerts import Alert
from sm_train.entrypoints.monitoring.exit_watcher import ExitWatcher
from sm_train.entrypoints.monitoring.first_failure import (
    CONSEQUENCES,
    LOST_NODE_SECONDS,
    SETTLE_SECONDS,
    Failure,
    FailureLog,
    death,
    exception,
    lost_node,
)
from sm_train.entrypoints.monitoring.heartbeat import (
    EMPTY_HISTOGRAM,
    DurationHistogram,
    ExitState,
    HeartbeatReader,
    HeartbeatSample,
    Phase,
    error_file,
    node_event_file,
    open_readers,
)
from sm_train.entrypoints.monitoring.node_event import LastNodeEvent, NodeReport
from sm_train.entrypoints.monitoring.peers import (
    NodeStatus,
    PeerLink,
    PeerStall,
    rendezvous_address,
)
from sm_train.entrypoints.monitoring.stall_detector import (
    MIN_OBSERVATIONS,
    Culprit,
    RankStatus,
    StallDetector,
    TimeoutBounds,
    find_culprit,
)
from sm_train.entrypoints.monitoring.storage_report import STORAGE_CHECK_SECONDS, StorageReport
from sm_train.entrypoints.monitoring.straggler_report import StragglerReport
from sm_train.entrypoints.monitoring.stragglers import BusyTotals
from sm_train.entrypoints.monitoring.timeouts import NonBlockingStdout, call_with_timeout

POLL_SECONDS, LEARN_SECONDS = 1.0, 10.0
REPORT_TIMEOUT = 40.0
"""Longest wait for a stall report, in seconds."""

LAST_ALERT_TIMEOUT = 20.0
"""Longest wait for alerts to arrive before the job is killed, in seconds."""

PEER_DETECTION_SECONDS = 10.0
"""Before a node kills its own processes, the others get this long to detect the stall as well."""

_DISK_TIMEOUT = 5.0
_SETTLE_POLL_SECONDS = 0.1


@dataclass(frozen=True)
class NodeInfo:
    """This node's number, the job's number of nodes, and the processes on this node."""

    node: int
    nodes: int
    processes: int


@dataclass(frozen=True)
class StallState:
    """A stall that lasts: ``since`` (monotonic seconds), and each rank's sequence number then.

    ``alert`` is None if another node sends it.
    """

    since: float
    sequences: Mapping[int, int]
    alert: Alert | None = None


class Watchdog:
    """Watches one node; call :meth:`poll` at regular intervals."""

    def __init__(
        self,
        config: JobConfig,
        paths: SageMakerPaths,
        info: NodeInfo,
        heartbeats: Path,
        *,
        events: EventLog,
        dispatcher: AlertDispatcher,
        peers: PeerLink | None,
        exit_codes: Mapping[int, int | None] | None = None,
        uploads: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Create a watchdog; ``exit_codes`` maps pids of ended processes to exit codes.

        ``uploads`` is whether the node's checkpoint folder is copied to storage.
        """
        heartbeat = config.heartbeat
        self._heartbeat_config, self._paths, self._info = heartbeat, paths, info
        self._heartbeats, self._events, self._dispatcher = heartbeats, events, dispatcher
        self._peers, self._clock = peers, clock
        self._exit_codes = exit_codes if exit_codes is not None else {}
        self._formatter = AlertFormatter(config, info.nodes, paths.checkpoints, uploads)
        self._storage: StorageReport | None = None
        if uploads and config.checkpoint.save:
            self._storage = StorageReport(
                config,
                paths.checkpoints,
                info.node,
                events=events,
                dispatcher=dispatcher,
                formatter=self._formatter,
            )
        self._stragglers = StragglerReport(events, dispatcher, self._formatter)
        self._report = NodeReport(events, info.node)
        max_gap = max(5.0, 5 * poll_seconds(config))
        bounds = TimeoutBounds(heartbeat.min_timeout, heartbeat.max_timeout)
        self._detector = StallDetector(bounds, max_gap=max_gap)
        self._readers: list[HeartbeatReader] = []
        now = clock()
        # When each periodic task runs next.
        self._due = {
            "learn": now,
            "heartbeat": now + heartbeat.interval,
            "measure": now,
            "remind": now,
            "storage": now,
        }
        self._stall: StallState | None = None
        self._own_stall: PeerStall | None = None
        self._peer_stall_since: float | None = None
        # Only other nodes' silence takes longer to notice.
        self._consequence_seconds = LOST_NODE_SECONDS if peers is not None else SETTLE_SECONDS
        self._failures = FailureLog(self._consequence_seconds)
        self._unsent_failure: Failure | None = None
        self._killed = False

    @property
    def pids(self) -> list[int]:
        """The processes that are watched."""
        return [sample.pid for sample in self._samples()]

    # ------------------------------------------------------------------ one poll

    def poll(self) -> None:
        """Read every process's heartbeat once and run the tasks that are due."""
        now = self._clock()
        samples = self._samples()
        if not samples:
            return
        if self._is_due("learn", now, min(LEARN_SECONDS, self._heartbeat_config.min_timeout)):
            durations = {phase: self._durations(phase) for phase in MIN_OBSERVATIONS}
            self._detector.learn(durations, len(self._readers))
        overdue = self._detector.overdue(samples, now)
        self._check_exits(samples, now)
        if self._peers is not None:
            self._exchange(self._peers, self._statuses(samples))
            self._report_peer_stalls(samples, self._peers, now)
        self._report_failure(now)
        self._compare_ranks(samples, now)
        if self._stall is None:
            if overdue:
                self._begin_stall(samples, overdue[0], now)
        elif not overdue and self._has_progressed(samples, self._stall):
            self._end_stall(samples, self._stall, now)
        elif self._stall.alert is not None and self._is_due("remind", now, LEARN_SECONDS):
            # The dispatcher's rate limit decides whether it is time for another alert.
            silent = now - self._stall.since
            burned = self._formatter.burned_usd(silent)
            self._dispatcher.send(
                replace(self._stall.alert, silent_seconds=silent, burned_usd=burned)
            )
        if self._storage is not None and self._is_due("storage", now, STORAGE_CHECK_SECONDS):
            self._storage.check(now)
        if self._is_due("heartbeat", now, self._heartbeat_config.interval):
            self._log_heartbeat(samples, now)
        if self._is_due("measure", now, self._heartbeat_config.metrics_interval):
            self._report.start_measuring(self._readers, now, self._stragglers.fields())

    def _samples(self) -> list[HeartbeatSample]:
        if len(self._readers) < self._info.processes:
            self._readers = list(open_readers(self._heartbeats))
        return [reader.sample() for reader in self._readers]

    def _is_due(self, task: str, now: float, interval: float) -> bool:
        if now < self._due[task]:
            return False
        self._due[task] = now + interval
        return True

    def _durations(self, phase: Phase) -> DurationHistogram:
        """Return a phase's durations on all ranks of this node.

        Phases take about equally long on all ranks, so pooling their durations sets the timeouts
        sooner.
        """
        return sum((reader.durations(phase) for reader in self._readers), EMPTY_HISTOGRAM)

    def _statuses(
        self,
        samples: Sequence[HeartbeatSample],
        in_collective: Mapping[int, bool | None] | None = None,
    ) -> list[RankStatus]:
        return [
            RankStatus(
                sample.rank,
                self._info.node,
                sample.phase,
                sample.step,
                sample.sequence,
                # The kernel's state of a process that has reported its end no longer matters.
                procfs.state(sample.pid) if sample.exit_state is ExitState.RUNNING else "S",
                (in_collective or {}).get(sample.rank),
            )
            for sample in samples
        ]

    def _log_heartbeat(self, samples: Sequence[HeartbeatSample], now: float) -> None:
        silences = self._detector.silences(samples, now)
        running = [
            sample for sample in samples if sample.exit_state is ExitState.RUNNING
        ] or samples
        worst = max(running, key=lambda status: silences[status.rank])
        step = min(sample.step for sample in samples)
        self._events.write(
            "heartbeat",
            f"alive at step {step}",
            step=step,
            seconds_since_step=round(silences[worst.rank], 1),
            phase=worst.phase.name.lower(),
            limit_seconds=round(self._detector.timeouts[worst.phase], 1),
            worst_rank=worst.rank,
            processes=len(samples),
        )

    def _busy_totals(self) -> list[BusyTotals]:
        return [
            BusyTotals(reader.sample().rank, self._info.node, *reader.busy())
            for reader in self._readers
        ]

    def _compare_ranks(self, samples: Sequence[HeartbeatSample], now: float) -> None:
        """Look for stragglers on the first node, which receives the busy times of all nodes."""
        if self._info.node:
            return
        totals = self._busy_totals()
        if self._peers is not None:
            totals += self._peers.busy_totals()
        self._stragglers.add(totals, now, step=max(sample.step for sample in samples))

    # ------------------------------------------------------------------ stalls

    def _begin_stall(
        self, samples: Sequence[HeartbeatSample], first: HeartbeatSample, now: float
    ) -> None:
        """Write a stall report, send an alert, and kill the job if configured."""
        timeout, silent = self._detector.timeouts[first.phase], now - first.since
        symptom = (
            f"no heartbeat for {silent:.3g} s in {first.phase.label} after step {first.step} "
            f"(timeout {timeout:.3g} s, {self._usual_duration(first.phase)})"
        )
        if (missing := self._info.processes - len(samples)) > 0:
            symptom += f"; {missing} of {self._info.processes} processes have not started"
        self._stall = StallState(first.since, {sample.rank: sample.sequence for sample in samples})
        self._own_stall = PeerStall(symptom, silent)
        report = call_with_timeout(
            REPORT_TIMEOUT, lambda: self._write_report(samples, symptom), None
        )
        # Writing the report took a while in which the training processes could run.
        self._detector.resume(self._clock())
        culprit = self._find_culprit(samples, report.in_collective if report else {})
        if self._is_reporter:
            alert = self._formatter.stall(symptom, culprit, silent)
            self._stall = replace(self._stall, alert=alert)
            self._dispatcher.send(alert)
        kill = self._heartbeat_config.on_stall == "kill"
        self._events.warn(
            "stall",
            f"{symptom}; {culprit.reason}",
            step=first.step,
            phase=first.phase.name.lower(),
            silent_seconds=round(silent, 1),
            limit_seconds=round(timeout, 1),
            blamed_rank=culprit.rank,
            blamed_node=culprit.node,
            reason=culprit.reason,
            evidence=report and report.folder.relative_to(self._paths.checkpoints).as_posix(),
            files=list(report.files) if report else [],
            ends=kill,
        )
        if kill:
            self._kill_job(samples, f"stall: {symptom}; {culprit.reason}")

    @property
    def _is_reporter(self) -> bool:
        if self._peers is not None:
            return self._peers.is_reporter
        return self._info.node == 0

    def _exchange(self, peers: PeerLink, ranks: Sequence[RankStatus]) -> None:
        # The first node's replies carry the likeliest failure of all nodes.
        likeliest = self._failures.likeliest(self._info.node if self._info.node else None)
        peers.exchange(NodeStatus(ranks, self._own_stall, likeliest, self._busy_totals()))
        self._failures.add(peers.failures(), self._clock())
        found = self._failures.likeliest()
        if found is None or found.kind not in CONSEQUENCES:
            return
        for node, silent in peers.lost_nodes().items():
            failure = lost_node(node, silent, found)
            self._events.warn("node-lost", failure.text, blamed_node=node)
            self._failures.add([failure], self._clock())

    def _report_peer_stalls(
        self, samples: Sequence[HeartbeatSample], peers: PeerLink, now: float
    ) -> None:
        """Send alerts for the other nodes' stalls; a stall of several nodes is one alert."""
        if self._info.node:
            return
        stall: PeerStall | None = None
        for node, reported in peers.stalls().items():
            stall = replace(reported, text=f"node {node}: {reported.text}")
        if stall is not None and self._peer_stall_since is None and self._stall is None:
            self._peer_stall_since = now - stall.seconds
            culprit = self._find_culprit(samples, {})
            self._dispatcher.send(self._formatter.stall(stall.text, culprit, stall.seconds))
        elif stall is None and self._peer_stall_since is not None and self._stall is None:
            silent, self._peer_stall_since = now - self._peer_stall_since, None
            self._dispatcher.send(self._formatter.resumed("the other nodes resumed", silent))

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
            self._paths.checkpoints,
            samples,
            node=self._info.node,
            heartbeats=self._heartbeats,
            timestamp=datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ"),
            summary=f"{symptom}\n",
        )

    def _find_culprit(
        self, samples: Sequence[HeartbeatSample], in_collective: Mapping[int, bool | None]
    ) -> Culprit:
        ranks, silent = self._statuses(samples, in_collective), dict[int, float]()
        if self._peers is not None:
            self._exchange(self._peers, ranks)
            ranks, silent = ranks + self._peers.statuses(), self._peers.silent_nodes()
        return find_culprit(ranks, silent)

    def _has_progressed(self, samples: Sequence[HeartbeatSample], stall: StallState) -> bool:
        return all(
            sample.sequence != stall.sequences.get(sample.rank)
            or sample.exit_state is not ExitState.RUNNING
            for sample in samples
        )

    def _end_stall(self, samples: Sequence[HeartbeatSample], stall: StallState, now: float) -> None:
        self._stall = self._own_stall = None
        silent, step = now - stall.since, max(sample.step for sample in samples)
        message = f"training resumed at step {step} after {silent:.3g} s of silence"
        self._dispatcher.send(self._formatter.resumed(message, silent))
        self._events.warn("stall-resolved", message, step=step, silent_seconds=round(silent, 1))

    def _kill_job(self, samples: Sequence[HeartbeatSample], cause: str) -> None:
        """Kill this node's processes; the launcher then fails the job, which can be resumed.

        SIGKILL, because a process that hangs runs no Python signal handler.
        """
        self._events.write("error", f"killing the job: {cause}", code="stall", message=cause)
        call_with_timeout(_DISK_TIMEOUT, lambda: self._paths.write_failure(f"{cause}\n"), None)
        if self._info.nodes > 1:
            time.sleep(PEER_DETECTION_SECONDS)
        self._dispatcher.finish(LAST_ALERT_TIMEOUT)
        self._killed = True
        for sample in samples:
            if sample.exit_state is ExitState.RUNNING:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(sample.pid, signal.SIGKILL)

    # ------------------------------------------------------------------ failures

    def _check_exits(self, samples: Sequence[HeartbeatSample], now: float) -> None:
        """Find the processes that failed, or died without reporting an end."""
        for sample, reader in zip(samples, self._readers, strict=False):
            if self._killed or self._failures.has(self._info.node, sample.rank):
                continue
            dead = sample.exit_state is ExitState.RUNNING and procfs.state(sample.pid) in "ZX"
            # It may have reported its end between the two reads.
            if dead and reader.sample().exit_state is ExitState.RUNNING:
                found = self._death(sample)
                fields = {"step": sample.step, "rank_died": sample.rank, "death": found.kind}
                self._events.warn("rank-died", found.text, **fields)
            elif sample.exit_state is ExitState.FAILED:
                found = self._error(sample)
            else:
                continue
            if self._info.nodes > 1:
                found = replace(found, text=f"node {found.node}: {found.text}")
            self._failures.add([found], now)

    def _report_failure(self, now: float, *, final: bool = False) -> None:
        """Write the failure that caused the others as the job's, and send an alert for it.

        The first node's alert names every node's failure. Another node sends one only if it does
        not hear from the first node; it waits for that before it decides.
        """
        found = self._failures.take_report(now, final=final)
        if found is not None:
            call_with_timeout(
                _DISK_TIMEOUT, lambda: self._paths.write_failure(f"{found.text}\n"), None
            )
            self._unsent_failure = found
        may_decide = final or not self._info.node or self._failures.is_settled(now)
        if self._unsent_failure is not None and may_decide:
            if self._is_reporter:
                self._dispatcher.send(self._formatter.failure(self._unsent_failure))
            self._unsent_failure = None

    def _death(self, sample: HeartbeatSample) -> Failure:
        exit_code = self._exit_codes.get(sample.pid)
        return death(exit_code, node=self._info.node, rank=sample.rank, where=_where(sample))

    def _error(self, sample: HeartbeatSample) -> Failure:
        path = error_file(self._heartbeats, sample.local_rank)
        error = call_with_timeout(_DISK_TIMEOUT, lambda: path.read_text(errors="replace"), "")
        return exception(error, node=self._info.node, rank=sample.rank, where=_where(sample))

    def finish(self) -> None:
        """Send the last alerts, within bounded time: the process that started this one ended."""
        # Its own end may not be visible yet, nor why another process failed.
        deadline = time.monotonic() + self._consequence_seconds
        samples = self._samples()
        while not self._has_settled(samples) and time.monotonic() < deadline:
            time.sleep(_SETTLE_POLL_SECONDS)
            samples = self._samples()
        ended_well = bool(samples) and samples[0].exit_state is ExitState.DONE
        if not ended_well:
            self._report_failure(self._clock(), final=True)
        elif self._info.node == 0:
            self._dispatcher.send(self._formatter.ended(samples[0].step))
        self._dispatcher.finish(LAST_ALERT_TIMEOUT)

    def _has_settled(self, samples: Sequence[HeartbeatSample]) -> bool:
        """Poll once more for failures; return whether no other one has to be waited for."""
        now = self._clock()
        ended_well = bool(samples) and samples[0].exit_state is ExitState.DONE
        # After a success the other processes' ends no longer matter.
        self._check_exits(samples[:1] if ended_well else samples, now)
        if self._peers is not None:
            self._exchange(self._peers, self._statuses(samples))
            self._report_peer_stalls(samples, self._peers, now)
        self._report_failure(now)
        reported = self._failures.reported
        # Another node may still name the process that the connection was lost to.
        is_cause = reported is not None and reported.kind not in CONSEQUENCES
        return ended_well or self._killed or (is_cause and self._unsent_failure is None)


def _where(sample: HeartbeatSample) -> str:
    return f"in {sample.phase.label} after step {sample.step}"


def poll_seconds(config: JobConfig) -> float:
    """Return the seconds between two polls."""
    return min(POLL_SECONDS, config.heartbeat.min_timeout / 8)


def main(arguments: Sequence[str] | None = None) -> None:
    """Watch until standard input closes."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--document", type=Path, required=True)
    parser.add_argument("--stage", required=True)
    parser.add_argument("--heartbeats", type=Path, required=True)
    options = parser.parse_args(arguments)
    # The training processes handle a stop; this one keeps watching them write a checkpoint.
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    stdout = NonBlockingStdout(sys.stdout)
    try:
        config = read_job_config(options.document, options.stage)
        key = message_key(options.document)
        _watch(config, key, options.heartbeats, stdout)
    except Exception:
        traceback.print_exc()
    shutil.rmtree(options.heartbeats, ignore_errors=True)
    stdout.finish(_DISK_TIMEOUT)
    # Threads may hang in what hung the job.
    os._exit(0)


def _watch(config: JobConfig, key: bytes, heartbeats: Path, stdout: NonBlockingStdout) -> None:
    paths = SageMakerPaths.from_environment()
    resources = ResourceConfig.read(paths)
    local_world_size = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    exits = ExitWatcher()
    info = NodeInfo(resources.node_rank, len(resources.hosts), local_world_size)
    rank = int(os.environ.get("RANK", "0"))
    last_event = LastNodeEvent(node_event_file(heartbeats))
    events = EventLog(node=resources.node_rank, rank=rank, stream=stdout, subscriber=last_event)
    watchdog = Watchdog(
        config,
        paths,
        info,
        heartbeats,
        events=events,
        dispatcher=AlertDispatcher(config.alerts, events.warn),
        peers=_open_peer_link(config, info, events, key),
        exit_codes=exits.exit_codes,
        uploads=uploads_checkpoints(paths),
    )
    parent, seconds = os.getppid(), poll_seconds(config)
    # Standard input closes when the process that started this one ends.
    while not exits.wait(sys.stdin, seconds) and os.getppid() == parent:
        try:
            watchdog.poll()
            exits.watch(watchdog.pids)
        except Exception as error:
            # Whatever it is, watching continues.
            events.warn("monitor", f"a poll failed: {type(error).__name__}: {error}")
            time.sleep(POLL_SECONDS)
    watchdog.finish()
    last_event.close()


def _open_peer_link(
    config: JobConfig, info: NodeInfo, events: EventLog, key: bytes
) -> PeerLink | None:
    address = rendezvous_address()
    if info.nodes == 1 or address is None:
        return None
    job, seconds = f"{config.run}/{config.stage.name}", poll_seconds(config)
    try:
        return PeerLink(job, info.node, info.nodes, address, key=key, poll_seconds=seconds)
    except OSError as error:
        message = (
            f"this node's watchdog cannot reach the other nodes' and sees only itself: {error}"
        )
        events.warn("peer-link-unavailable", message)
        return None


if __name__ == "__main__":
    main()
