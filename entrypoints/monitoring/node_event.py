"""The ``node`` event: a node's metrics and straggler table since the previous event."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from sm_train.entrypoints.common.events import EventLog
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
        # rank → (step durations, data wait seconds, total seconds) at the last event
        self._previous: dict[int, tuple[DurationHistogram, float, float]] = {}
        self._measuring: threading.Thread | None = None

    def start_measuring(self, readers: Sequence[HeartbeatReader], now: float) -> None:
        """Measure in a thread, unless the last measurement still runs: a GPU driver may hang."""
        if self._measuring is None or not self._measuring.is_alive():
            self._measuring = threading.Thread(
                target=self.measure, args=(list(readers), now), daemon=True
            )
            self._measuring.start()

    def measure(self, readers: Sequence[HeartbeatReader], now: float) -> None:
        """Read all counters and log the event."""
        self._counters = self._counters or self._open_counters()
        reading = self._counters.read(now, [reader.sample().pid for reader in readers])
        before, self._reading = self._reading, reading
        ranks = [self._straggler_row(reader) for reader in readers]
        if before is None:
            return
        figures = node_metrics.event_fields(before, reading)
        medians = [one["p50"] for one in ranks if one["p50"]]
        straggler_ratio = max(medians) / min(medians) if medians else None
        waits = [one["data_wait_share"] for one in ranks if one["data_wait_share"] is not None]
        fields = {
            "straggler_ratio": straggler_ratio,
            "data_wait_share_max": max(waits, default=None),
            **figures,
            "ranks": ranks,
        }
        text = _text(self._node, figures, straggler_ratio)
        self._events.write("node", text, **_rounded(fields))

    def _straggler_row(self, reader: HeartbeatReader) -> dict[str, float | None]:
        """Return a row of the straggler table: step durations in seconds since the last event."""
        rank = reader.sample().rank
        steps, data_wait = reader.step_durations(), reader.seconds_in(Phase.DATA)
        total = reader.total_seconds()
        previous = self._previous.get(rank, (EMPTY_HISTOGRAM, 0.0, 0.0))
        self._previous[rank] = (steps, data_wait, total)
        new, seconds = steps - previous[0], total - previous[2]
        return {
            "rank": rank,
            "steps": len(new),
            "p50": new.quantile(0.5),
            "p90": new.quantile(0.9),
            "p99": new.quantile(0.99),
            "max": new.longest,
            "data_wait_share": (data_wait - previous[1]) / seconds if seconds > 0 else None,
        }


def _rounded(value: Any) -> Any:
    """Round every figure to four digits: a line over 4 KiB would not be written atomically."""
    if isinstance(value, dict):
        return {name: _rounded(one) for name, one in value.items()}
    if isinstance(value, list):
        return [_rounded(one) for one in value]
    return float(f"{value:.4g}") if isinstance(value, float) else value


def _text(node: int, figures: Mapping[str, Any], straggler_ratio: float | None) -> str:
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
    if straggler_ratio is not None:
        parts.append(f"slowest rank {straggler_ratio:.2f} × the fastest")
    return f"node {node}: {', '.join(parts)}"
