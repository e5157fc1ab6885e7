"""The process that watches a machine's training processes, and speaks when they cannot.

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
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from sm_train.entrypoints import evidence, node_metrics, processes
from sm_train.entrypoints.alerts import Alert
from sm_train.entrypoints.delivery import Delivery
from sm_train.entrypoints.directories import Directories, Hosts
from sm_train.entrypoints.events import Events
from sm_train.entrypoints.neighbours import Neighbours, meeting_point
from sm_train.entrypoints.pulse import NOTHING, Durations, Ending, Reader, Section, Sign, readers
from sm_train.entrypoints.settings import Settings, read_settings
from sm_train.entrypoints.stall import ENOUGH, Blame, Bounds, Patience, Seen, blame

LOOK_SECONDS, LEARN_SECONDS = 1.0, 10.0
EVIDENCE_SECONDS = 40.0
"""Longest wait for evidence: what hangs the job may hang its disk, too."""

LAST_ALERT_SECONDS = 20.0
"""Longest wait for an alert to arrive before the job is ended."""

OTHERS_SECONDS = 10.0
"""Before it ends its own processes, a machine leaves the others so long to see them hang."""

MARKER = "step-*/complete.json"
"""What makes a checkpoint complete (entrypoints/checkpoint.py, which needs PyTorch)."""


@dataclass(frozen=True)
class Place:
    """Which machine of the job this is, and how many processes it runs."""

    node: int
    nodes: int
    processes: int


class Monitor:
    """Watches one machine; :meth:`look` is called again and again."""

    def __init__(
        self,
        settings: Settings,
        directories: Directories,
        place: Place,
        pulses: Path,
        *,
        events: Events,
        delivery: Delivery,
        neighbours: Neighbours | None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        beat = settings.heartbeat
        self._settings, self._directories, self._place = settings, directories, place
        self._pulses, self._events, self._delivery = pulses, events, delivery
        self._neighbours, self._clock = neighbours, clock
        self.look_seconds = look_seconds(settings)
        bounds = Bounds(beat.min, beat.max)
        self._patience = Patience(bounds, pause=max(5.0, 5 * self.look_seconds))
        self._readers: list[Reader] = []
        self._machine = node_metrics.Machine.here()
        now = clock()
        self._due = {"learn": now, "beat": now + beat.interval, "measure": now, "remind": now}
        self._reading: node_metrics.Reading | None = None
        self._table: dict[int, tuple[Durations, float, float]] = {}
        self._stalled: Mapping[int, int] | None = None
        self._stalled_at = 0.0
        self._alarm: Alert | None = None
        self._told: set[str] = set()
        self._ends = False

    # ------------------------------------------------------------------ one look

    def look(self) -> None:
        """Look at every process once, and do what is due."""
        now = self._clock()
        if len(self._readers) < self._place.processes:
            self._readers = list(readers(self._pulses))
        signs = [reader.sign() for reader in self._readers]
        if not signs:
            return
        if self._is_due("learn", now, min(LEARN_SECONDS, self._settings.heartbeat.min)):
            self._learn()
        overdue = self._patience.overdue(signs, now)
        if self._neighbours is not None:
            self._neighbours.exchange(self._seen(signs), self._stalled is not None)
        self._heed_deaths(signs)
        if self._stalled is None and overdue:
            self._begin_stall(signs, overdue[0], now)
        elif self._stalled is not None and not overdue and self._moved(signs):
            self._end_stall(signs, now)
        elif self._alarm is not None and self._is_due("remind", now, LEARN_SECONDS):
            # The delivery lets it pass when enough time has gone by.
            self._delivery.send(replace(self._alarm, burned_usd=self._cost_since(now)))
        if self._is_due("beat", now, self._settings.heartbeat.interval):
            self._tell_beat(signs, now)
        if self._is_due("measure", now, self._settings.heartbeat.metrics_interval):
            self._measure(signs, now)

    def _is_due(self, what: str, now: float, every: float) -> bool:
        if now < self._due[what]:
            return False
        self._due[what] = now + every
        return True

    def _learn(self) -> None:
        """Sections take alike on all processes: together they teach sooner."""
        self._patience.learn(
            {
                section: sum((one.durations(section) for one in self._readers), NOTHING)
                for section in ENOUGH
            }
        )

    def _seen(
        self, signs: Sequence[Sign], waits: Mapping[int, bool | None] | None = None
    ) -> list[Seen]:
        return [
            Seen(
                one.rank,
                self._place.node,
                one.section,
                one.step,
                one.marks,
                # One that ended as it should is no longer looked for.
                processes.state(one.pid) if one.ending is Ending.RUNS else "S",
                (waits or {}).get(one.rank),
            )
            for one in signs
        ]

    # ------------------------------------------------------------------ stalls

    def _begin_stall(self, signs: Sequence[Sign], first: Sign, now: float) -> None:
        limit, silent = self._patience.limits[first.section], now - first.since
        usual = self._usual(first.section)
        symptom = (
            f"no sign for {silent:.0f} s in {first.section.words} after step {first.step} "
            f"(limit {limit:.3g} s, {usual})"
        )
        self._stalled, self._stalled_at = {one.rank: one.marks for one in signs}, now - silent
        found = self._gather(signs, symptom)
        self._patience.resume(self._clock())
        blamed = self._blame(signs, found.waits if found else {})
        where = str(found.folder.relative_to(self._directories.checkpoints)) if found else None
        ends = self._settings.heartbeat.on_stall == "end"
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
            evidence=where,
            files=list(found.files) if found else [],
            ends=ends,
        )
        if self._neighbours is None or self._neighbours.speaks:
            alert = self._alert(
                "stall", "critical", "training has stalled", symptom, self._cost_since(now)
            )
            self._alarm = replace(alert, worst=_worst(blamed))
            self._delivery.send(self._alarm)
        if ends:
            self._end_job(signs, f"stall: {symptom}; {blamed.reason}")

    def _usual(self, section: Section) -> str:
        """The section's baseline, in words."""
        durations = sum((one.durations(section) for one in self._readers), NOTHING)
        median, longest = durations.quantile(0.5), durations.longest
        if median is None or longest is None:
            return "none seen before"
        return f"usually {median:.3g} s, at most {longest:.3g} s"

    def _gather(self, signs: Sequence[Sign], story: str) -> evidence.Evidence | None:
        """The evidence, unless even that hangs or cannot be written."""
        found: list[evidence.Evidence] = []
        stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")

        def gather() -> None:
            try:
                found.append(
                    evidence.gather(
                        self._directories.checkpoints,
                        signs,
                        node=self._place.node,
                        pulses=self._pulses,
                        stamp=stamp,
                        story=f"{story}\n",
                    )
                )
            except Exception as error:
                self._events.warn("no-evidence", f"the stall's evidence is not kept: {error}")

        thread = threading.Thread(target=gather, daemon=True)
        thread.start()
        thread.join(EVIDENCE_SECONDS)
        return found[0] if found else None

    def _blame(self, signs: Sequence[Sign], waits: Mapping[int, bool | None]) -> Blame:
        seen, silent = self._seen(signs, waits), {}
        if self._neighbours is not None:
            self._neighbours.exchange(seen, True)
            seen, silent = seen + self._neighbours.others(), self._neighbours.silent()
        return blame(seen, silent)

    def _moved(self, signs: Sequence[Sign]) -> bool:
        assert self._stalled is not None
        return all(
            one.marks != self._stalled.get(one.rank) or one.ending is not Ending.RUNS
            for one in signs
        )

    def _end_stall(self, signs: Sequence[Sign], now: float) -> None:
        self._stalled = self._alarm = None
        seconds, step = now - self._stalled_at, max(one.step for one in signs)
        message = f"training goes on at step {step} after {seconds:.0f} s of silence"
        self._events.warn("stall-resolved", message, step=step, silent_seconds=round(seconds, 1))
        alert = self._alert("stall", "critical", "training goes on", message, self._cost_since(now))
        self._delivery.send(replace(alert, resolved=True, command=None))

    def _end_job(self, signs: Sequence[Sign], cause: str) -> None:
        """Kill this machine's processes; the launcher then fails the job, which can be retried.

        Nothing milder is sure to work: a process that hangs runs no handler of Python's.
        """
        self._events.write("error", f"the job is ended: {cause}", code="stall", message=cause)
        failure = self._directories.failure
        with contextlib.suppress(OSError):
            failure.parent.mkdir(parents=True, exist_ok=True)
            with failure.open("x") as file:
                file.write(f"{cause}\n")
        if self._place.nodes > 1:
            time.sleep(OTHERS_SECONDS)
        self._delivery.finish(LAST_ALERT_SECONDS)
        self._ends = True
        for one in signs:
            if one.ending is Ending.RUNS:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(one.pid, signal.SIGKILL)

    # ------------------------------------------------------------------ ends

    def _heed_deaths(self, signs: Sequence[Sign]) -> None:
        """Say once of each process that it failed, or died without a word."""
        if self._ends:
            return
        for one, reader in zip(signs, self._readers, strict=False):
            dead = one.ending is Ending.RUNS and processes.state(one.pid) in "ZX"
            # It may have said goodbye since.
            if dead and reader.sign().ending is Ending.RUNS:
                reason = f"rank {one.rank} died without a word: killed, or out of memory"
                self._tell_failure(one, reason)
            elif one.ending is Ending.FAILED:
                self._tell_failure(one, self._failure_text() or f"rank {one.rank} failed")

    def _tell_failure(self, sign: Sign, reason: str) -> None:
        key = f"failure-{sign.rank}"
        if key in self._told:
            return
        self._told.add(key)
        where = f"in {sign.section.words} after step {sign.step}"
        if sign.ending is Ending.RUNS:
            self._events.warn(
                "rank-died", f"{reason}; {where}", step=sign.step, rank_died=sign.rank
            )
        alert = self._alert(
            "failure", "critical", "training has failed", f"{reason}; {where}", None
        )
        worst = f"node {self._place.node}, rank {sign.rank}"
        self._delivery.send(replace(alert, worst=worst))

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
        self._heed_deaths([reader.sign() for reader in self._readers][:1])
        self._delivery.finish(LAST_ALERT_SECONDS)

    # ------------------------------------------------------------------ alerts

    def _alert(self, key: str, level: str, title: str, symptom: str, burned: float | None) -> Alert:
        run = self._settings.run
        ends = self._settings.heartbeat.on_stall == "end" or key == "failure"
        job, region = os.environ.get("TRAINING_JOB_NAME"), os.environ.get("AWS_REGION")
        return Alert(
            key=key,
            level=level,
            title=title,
            run=run,
            stage=self._settings.stage.name,
            symptom=symptom,
            time=time.time(),
            burned_usd=burned,
            last_checkpoint=self._last_checkpoint(),
            command=f"sm-train resume {run}" if ends else f"sm-train stop {job or run}",
            console=f"https://{region}.console.aws.amazon.com/sagemaker/home?region={region}#/jobs/{job}"
            if job and region
            else None,
        )

    def _cost_since(self, now: float) -> float | None:
        """Dollars of all machines since the last sign."""
        price = self._settings.usd_per_instance_hour
        hours = (now - self._stalled_at) / 3600
        return None if price is None else price * self._place.nodes * hours

    def _last_checkpoint(self) -> str | None:
        with contextlib.suppress(OSError):
            found = [path.parent.name for path in self._directories.checkpoints.glob(MARKER)]
            return max(found, default=None)
        return None

    # ------------------------------------------------------------------ figures

    def _tell_beat(self, signs: Sequence[Sign], now: float) -> None:
        silences = self._patience.silences(signs, now)
        running = [one for one in signs if one.ending is Ending.RUNS] or signs
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

    def _measure(self, signs: Sequence[Sign], now: float) -> None:
        reading = self._machine.read(now, [one.pid for one in signs])
        before, self._reading = self._reading, reading
        ranks = [
            self._rank_fields(sign, reader)
            for sign, reader in zip(signs, self._readers, strict=True)
        ]
        if before is None:
            return
        figures = node_metrics.event_fields(before, reading)
        medians = [one["p50"] for one in ranks if one["p50"]]
        spread = max(medians) / min(medians) if medians else None
        waits = [one["data_wait_share"] for one in ranks if one["data_wait_share"] is not None]
        fields = {
            "straggler_ratio": spread,
            "data_wait_share_max": max(waits, default=None),
            **figures,
            "ranks": ranks,
        }
        self._events.write("node", _node_words(self._place.node, figures, spread), **_short(fields))

    def _rank_fields(self, sign: Sign, reader: Reader) -> dict[str, float | None]:
        """A line of the straggler table: what steps took since the last event, in seconds."""
        steps, waited, all_ = reader.steps(), reader.total(Section.DATA), reader.time()
        before = self._table.get(sign.rank, (NOTHING, 0.0, 0.0))
        self._table[sign.rank] = (steps, waited, all_)
        new, seconds = steps - before[0], all_ - before[2]
        return {
            "rank": sign.rank,
            "steps": len(new),
            "p50": new.quantile(0.5),
            "p90": new.quantile(0.9),
            "p99": new.quantile(0.99),
            "max": new.longest,
            "data_wait_share": (waited - before[1]) / seconds if seconds > 0 else None,
        }


def look_seconds(settings: Settings) -> float:
    """Between two looks."""
    return min(LOOK_SECONDS, settings.heartbeat.min / 8)


def _worst(blamed: Blame) -> str | None:
    if blamed.node is None and blamed.rank is None:
        return blamed.reason
    names = [f"node {blamed.node}"] if blamed.node is not None else []
    names += [f"rank {blamed.rank}"] if blamed.rank is not None else []
    return f"{', '.join(names)}: {blamed.reason}"


def _short(value: Any) -> Any:
    """Four digits of every figure: a line over 4 KiB would not be written in one piece."""
    if isinstance(value, dict):
        return {name: _short(one) for name, one in value.items()}
    if isinstance(value, list):
        return [_short(one) for one in value]
    return float(f"{value:.4g}") if isinstance(value, float) else value


def _node_words(node: int, figures: Mapping[str, object], spread: float | None) -> str:
    parts = [f"node {node}:"]
    for label, name in (
        ("received", "network_receive_bytes_per_second"),
        ("sent", "network_send_bytes_per_second"),
        ("read from files", "read_bytes_per_second"),
    ):
        value = figures[name]
        if isinstance(value, float):
            parts.append(f"{label} {value / 1e6:.1f} MB/s,")
    if spread is not None:
        parts.append(f"slowest rank {spread:.2f} × the fastest,")
    return " ".join(parts).rstrip(",:")


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
    try:
        _watch(read_settings(options.document, options.stage), options.pulses)
    finally:
        shutil.rmtree(options.pulses, ignore_errors=True)
        sys.stdout.flush()
        # Threads may hang in what hung the job.
        os._exit(0)


def _watch(settings: Settings, pulses: Path) -> None:
    directories = Directories.from_environment()
    hosts = Hosts.read(directories)
    local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    place = Place(hosts.rank, len(hosts.all), local)
    events = Events(node=hosts.rank, rank=int(os.environ.get("RANK", "0")))
    monitor = Monitor(
        settings, directories, place, pulses,
        events=events,
        delivery=Delivery(settings.alerts, events.warn),
        neighbours=_meet(settings, place, events),
    )  # fmt: skip
    parent = os.getppid()
    while not _ended(parent, monitor.look_seconds):
        try:
            monitor.look()
        except Exception as error:
            # Whatever it is, watching goes on.
            events.warn("monitor", f"a look failed: {type(error).__name__}: {error}")
            time.sleep(LOOK_SECONDS)
    monitor.finish()


def _meet(settings: Settings, place: Place, events: Events) -> Neighbours | None:
    address = meeting_point()
    if place.nodes == 1 or address is None:
        return None
    try:
        job = f"{settings.run}/{settings.stage.name}"
        return Neighbours(
            job, place.node, place.nodes, address, look_seconds=look_seconds(settings)
        )
    except OSError as error:
        events.warn("no-neighbours", f"this machine watches itself alone: {error}")
        return None


def _ended(parent: int, seconds: float) -> bool:
    """Wait so long for the end of the process that started this one."""
    readable, _, _ = select.select([sys.stdin], [], [], seconds)
    return bool(readable) or os.getppid() != parent


if __name__ == "__main__":
    main()
