"""What the stored records of a stage's nodes say about silence: pure functions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from sm_train.entrypoints.clusters.attempts import failed, named, newest_attempt
from sm_train.entrypoints.clusters.node_record import MISSING_SECONDS, StoredNode


@dataclass(frozen=True)
class Silence:
    """Nodes that should train and do not. ``key`` names the problem, as that of an alert.

    ``worst`` are the nodes to look at, ``seconds`` how long there has been no heartbeat, and
    ``purpose`` names the platform's command to run next.
    """

    key: str
    level: Literal["warning", "critical"]
    title: str
    symptom: str
    worst: str
    seconds: float
    purpose: str


def find_silence(nodes: Sequence[StoredNode], now: float) -> Silence | None:
    """Return what is wrong with the newest attempt of a stage; None if nothing is.

    ``nodes`` are all starts, oldest first, and ``now`` is in Unix seconds. Nothing is wrong before
    the first node has started, after a stop that was requested, and when all nodes ended well.
    """
    if not nodes:
        return None
    starts = newest_attempt(nodes)
    lost = [start for start in starts if start.is_lost(now)]
    if any(start.is_live(now) for start in starts):
        return _some_lost(lost, len(starts), now) if lost else None
    silent = now - max(start.seen for start in starts)
    if lost:
        return Silence(
            "silence",
            "critical",
            "no node sends heartbeats",
            f"no heartbeat of {named(lost)} for {silent / 60:.0f} minutes",
            named(lost),
            silent,
            "status",
        )
    if silent <= MISSING_SECONDS or _ended_as_planned(starts):
        return None
    ended = failed(starts) or starts
    codes = ", ".join(sorted({str(start.record.exit_code) for start in ended}))
    return Silence(
        "silence",
        "critical",
        "training has not been started again",
        f"{named(ended)} ended with exit code {codes}, and no node has started for "
        f"{silent / 60:.0f} minutes",
        named(ended),
        silent,
        "resume",
    )


def _some_lost(lost: Sequence[StoredNode], nodes: int, now: float) -> Silence:
    silent = now - max(start.seen for start in lost)
    return Silence(
        "silence of some",
        "warning",
        "nodes send no heartbeats",
        f"no heartbeat of {named(lost)} for {silent / 60:.0f} minutes; "
        f"{nodes - len(lost)} of {nodes} nodes still send theirs",
        named(lost),
        silent,
        "status",
    )


def _ended_as_planned(starts: Sequence[StoredNode]) -> bool:
    records = [start.record for start in starts]
    return any(record.stopped_by for record in records) or all(
        record.exit_code == 0 for record in records
    )
