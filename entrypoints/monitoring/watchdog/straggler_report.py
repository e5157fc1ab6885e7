"""Reports stragglers: as events, as alerts, and as fields of the ``node`` event."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from sm_train.entrypoints.job_interface.events import EventLog
from sm_train.entrypoints.monitoring.alert_messages import AlertFormatter
from sm_train.entrypoints.monitoring.alert_sinks import AlertDispatcher
from sm_train.entrypoints.monitoring.alerts import REPEAT_SECONDS
from sm_train.entrypoints.monitoring.stragglers import BusyTotals, Straggler, StragglerDetector

_MAX_LISTED = 4
"""Stragglers and nodes in one event, whose line must stay below 4 KiB."""


class StragglerReport:
    """Compares all ranks of the job, on the node that knows them."""

    def __init__(
        self, events: EventLog, dispatcher: AlertDispatcher, formatter: AlertFormatter
    ) -> None:
        self._events, self._dispatcher, self._formatter = events, dispatcher, formatter
        self._detector = StragglerDetector()
        # (rank or None, node) → when it was last reported
        self._reported_at: dict[tuple[int | None, int], float] = {}

    def add(self, totals: Iterable[BusyTotals], now: float, *, step: int) -> None:
        """Add all ranks' totals at ``now`` (seconds), and report new stragglers."""
        if not self._detector.add(totals, now):
            return
        for straggler in self._detector.stragglers()[:_MAX_LISTED]:
            key = (straggler.rank, straggler.node)
            if now - self._reported_at.get(key, -REPEAT_SECONDS) < REPEAT_SECONDS:
                continue
            self._reported_at[key] = now
            message = describe(straggler)
            self._events.warn(
                "straggler",
                message,
                step=step,
                straggler_rank=straggler.rank,
                straggler_node=straggler.node,
                ratio=round(straggler.ratio, 3),
                busy_seconds=float(f"{straggler.busy_seconds:.4g}"),
                lost_share=round(straggler.lost_share, 4),
            )
            self._dispatcher.send(self._formatter.straggler(message, straggler))

    def fields(self) -> dict[str, Any]:
        """Return the ``node`` event's fields about the whole job; None is unknown."""
        detector = self._detector
        skews = sorted(detector.arrival_skew().items(), key=lambda item: -item[1])
        return {
            "straggler_ratio": detector.slowest_ratio(),
            "stragglers": _rows(detector.stragglers()) if detector.is_known else None,
            "arrival_skew": [
                {"node": node, "seconds": seconds} for node, seconds in skews[:_MAX_LISTED]
            ],
        }


def _rows(stragglers: Sequence[Straggler]) -> list[dict[str, Any]]:
    return [
        {
            "rank": straggler.rank,
            "node": straggler.node,
            "busy_seconds": straggler.busy_seconds,
            "ratio": straggler.ratio,
        }
        for straggler in stragglers[:_MAX_LISTED]
    ]


def describe(straggler: Straggler) -> str:
    """Return one sentence about a straggler."""
    who = f"rank {straggler.rank} on node {straggler.node}"
    if straggler.rank is None:
        who = f"every rank on node {straggler.node}"
    return (
        f"{who} is a straggler: busy for {straggler.busy_seconds:.3g} s of each step, "
        f"{straggler.ratio:.2f} × the other ranks; they wait for it {straggler.lost_share:.0%} of "
        "the time"
    )
