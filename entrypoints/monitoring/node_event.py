"""The ``node`` event: a node's metrics and its ranks' times since the previous event."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sm_train.entrypoints.base.atomic_write import write_atomic
from sm_train.entrypoints.job_interface.events import EventLog
from sm_train.entrypoints.monitoring import node_metrics
from sm_train.entrypoints.monitoring.heartbeat import (
    EMPTY_HISTOGRAM,
    DurationHistogram,
    HeartbeatReader,
    Phase,
)


class NodeReport:
    """Measures one node and logs its events, the first one after the second measurement."""

    def __init__(
        self,
        events: EventLog,
        node: int,
        open_counters: Callable[[], node_metrics.NodeCounters] = node_metrics.NodeCounters.open,
    ) -> None:
        self._events, self._node, self._open_counters = events, node, open_counters
        self._counters: node_metrics.NodeCounters | None = None
        self._reading: node_metrics.Reading | None = None
        # rank → its totals at the last event
        self._previous: dict[int, _RankTotals] = {}
        self._measuring: threading.Thread | None = None

    def start_measuring(
        self, readers: Sequence[HeartbeatReader], now: float, job_fields: Mapping[str, Any]
    ) -> None:
        """Call :meth:`measure` in a thread, unless the last one still runs: a driver may hang."""
        if self._measuring is None or not self._measuring.is_alive():
            self._measuring = threading.Thread(
                target=self.measure, args=(list(readers), now, job_fields), daemon=True
            )
            self._measuring.start()

    def measure(
        self, readers: Sequence[HeartbeatReader], now: float, job_fields: Mapping[str, Any]
    ) -> None:
        """Read all counters and log the event; ``job_fields`` are added to it."""
        self._counters = self._counters or self._open_counters()
        reading = self._counters.read(now, [reader.process.pid for reader in readers])
        before, self._reading = self._reading, reading
        totals = [_RankTotals.read(reader) for reader in readers]
        ranks = [self._rank_row(rank) for rank in totals if rank is not None]
        if before is None:
            return
        figures = node_metrics.event_fields(before, reading)
        waits = [rank["data_wait_share"] for rank in ranks if rank["data_wait_share"] is not None]
        fields = {
            "data_wait_share_max": max(waits, default=None),
            **figures,
            **job_fields,
            "ranks": ranks,
        }
        self._events.write("node", _text(self._node, figures), **_rounded(fields))

    def _rank_row(self, now: _RankTotals) -> dict[str, float | None]:
        """Return a rank's row: durations of whole steps and busy seconds since the last event."""
        before = self._previous.get(now.rank, _NO_TOTALS)
        self._previous[now.rank] = now
        steps, seconds = now.steps - before.steps, now.total - before.total
        timed = now.busy_steps - before.busy_steps
        row = {
            "rank": now.rank,
            "steps": len(steps),
            "p50": steps.quantile(0.5),
            "p90": steps.quantile(0.9),
            "p99": steps.quantile(0.99),
            "max": steps.longest,
            "data_wait_share": (now.data_wait - before.data_wait) / seconds
            if seconds > 0
            else None,
        }
        if timed > 0:
            row["busy_seconds"] = (now.busy - before.busy) / timed
            row["cpu_wait_seconds"] = (now.cpu_wait - before.cpu_wait) / timed
        return row


class LastNodeEvent:
    """Keeps the last ``node`` event in a file, for trackers: a subscriber of :class:`EventLog`."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._lock = threading.Lock()
        self._is_closed = False

    def __call__(self, kind: str, line: str) -> None:
        """Write an event's line; a folder that is full or gone changes nothing."""
        if kind != "node":
            return
        with self._lock, contextlib.suppress(OSError):
            if not self._is_closed:
                write_atomic(self._file, line.encode())

    def close(self) -> None:
        """Write nothing from now on: threads still log while the folder is removed."""
        with self._lock:
            self._is_closed = True


@dataclass(frozen=True)
class _RankTotals:
    """A rank's counters since its start; times in seconds."""

    rank: int
    steps: DurationHistogram
    data_wait: float
    total: float
    busy_steps: int
    busy: float
    cpu_wait: float

    @classmethod
    def read(cls, reader: HeartbeatReader) -> _RankTotals | None:
        """Return the totals that ``reader`` sees; None without a valid record of busy times."""
        busy = reader.busy()
        if busy is None:
            return None
        return cls(
            reader.process.rank,
            reader.step_durations(),
            reader.seconds_in(Phase.DATA),
            reader.total_seconds(),
            *busy,
        )


_NO_TOTALS = _RankTotals(0, EMPTY_HISTOGRAM, 0.0, 0.0, 0, 0.0, 0.0)


def _rounded(value: Any) -> Any:
    """Round every figure to four digits: a line over 4 KiB would not be written atomically."""
    if isinstance(value, dict):
        return {name: _rounded(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_rounded(item) for item in value]
    return float(f"{value:.4g}") if isinstance(value, float) else value


def _text(node: int, figures: Mapping[str, Any]) -> str:
    parts = [
        f"{label} {figures[name] / 1e6:.1f} MB/s"
        for label, name in (
            ("received", "network_receive_bytes_per_second"),
            ("sent", "network_send_bytes_per_second"),
            ("read from files", "read_bytes_per_second"),
        )
        if figures[name] is not None
    ]
    if figures["gpu_utilization_mean"] is not None:
        parts.append(f"GPUs at {figures['gpu_utilization_mean']:.0f} %")
    return f"node {node}: {', '.join(parts)}"
