"""The ``node`` event: a machine's figures and its straggler table, since the event before."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from sm_train.entrypoints.common.events import EventLog
from sm_train.entrypoints.monitoring import node_metrics
from sm_train.entrypoints.monitoring.heartbeat import (
    NOTHING,
    DurationHistogram,
    HeartbeatReader,
    Phase,
)


class NodeReport:
    """Of one machine. The first event comes with the second measurement."""

    def __init__(
        self,
        events: EventLog,
        node: int,
        machine: Callable[[], node_metrics.NodeCounters] = node_metrics.NodeCounters.here,
    ) -> None:
        self._events, self._node, self._find_machine = events, node, machine
        self._machine: node_metrics.NodeCounters | None = None
        self._reading: node_metrics.Reading | None = None
        self._table: dict[int, tuple[DurationHistogram, float, float]] = {}
        self._measuring: threading.Thread | None = None

    def begin(self, readers: Sequence[HeartbeatReader], now: float) -> None:
        """Measure in a thread, unless the last measurement hangs: a GPU's driver may."""
        if self._measuring is None or not self._measuring.is_alive():
            self._measuring = threading.Thread(
                target=self.measure, args=(list(readers), now), daemon=True
            )
            self._measuring.start()

    def measure(self, readers: Sequence[HeartbeatReader], now: float) -> None:
        """Read everything, and write the event."""
        self._machine = self._machine or self._find_machine()
        reading = self._machine.read(now, [reader.sign().pid for reader in readers])
        before, self._reading = self._reading, reading
        ranks = [self._line(reader) for reader in readers]
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
        self._events.write("node", _words(self._node, figures, spread), **_short(fields))

    def _line(self, reader: HeartbeatReader) -> dict[str, float | None]:
        """A line of the straggler table: what steps took since the last event, in seconds."""
        rank = reader.sign().rank
        steps, waited, all_ = reader.steps(), reader.total(Phase.DATA), reader.time()
        before = self._table.get(rank, (NOTHING, 0.0, 0.0))
        self._table[rank] = (steps, waited, all_)
        new, seconds = steps - before[0], all_ - before[2]
        return {
            "rank": rank,
            "steps": len(new),
            "p50": new.quantile(0.5),
            "p90": new.quantile(0.9),
            "p99": new.quantile(0.99),
            "max": new.longest,
            "data_wait_share": (waited - before[1]) / seconds if seconds > 0 else None,
        }


def _short(value: Any) -> Any:
    """Four digits of every figure: a line over 4 KiB would not be written in one piece."""
    if isinstance(value, dict):
        return {name: _short(one) for name, one in value.items()}
    if isinstance(value, list):
        return [_short(one) for one in value]
    return float(f"{value:.4g}") if isinstance(value, float) else value


def _words(node: int, figures: Mapping[str, Any], spread: float | None) -> str:
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
    if spread is not None:
        parts.append(f"slowest rank {spread:.2f} × the fastest")
    return f"node {node}: {', '.join(parts)}"
