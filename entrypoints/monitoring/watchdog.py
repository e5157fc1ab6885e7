"""The process that watches a machine's training procfs, and speaks when they cannot.

It imports no PyTorch, takes part in no collective and holds no lock of theirs. It looks once a
second, ends with the process that started it, and ends the job only where the run file says so.
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
    NOTHING,
    DurationHistogram,
    ExitState,
    HeartbeatReader,
    HeartbeatSample,
    Phase,
    readers,
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

LOOK_SECONDS, LEARN_SECONDS = 1.0, 10.0
EVIDENCE_SECONDS = 40.0
"""Longest wait for evidence."""

LAST_ALERT_SECONDS = 20.0
"""Longest wait for an alert to arrive before the job is ended."""

OTHERS_SECONDS = 10.0
"""Before it ends its own procfs, a machine leaves the others so long to see them hang."""

_DISK_SECONDS = 5.0


@dataclass(frozen=True)
class NodeInfo:
    """Which machine of the job this is, and how many processes it runs."""

    node: int
    nodes: int
    processes: int


@dataclass(frozen=True)
class StallState:
    """One that lasts: ``since`` when (monotonic), and where each rank stood. ``alert`` is None
    where another machine sends it.
    """

    since: float
    marks: Mapping[int, int]
    alert: Alert | None = None


class Watchdog:
    """Watches one machine; :meth:`look` is called again and again."""

    def __init__(
        self,
        settings: JobConfig,
        directories: SageMakerPaths,
        place: NodeInfo,
        pulses: Path,
        *,
        events: EventLog,
        delivery: AlertDispatcher,
        neighbours: PeerLink | None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        beat = settings.heartbeat
        self._beat, self._directories, self._place = beat, directories, place
        self._pulses, self._events, self._delivery = pulses, events, delivery
        self._neighbours, self._clock = neighbours, clock
        self._author = AlertFormatter(settings, place.nodes, directories.checkpoints)
        self._report = NodeReport(events, place.node)
        pause = max(5.0, 5 * look_seconds(settings))
        self._patience = StallDetector(
            TimeoutBounds(beat.min_timeout, beat.max_timeout), pause=pause
        )
        self._readers: list[HeartbeatReader] = []
        now = clock()
        self._due = {"learn": now, "beat": now + beat.interval, "measure": now, "remind": now}
        self._stall: StallState | None = None
        self._trouble: PeerFault | None = None
        self._others_stall: float | None = None
        self._told: set[int] = set()
        self._failed_nodes: set[int] = set()
        self._killed = False

    # ------------------------------------------------------------------ one look

    def look(self) -> None:
        """Look at every process once, and do what is due."""
        now = self._clock()
        signs = self._signs()
        if not signs:
            return
        if self._is_due("learn", now, min(LEARN_SECONDS, self._beat.min_timeout)):
            self._patience.learn(
                {section: self._durations(section) for section in MIN_OBSERVATIONS}
            )
        overdue = self._patience.overdue(signs, now)
        if self._neighbours is not None:
            self._neighbours.exchange(self._seen(signs), self._trouble)
            self._heed_neighbours(signs, self._neighbours, now)
        self._heed_deaths(signs)
        if self._stall is None:
            if overdue:
                self._begin_stall(signs, overdue[0], now)
        elif not overdue and self._moved(signs, self._stall):
            self._end_stall(signs, self._stall, now)
        elif self._stall.alert is not None and self._is_due("remind", now, LEARN_SECONDS):
            # The delivery lets it pass when enough time has gone by.
            silent = now - self._stall.since
            burned = self._author.burned(silent)
            again = replace(self._stall.alert, silent_seconds=silent, burned_usd=burned)
            self._delivery.send(again)
        if self._is_due("beat", now, self._beat.interval):
            self._tell_beat(signs, now)
        if self._is_due("measure", now, self._beat.metrics_interval):
            self._report.begin(self._readers, now)

    def _signs(self) -> list[HeartbeatSample]:
        if len(self._readers) < self._place.processes:
            self._readers = list(readers(self._pulses))
        return [reader.sign() for reader in self._readers]

    def _is_due(self, what: str, now: float, every: float) -> bool:
        if now < self._due[what]:
            return False
        self._due[what] = now + every
        return True

    def _durations(self, section: Phase) -> DurationHistogram:
        """Sections take alike on all processes: together they teach sooner."""
        return sum((one.durations(section) for one in self._readers), NOTHING)

    def _seen(
        self, signs: Sequence[HeartbeatSample], waits: Mapping[int, bool | None] | None = None
    ) -> list[RankStatus]:
        return [
            RankStatus(
                one.rank,
                self._place.node,
                one.section,
                one.step,
                one.marks,
                # One that ended as it should is no longer looked for.
                procfs.state(one.pid) if one.ending is ExitState.RUNS else "S",
                (waits or {}).get(one.rank),
            )
            for one in signs
        ]

    def _tell_beat(self, signs: Sequence[HeartbeatSample], now: float) -> None:
        silences = self._patience.silences(signs, now)
        running = [one for one in signs if one.ending is ExitState.RUNS] or signs
        worst = max(running, key=lambda one: silences[one.rank])
        step = min(one.step for one in signs)
        self._events.write(
            "heartbeat",
            f"alive at step {step}",
            step=step,
            seconds_since_step=round(silences[worst.rank], 1),
            section=worst.section.name.lower(),
            limit_seconds=round(self._patience.limits[worst.section], 1),
            worst_rank=worst.rank,
            processes=len(signs),
        )

    # ------------------------------------------------------------------ stalls

    def _begin_stall(
        self, signs: Sequence[HeartbeatSample], first: HeartbeatSample, now: float
    ) -> None:
        """Keep the stall_report, tell people, and end the job if that is wanted."""
        limit, silent = self._patience.limits[first.section], now - first.since
        symptom = (
            f"no sign for {silent:.3g} s in {first.section.words} after step {first.step} "
            f"(limit {limit:.3g} s, {self._usual(first.section)})"
        )
        if (missing := self._place.processes - len(signs)) > 0:
            symptom += f"; {missing} of {self._place.processes} processes have not even begun"
        self._stall = StallState(first.since, {one.rank: one.marks for one in signs})
        self._trouble = PeerFault("stall", symptom, silent)
        found = call_with_timeout(EVIDENCE_SECONDS, lambda: self._gather(signs, symptom), None)
        self._patience.resume(self._clock())
        blamed = self._blame(signs, found.waits if found else {})
        if self._speaks:
            alert = self._author.stall(symptom, blamed, silent)
            self._stall = replace(self._stall, alert=alert)
            self._delivery.send(alert)
        ends = self._beat.on_stall == "kill"
        self._events.warn(
            "stall",
            f"{symptom}; {blamed.reason}",
            step=first.step,
            section=first.section.name.lower(),
            silent_seconds=round(silent, 1),
            limit_seconds=round(limit, 1),
            blamed_rank=blamed.rank,
            blamed_node=blamed.node,
            reason=blamed.reason,
            evidence=found and found.folder.relative_to(self._directories.checkpoints).as_posix(),
            files=list(found.files) if found else [],
            ends=ends,
        )
        if ends:
            self._end_job(signs, f"stall: {symptom}; {blamed.reason}")

    @property
    def _speaks(self) -> bool:
        if self._neighbours is not None:
            return self._neighbours.speaks
        return self._place.node == 0

    def _heed_neighbours(
        self, signs: Sequence[HeartbeatSample], neighbours: PeerLink, now: float
    ) -> None:
        """Tell people what the other machines say; a stall of all is told once."""
        if self._place.node:
            return
        stalled: PeerFault | None = None
        for node, trouble in neighbours.troubles().items():
            text = f"node {node}: {trouble.text}"
            if trouble.kind == "stall":
                stalled = replace(trouble, text=text)
            elif node not in self._failed_nodes:
                self._failed_nodes.add(node)
                self._delivery.send(self._author.failure(text, node, None))
        if stalled is not None and self._others_stall is None and self._stall is None:
            self._others_stall = now - stalled.seconds
            blamed = self._blame(signs, {})
            self._delivery.send(self._author.stall(stalled.text, blamed, stalled.seconds))
        elif stalled is None and self._others_stall is not None and self._stall is None:
            silent, self._others_stall = now - self._others_stall, None
            self._delivery.send(self._author.goes_on("the other machines go on", silent))

    def _usual(self, section: Phase) -> str:
        """The section's baseline, in words."""
        durations = self._durations(section) if section in MIN_OBSERVATIONS else NOTHING
        median, longest = durations.quantile(0.5), durations.longest
        if median is None or longest is None:
            return "none seen before"
        return f"usually {median:.3g} s, at most {longest:.3g} s"

    def _gather(
        self, signs: Sequence[HeartbeatSample], story: str
    ) -> stall_report.StallReport | None:
        return stall_report.collect(
            self._directories.checkpoints,
            signs,
            node=self._place.node,
            pulses=self._pulses,
            stamp=datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ"),
            story=f"{story}\n",
        )

    def _blame(self, signs: Sequence[HeartbeatSample], waits: Mapping[int, bool | None]) -> Culprit:
        seen, silent = self._seen(signs, waits), dict[int, float]()
        if self._neighbours is not None:
            self._neighbours.exchange(seen, self._trouble)
            seen, silent = seen + self._neighbours.others(), self._neighbours.silent()
        return find_culprit(seen, silent)

    def _moved(self, signs: Sequence[HeartbeatSample], stall: StallState) -> bool:
        return all(
            one.marks != stall.marks.get(one.rank) or one.ending is not ExitState.RUNS
            for one in signs
        )

    def _end_stall(self, signs: Sequence[HeartbeatSample], stall: StallState, now: float) -> None:
        self._stall = self._trouble = None
        silent, step = now - stall.since, max(one.step for one in signs)
        message = f"training goes on at step {step} after {silent:.3g} s of silence"
        self._delivery.send(self._author.goes_on(message, silent))
        self._events.warn("stall-resolved", message, step=step, silent_seconds=round(silent, 1))

    def _end_job(self, signs: Sequence[HeartbeatSample], cause: str) -> None:
        """Kill this machine's processes; the launcher then fails the job, which can be resumed.

        Nothing milder is sure to work: a process that hangs runs no handler of Python's.
        """
        self._events.write("error", f"the job is ended: {cause}", code="stall", message=cause)
        call_with_timeout(_DISK_SECONDS, lambda: self._write_failure(cause), None)
        if self._place.nodes > 1:
            time.sleep(OTHERS_SECONDS)
        self._delivery.finish(LAST_ALERT_SECONDS)
        self._killed = True
        for one in signs:
            if one.ending is ExitState.RUNS:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(one.pid, signal.SIGKILL)

    def _write_failure(self, cause: str) -> None:
        """SageMaker's FailureReason; whoever fails first writes it."""
        failure = self._directories.failure
        failure.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError), failure.open("x") as file:
            file.write(f"{cause}\n")

    # ------------------------------------------------------------------ ends

    def _heed_deaths(self, signs: Sequence[HeartbeatSample]) -> None:
        """Say once of each process that it failed, or died without a word."""
        for one, reader in zip(signs, self._readers, strict=False):
            if self._killed or one.rank in self._told:
                continue
            dead = one.ending is ExitState.RUNS and procfs.state(one.pid) in "ZX"
            where = f"in {one.section.words} after step {one.step}"
            # It may have said goodbye since.
            if dead and reader.sign().ending is ExitState.RUNS:
                reason = f"rank {one.rank} died without a word {where}: killed, or out of memory"
                self._events.warn("rank-died", reason, step=one.step, rank_died=one.rank)
            elif one.ending is ExitState.FAILED:
                text = call_with_timeout(_DISK_SECONDS, self._failure_text, "")
                reason = f"{text or f'rank {one.rank} failed'}, {where}"
            else:
                continue
            self._told.add(one.rank)
            self._trouble = PeerFault("failure", reason)
            if self._speaks:
                self._delivery.send(self._author.failure(reason, self._place.node, one.rank))

    def _failure_text(self) -> str:
        """The failure file's first line, which the process writes a moment after it says so."""
        deadline = time.monotonic() + 1.0
        while time.monotonic() < deadline:
            with contextlib.suppress(OSError):
                if text := self._directories.failure.read_text(errors="replace").strip():
                    return text.splitlines()[0][:500]
            time.sleep(0.05)
        return ""

    def finish(self) -> None:
        """The process that started this one has ended: last words, within bounded time."""
        # It may have ended before this one had looked at all.
        signs = self._signs()
        self._heed_deaths(signs[:1])
        if self._place.node == 0 and signs and signs[0].ending is ExitState.DONE:
            self._delivery.send(self._author.ended(signs[0].step))
        if self._neighbours is not None:
            self._neighbours.exchange(self._seen(signs), self._trouble)
            self._heed_neighbours(signs, self._neighbours, self._clock())
        self._delivery.finish(LAST_ALERT_SECONDS)


def look_seconds(settings: JobConfig) -> float:
    """Between two looks."""
    return min(LOOK_SECONDS, settings.heartbeat.min_timeout / 8)


def main(arguments: Sequence[str] | None = None) -> None:
    """Watch until standard input ends."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--document", type=Path, required=True)
    parser.add_argument("--stage", required=True)
    parser.add_argument("--pulses", type=Path, required=True)
    options = parser.parse_args(arguments)
    # A stop is the training processes' to answer; this one still watches them write a checkpoint.
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    voice = NonBlockingStdout(sys.stdout)
    try:
        _watch(read_job_config(options.document, options.stage), options.pulses, voice)
    except Exception:
        traceback.print_exc()
    shutil.rmtree(options.pulses, ignore_errors=True)
    voice.finish(_DISK_SECONDS)
    # Threads may hang in what hung the job.
    os._exit(0)


def _watch(settings: JobConfig, pulses: Path, voice: NonBlockingStdout) -> None:
    directories = SageMakerPaths.from_environment()
    hosts = ResourceConfig.read(directories)
    local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    place = NodeInfo(hosts.node_rank, len(hosts.hosts), local)
    events = EventLog(node=hosts.node_rank, rank=int(os.environ.get("RANK", "0")), stream=voice)
    monitor = Watchdog(
        settings,
        directories,
        place,
        pulses,
        events=events,
        delivery=AlertDispatcher(settings.alerts, events.warn),
        neighbours=_meet(settings, place, events),
    )
    parent = os.getppid()
    while not _ended(parent, look_seconds(settings)):
        try:
            monitor.look()
        except Exception as error:
            # Whatever it is, watching goes on.
            events.warn("monitor", f"a look failed: {type(error).__name__}: {error}")
            time.sleep(LOOK_SECONDS)
    monitor.finish()


def _meet(settings: JobConfig, place: NodeInfo, events: EventLog) -> PeerLink | None:
    address = rendezvous_address()
    if place.nodes == 1 or address is None:
        return None
    job, seconds = f"{settings.run}/{settings.stage.name}", look_seconds(settings)
    try:
        return PeerLink(job, place.node, place.nodes, address, look_seconds=seconds)
    except OSError as error:
        events.warn("no-neighbours", f"this machine watches itself alone: {error}")
        return None


def _ended(parent: int, seconds: float) -> bool:
    """Wait so long for the end of the process that started this one."""
    readable, _, _ = select.select([sys.stdin], [], [], seconds)
    return bool(readable) or os.getppid() != parent


if __name__ == "__main__":
    main()
