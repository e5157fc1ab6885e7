"""When silence is a stall, and who is to blame: decisions, without a clock or an effect of theirs.

Each section has a limit of its own, learned from what its durations were. Before enough of them
are known, and in sections that come once, it is the longest one that the run file allows.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from sm_train.entrypoints.monitoring.heartbeat import (
    DurationHistogram,
    ExitState,
    HeartbeatSample,
    Phase,
)

TIMEOUT_FACTOR = 5.0
"""A section may take so many times as long as it ever has (as nvidia-resiliency-ext's, 2025)."""

MIN_OBSERVATIONS = {
    Phase.DATA: 50,
    Phase.STEP: 50,
    Phase.CHECKPOINT: 3,
    Phase.EVALUATION: 3,
    Phase.SAMPLES: 3,
}
"""Durations from which a limit is learned; the other sections come once and have none to learn."""

RARE = frozenset({Phase.CHECKPOINT, Phase.EVALUATION, Phase.SAMPLES})
"""Few durations teach less, and a disk may hesitate for long: the shortest limit is longer."""

RARE_SHORTEST = 5.0
"""So many times."""


@dataclass(frozen=True)
class TimeoutBounds:
    """Seconds between which limits are learned."""

    shortest: float
    longest: float

    def limit(self, section: Phase, durations: DurationHistogram) -> float:
        """Seconds after which silence in ``section`` is a stall.

        ``TIMEOUT_FACTOR`` times the longest duration so far, and more where durations vary widely:
        in a heavy tail the next record exceeds the last by as much as the last exceeded the median.
        """
        longest, median = durations.longest, durations.quantile(0.5)
        if len(durations) < MIN_OBSERVATIONS.get(section, len(durations) + 1):
            return self.longest
        if not longest or not median:
            return self.longest
        learned = longest * max(TIMEOUT_FACTOR, longest / median)
        shortest = self.shortest * (RARE_SHORTEST if section in RARE else 1)
        return min(max(learned, shortest), self.longest)


class StallDetector:
    """How long each process has been silent, and whether that is too long.

    ``pause`` is a gap between two looks after which the machine itself, and so everything on it,
    is taken to have stood still: frozen, suspended, or its clock set.
    """

    def __init__(self, bounds: TimeoutBounds, *, pause: float) -> None:
        self._bounds, self._pause = bounds, pause
        self._looked: float | None = None
        self._forgiven: dict[int, tuple[int, float]] = {}
        self.limits: dict[Phase, float] = dict.fromkeys(Phase, bounds.longest)

    def learn(self, durations: Mapping[Phase, DurationHistogram]) -> None:
        """Take over what the sections' durations were, over all processes of the machine."""
        for section, found in durations.items():
            self.limits[section] = self._bounds.limit(section, found)

    def resume(self, now: float) -> None:
        """Go on after a while without a look in which everything else could run."""
        self._looked = now

    def silences(self, signs: Iterable[HeartbeatSample], now: float) -> dict[int, float]:
        """Rank → seconds since its last sign, without those in which nothing here could run."""
        gap = 0.0 if self._looked is None else now - self._looked
        self._looked = now
        lost = gap if gap > self._pause or gap < 0 else 0.0
        silences = {}
        for sign in signs:
            marks, forgiven = self._forgiven.get(sign.rank, (sign.marks, 0.0))
            forgiven = forgiven + lost if marks == sign.marks else 0.0
            self._forgiven[sign.rank] = (sign.marks, forgiven)
            silences[sign.rank] = max(0.0, now - sign.since - forgiven)
        return silences

    def overdue(self, signs: Iterable[HeartbeatSample], now: float) -> list[HeartbeatSample]:
        """Processes that have been silent for longer than their section's limit."""
        found = list(signs)
        silences = self.silences(found, now)
        return [
            sign
            for sign in found
            if sign.ending is ExitState.RUNS and silences[sign.rank] > self.limits[sign.section]
        ]


@dataclass(frozen=True)
class RankStatus:
    """A process with what its machine says of it: ``state`` as in ``/proc/PID/stat``.

    ``waits`` tells whether its main thread stands in a collective; None where that is not known.
    """

    rank: int
    node: int
    section: Phase
    step: int
    marks: int
    state: str = "S"
    waits: bool | None = None


@dataclass(frozen=True)
class Culprit:
    """``rank`` and ``node`` are None where nothing tells one process from the others."""

    rank: int | None
    node: int | None
    reason: str


_STATES = {
    "Z": "is dead",
    "X": "is dead",
    "T": "is stopped (SIGSTOP)",
    "t": "is stopped by a debugger",
}


def find_culprit(seen: Sequence[RankStatus], silent_nodes: Mapping[int, float]) -> Culprit:
    """Which process keeps the others waiting.

    All pass through the same sections in one order, so the one that has entered the fewest is
    behind. ``silent_nodes`` are machines of which nothing has been heard for so many seconds.
    """
    for one in seen:
        if one.state in _STATES:
            return Culprit(one.rank, one.node, f"rank {one.rank} {_STATES[one.state]}")
    if silent_nodes:
        node, seconds = max(silent_nodes.items(), key=lambda item: item[1])
        return Culprit(None, node, f"node {node} has not been heard of for {seconds:.0f} s")
    fewest = min(one.marks for one in seen)
    behind = [one for one in seen if one.marks == fewest]
    if len(behind) < len(seen):
        first = behind[0]
        where = f"{first.section.words} after step {first.step}"
        if len(behind) == 1:
            ahead = max(one.marks for one in seen) - fewest
            return Culprit(
                first.rank, first.node, f"rank {first.rank} is {ahead} sections behind: {where}"
            )
        ranks = ", ".join(str(one.rank) for one in behind[:8])
        together = len({one.node for one in behind}) == 1
        return Culprit(
            None, first.node if together else None, f"ranks {ranks} are behind the others: {where}"
        )
    busy = [one for one in seen if one.waits is False]
    waiting = [one for one in seen if one.waits]
    if len(busy) == 1 and len(waiting) == len(seen) - 1 and waiting:
        reason = f"rank {busy[0].rank} is the only one that does not wait in a collective"
        return Culprit(busy[0].rank, busy[0].node, reason)
    if len(seen) == 1:
        return Culprit(seen[0].rank, seen[0].node, f"rank {seen[0].rank} is the only one")
    one = seen[0]
    return Culprit(
        None, None, f"all ranks stand at the same place: {one.section.words} after step {one.step}"
    )
