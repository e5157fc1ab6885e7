"""The process that watches a node's training processes and reports when they cannot.

It imports no PyTorch, takes part in no collective and holds no lock of theirs. It polls once a
second, ends with the process that started it, and kills the job only if ``heartbeat.on_stall`` is
``kill``.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from sm_train.entrypoints.base.digests import message_key
from sm_train.entrypoints.base.sagemaker_paths import ResourceConfig, SageMakerPaths
from sm_train.entrypoints.job_interface.events import EventLog
from sm_train.entrypoints.job_interface.job_config import JobConfig, read_job_config
from sm_train.entrypoints.job_interface.node_description import machine_name, uploads_checkpoints
from sm_train.entrypoints.monitoring.alert_messages import AlertFormatter
from sm_train.entrypoints.monitoring.alert_sinks import AlertDispatcher
from sm_train.entrypoints.monitoring.heartbeat import ExitState, HeartbeatSample, node_event_file
from sm_train.entrypoints.monitoring.node_event import LastNodeEvent, NodeReport
from sm_train.entrypoints.monitoring.peers import PeerLink, rendezvous_address
from sm_train.entrypoints.monitoring.stall_detector import StallDetector, TimeoutBounds
from sm_train.entrypoints.monitoring.timeouts import NonBlockingStdout
from sm_train.entrypoints.monitoring.watchdog.exit_watcher import ExitWatcher
from sm_train.entrypoints.monitoring.watchdog.failure_watch import FailureWatch
from sm_train.entrypoints.monitoring.watchdog.local_ranks import LocalRanks, NodeInfo
from sm_train.entrypoints.monitoring.watchdog.stall_watch import LAST_ALERT_TIMEOUT, StallWatch
from sm_train.entrypoints.monitoring.watchdog.storage_report import (
    STORAGE_CHECK_SECONDS,
    FailedSavesReport,
    StorageReport,
)
from sm_train.entrypoints.monitoring.watchdog.straggler_report import StragglerReport
from sm_train.entrypoints.monitoring.watchdog.watched_node import DISK_TIMEOUT, WatchedNode

POLL_SECONDS = 1.0
_SETTLE_POLL_SECONDS = 0.1


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
        machines = _own_machine if peers is None else peers.machines
        formatter = AlertFormatter(config, info.nodes, paths.checkpoints, uploads, machines)
        self._ranks = LocalRanks(info, heartbeats)
        self._node = WatchedNode(
            config, paths, self._ranks, events, dispatcher, formatter, peers, clock
        )
        self._storage: StorageReport | None = None
        if uploads and config.checkpoint.save:
            self._storage = StorageReport(
                config,
                paths.checkpoints,
                info.node,
                events=events,
                dispatcher=dispatcher,
                formatter=formatter,
            )
        self._saves = FailedSavesReport(dispatcher, formatter)
        self._stragglers = StragglerReport(events, dispatcher, formatter)
        self._report = NodeReport(events, info.node)
        max_gap = max(5.0, 5 * poll_seconds(config))
        bounds = TimeoutBounds(heartbeat.min_timeout, heartbeat.max_timeout)
        self._detector = StallDetector(bounds, max_gap=max_gap)
        self._failed = FailureWatch(self._node, exit_codes if exit_codes is not None else {})
        self._stalls = StallWatch(self._node, self._detector, self._failed.failures)
        # Ranks without a valid record at the last poll, and those that were reported for it.
        self._unread, self._reported = set[int](), set[int]()
        now = clock()
        # When each periodic task runs next.
        self._due = {"heartbeat": now + heartbeat.interval, "measure": now, "storage": now}

    @property
    def pids(self) -> list[int]:
        """The processes that are watched."""
        return [reader.process.pid for reader in self._ranks.readers]

    def poll(self) -> None:
        """Read every process's heartbeat once and run the tasks that are due."""
        now = self._node.clock()
        samples, heartbeat = self._ranks.samples(), self._node.config.heartbeat
        if not self._ranks.readers:
            return
        self._report_unread(samples)
        self._stalls.learn(now)
        overdue = self._detector.overdue(samples, now)
        if not self._stalls.killed:
            self._failed.check(self._ranks.readers, now)
        self._exchange(samples, now)
        self._failed.report(now)
        if samples:
            self._compare_ranks(samples, now)
            self._stalls.check(samples, overdue, now)
            if self._node.is_reporter:
                self._saves.check(samples)
        if self._storage is not None and self._is_due("storage", now, STORAGE_CHECK_SECONDS):
            self._storage.check(now)
        if samples and self._is_due("heartbeat", now, heartbeat.interval):
            self._log_heartbeat(samples, now)
        if self._is_due("measure", now, 2 * heartbeat.interval):
            self._report.start_measuring(self._ranks.readers, now, self._stragglers.fields())

    def _exchange(self, samples: Sequence[HeartbeatSample], now: float) -> None:
        if self._node.peers is not None:
            statuses = self._ranks.statuses(samples)
            self._node.exchange(statuses, self._stalls.own, self._failed.failures)
            self._stalls.report_peers(samples, now)

    def _report_unread(self, samples: Sequence[HeartbeatSample]) -> None:
        """Warn once of each rank that has no valid heartbeat record in two polls in succession."""
        before, self._unread = self._unread, self._ranks.unread(samples)
        for rank in sorted(before & self._unread - self._reported):
            self._reported.add(rank)
            message = f"rank {rank} has no valid heartbeat record: its progress is unknown"
            self._node.events.warn("heartbeat-invalid", message, unread_rank=rank)

    def _is_due(self, task: str, now: float, interval: float) -> bool:
        if now < self._due[task]:
            return False
        self._due[task] = now + interval
        return True

    def _log_heartbeat(self, samples: Sequence[HeartbeatSample], now: float) -> None:
        silences = self._detector.silences(samples, now)
        running = [
            sample for sample in samples if sample.exit_state is ExitState.RUNNING
        ] or samples
        worst = max(running, key=lambda status: silences[status.rank])
        step = min(sample.step for sample in samples)
        self._node.events.write(
            "heartbeat",
            f"alive at step {step}{', compiling' if worst.compiling else ''}",
            step=step,
            seconds_since_step=round(silences[worst.rank], 1),
            phase=worst.phase.name.lower(),
            compiling=worst.compiling,
            limit_seconds=round(self._detector.timeout(worst), 1),
            worst_rank=worst.rank,
            processes=len(samples),
            **({} if self._storage is None else self._storage.fields(now)),
        )

    def _compare_ranks(self, samples: Sequence[HeartbeatSample], now: float) -> None:
        """Look for stragglers on the first node, which receives the busy times of all nodes."""
        if self._node.info.node:
            return
        totals = self._ranks.busy_totals()
        if self._node.peers is not None:
            totals += self._node.peers.busy_totals()
        self._stragglers.add(totals, now, step=max(sample.step for sample in samples))

    def finish(self) -> None:
        """Send the last alerts, within bounded time: the process that started this one ended."""
        # Its own end may not be visible yet, nor why another process failed.
        deadline = time.monotonic() + self._failed.patience
        samples = self._ranks.samples()
        while not self._has_settled(samples) and time.monotonic() < deadline:
            time.sleep(_SETTLE_POLL_SECONDS)
            samples = self._ranks.samples()
        node = self._node
        if not self._ranks.ended_well:
            self._failed.report(node.clock(), final=True)
        elif node.info.node == 0:
            step = max((sample.step for sample in samples), default=None)
            node.dispatcher.send(node.formatter.ended(step))
        node.dispatcher.finish(LAST_ALERT_TIMEOUT)

    def _has_settled(self, samples: Sequence[HeartbeatSample]) -> bool:
        """Poll once more for failures; return whether no other one has to be waited for."""
        now, ended_well = self._node.clock(), self._ranks.ended_well
        # After a success the other processes' ends no longer matter.
        if not self._stalls.killed:
            readers = self._ranks.readers
            self._failed.check(readers[:1] if ended_well else readers, now)
        self._exchange(samples, now)
        self._failed.report(now)
        # Another node may still name the process that the connection was lost to.
        return ended_well or self._stalls.killed or self._failed.has_cause


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
    stdout.finish(DISK_TIMEOUT)
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


def _own_machine() -> dict[int, str]:
    """Return this machine's name, for a job with one node."""
    name = machine_name()
    return {} if name is None else {0: name}


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
