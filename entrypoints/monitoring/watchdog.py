"""The process that watches a node's training processes and reports when they cannot.

It imports no PyTorch, takes part in no collective and holds no lock of theirs. It polls once a
second, ends with the process that started it, and kills the job only if ``heartbeat.on_stall`` is
``kill``.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import select
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
from sm_train.entrypoints.common.events import EventLog
from sm_train.entrypoints.common.job_config import JobConfig, read_job_config
from sm_train.entrypoints.common.sagemaker_paths import ResourceConfig, SageMakerPaths
from sm_train.entrypoints.monitoring import stall_report
from sm_train.entrypoints.monitoring.alert_messages import AlertFormatter
from sm_train.entrypoints.monitoring.alert_sinks import AlertDispatcher
from sm_train.entrypoints.monitoring.alerts import Alert
from sm_train.entrypoints.monitoring.heartbeat import (
    EMPTY_HISTOGRAM,
    DurationHistogram,
    ExitState,
    HeartbeatReader,
    HeartbeatSample,
    Phase,
    open_readers,
)
from sm_train.entrypoints.monitoring.node_event import NodeReport
from sm_train.entrypoints.monitoring.peers import PeerFault, PeerLink, rendezvous_address
from sm_train.entrypoints.monitoring.stall_detector import (
    MIN_OBSERVATIONS,
    Culprit,
    RankStatus,
    StallDetector,
    TimeoutBounds,
    find_culprit,
)
from sm_train.entrypoints.monitoring.timeouts import NonBlockingStdout, call_with_timeout

POLL_SECONDS, LEARN_SECONDS = 1.0, 10.0
REPORT_TIMEOUT = 40.0
"""Longest wait for a stall report, in seconds."""

LAST_ALERT_TIMEOUT = 20.0
"""Longest wait for alerts to arrive before the job is killed, in seconds."""

PEER_DETECTION_SECONDS = 10.0
"""Before a node kills its own processes, the others get this long to detect the stall as well."""

_DISK_TIMEOUT = 5.0


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
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        heartbeat = config.heartbeat
        self._heartbeat_config, self._paths, self._info = heartbeat, paths, info
        self._heartbeats, self._events, self._dispatcher = heartbeats, events, dispatcher
        self._peers, self._clock = peers, clock
        self._formatter = AlertFormatter(config, info.nodes, paths.checkpoints)
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
        }
        self._stall: StallState | None = None
        self._fault: PeerFault | None = None
        self._peer_stall_since: float | None = None
        self._reported_ranks: set[int] = set()
        self._failed_nodes: set[int] = set()
        self._killed = False

    # ------------------------------------------------------------------ one poll

    def poll(self) -> None:
        """Read every process's heartbeat once and run the tasks that are due."""
        now = self._clock()
        samples = self._samples()
        if not samples:
            return
        if self._is_due("learn", now, min(LEARN_SECONDS, self._heartbeat_config.min_timeout)):
            self._detector.learn({phase: self._durations(phase) for phase in MIN_OBSERVATIONS})
        overdue = self._detector.overdue(samples, now)
        if self._peers is not None:
            self._peers.exchange(self._statuses(samples), self._fault)
            self._report_peer_faults(samples, self._peers, now)
        self._check_exits(samples)
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
        if self._is_due("heartbeat", now, self._heartbeat_config.interval):
            self._log_heartbeat(samples, now)
        if self._is_due("measure", now, self._heartbeat_config.metrics_interval):
            self._report.start_measuring(self._readers, now)

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
                one.rank,
                self._info.node,
                one.phase,
                one.step,
                one.sequence,
                # The kernel's state of a process that has reported its end no longer matters.
                procfs.state(one.pid) if one.exit_state is ExitState.RUNNING else "S",
                (in_collective or {}).get(one.rank),
            )
            for one in samples
        ]

    def _log_heartbeat(self, samples: Sequence[HeartbeatSample], now: float) -> None:
        silences = self._detector.silences(samples, now)
        running = [one for one in samples if one.exit_state is ExitState.RUNNING] or samples
        worst = max(running, key=lambda one: silences[one.rank])
        step = min(one.step for one in samples)
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
        self._stall = StallState(first.since, {one.rank: one.sequence for one in samples})
        self._fault = PeerFault("stall", symptom, silent)
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

    def _report_peer_faults(
        self, samples: Sequence[HeartbeatSample], peers: PeerLink, now: float
    ) -> None:
        """Send alerts for the other nodes' faults; a stall of several nodes is one alert."""
        if self._info.node:
            return
        stall: PeerFault | None = None
        for node, fault in peers.faults().items():
            text = f"node {node}: {fault.text}"
            if fault.kind == "stall":
                stall = replace(fault, text=text)
            elif node not in self._failed_nodes:
                self._failed_nodes.add(node)
                self._dispatcher.send(self._formatter.failure(text, node, None))
        if stall is not None and self._peer_stall_since is None and self._stall is None:
            self._peer_stall_since = now - stall.seconds
            culprit = self._find_culprit(samples, {})
            self._dispatcher.send(self._formatter.stall(stall.text, culprit, stall.seconds))
        elif stall is None and self._peer_stall_since is not None and self._stall is None:
            silent, self._peer_stall_since = now - self._peer_stall_since, None
            self._dispatcher.send(self._formatter.resumed("the other nodes resumed", silent))

    def _usual_duration(self, phase: Phase) -> str:
        durations = self._durations(phase) if phase in MIN_OBSERVATIONS else EMPTY_HISTOGRAM
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
            self._peers.exchange(ranks, self._fault)
            ranks, silent = ranks + self._peers.statuses(), self._peers.silent_nodes()
        return find_culprit(ranks, silent)

    def _has_progressed(self, samples: Sequence[HeartbeatSample], stall: StallState) -> bool:
        return all(
            one.sequence != stall.sequences.get(one.rank) or one.exit_state is not ExitState.RUNNING
            for one in samples
        )

    def _end_stall(self, samples: Sequence[HeartbeatSample], stall: StallState, now: float) -> None:
        self._stall = self._fault = None
        silent, step = now - stall.since, max(one.step for one in samples)
        message = f"training resumed at step {step} after {silent:.3g} s of silence"
        self._dispatcher.send(self._formatter.resumed(message, silent))
        self._events.warn("stall-resolved", message, step=step, silent_seconds=round(silent, 1))

    def _kill_job(self, samples: Sequence[HeartbeatSample], cause: str) -> None:
        """Kill this node's processes; the launcher then fails the job, which can be resumed.

        SIGKILL, because a process that hangs runs no Python signal handler.
        """
        self._events.write("error", f"killing the job: {cause}", code="stall", message=cause)
        call_with_timeout(_DISK_TIMEOUT, lambda: self._write_failure(cause), None)
        if self._info.nodes > 1:
            time.sleep(PEER_DETECTION_SECONDS)
        self._dispatcher.finish(LAST_ALERT_TIMEOUT)
        self._killed = True
        for one in samples:
            if one.exit_state is ExitState.RUNNING:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(one.pid, signal.SIGKILL)

    def _write_failure(self, cause: str) -> None:
        """Write SageMaker's FailureReason, unless another process already has."""
        failure = self._paths.failure
        failure.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError), failure.open("x") as file:
            file.write(f"{cause}\n")

    # ------------------------------------------------------------------ exits

    def _check_exits(self, samples: Sequence[HeartbeatSample]) -> None:
        """Report each process once that failed, or died without reporting an end."""
        for one, reader in zip(samples, self._readers, strict=False):
            if self._killed or one.rank in self._reported_ranks:
                continue
            dead = one.exit_state is ExitState.RUNNING and procfs.state(one.pid) in "ZX"
            where = f"in {one.phase.label} after step {one.step}"
            # It may have reported its end between the two reads.
            if dead and reader.sample().exit_state is ExitState.RUNNING:
                reason = f"rank {one.rank} died without an error {where}: killed, or out of memory"
                self._events.warn("rank-died", reason, step=one.step, rank_died=one.rank)
            elif one.exit_state is ExitState.FAILED:
                text = call_with_timeout(_DISK_TIMEOUT, self._failure_text, "")
                reason = f"{text or f'rank {one.rank} failed'}, {where}"
            else:
                continue
            self._reported_ranks.add(one.rank)
            self._fault = PeerFault("failure", reason)
            if self._is_reporter:
                self._dispatcher.send(self._formatter.failure(reason, self._info.node, one.rank))

    def _failure_text(self) -> str:
        """Return the failure file's first line; a process writes it just after its exit state."""
        deadline = time.monotonic() + 1.0
        while time.monotonic() < deadline:
            with contextlib.suppress(OSError):
                if text := self._paths.failure.read_text(errors="replace").strip():
                    return text.splitlines()[0][:500]
            time.sleep(0.05)
        return ""

    def finish(self) -> None:
        """Send the last alerts, within bounded time: the process that started this one ended."""
        # The training process may have ended before the first poll.
        samples = self._samples()
        self._check_exits(samples[:1])
        if self._info.node == 0 and samples and samples[0].exit_state is ExitState.DONE:
            self._dispatcher.send(self._formatter.ended(samples[0].step))
        if self._peers is not None:
            self._peers.exchange(self._statuses(samples), self._fault)
            self._report_peer_faults(samples, self._peers, self._clock())
        self._dispatcher.finish(LAST_ALERT_TIMEOUT)


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
        _watch(read_job_config(options.document, options.stage), options.heartbeats, stdout)
    except Exception:
        traceback.print_exc()
    shutil.rmtree(options.heartbeats, ignore_errors=True)
    stdout.finish(_DISK_TIMEOUT)
    # Threads may hang in what hung the job.
    os._exit(0)


def _watch(config: JobConfig, heartbeats: Path, stdout: NonBlockingStdout) -> None:
    paths = SageMakerPaths.from_environment()
    resources = ResourceConfig.read(paths)
    local_world_size = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    info = NodeInfo(resources.node_rank, len(resources.hosts), local_world_size)
    rank = int(os.environ.get("RANK", "0"))
    events = EventLog(node=resources.node_rank, rank=rank, stream=stdout)
    watchdog = Watchdog(
        config,
        paths,
        info,
        heartbeats,
        events=events,
        dispatcher=AlertDispatcher(config.alerts, events.warn),
        peers=_open_peer_link(config, info, events),
    )
    parent = os.getppid()
    while not _parent_ended(parent, poll_seconds(config)):
        try:
            watchdog.poll()
        except Exception as error:
            # Whatever it is, watching continues.
            events.warn("monitor", f"a poll failed: {type(error).__name__}: {error}")
            time.sleep(POLL_SECONDS)
    watchdog.finish()


def _open_peer_link(config: JobConfig, info: NodeInfo, events: EventLog) -> PeerLink | None:
    address = rendezvous_address()
    if info.nodes == 1 or address is None:
        return None
    job, seconds = f"{config.run}/{config.stage.name}", poll_seconds(config)
    try:
        return PeerLink(job, info.node, info.nodes, address, poll_seconds=seconds)
    except OSError as error:
        message = (
            f"this node's watchdog cannot reach the other nodes' and sees only itself: {error}"
        )
        events.warn("peer-link-unavailable", message)
        return None


def _parent_ended(parent: int, seconds: float) -> bool:
    """Wait ``seconds``; returns whether the process that started this one has ended."""
    readable, _, _ = select.select([sys.stdin], [], [], seconds)
    return bool(readable) or os.getppid() != parent


if __name__ == "__main__":
    main()
