"""Decides when silence is a stall and which rank is the culprit. Pure: no clock, no effects.

Each phase has its own timeout, learned from its durations so far. Until enough of them are known,
and in phases that happen only once, it is the longest one that the run file allows.
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
"""A phase may take this many times its longest duration (as in nvidia-resiliency-ext, 2025)."""

MIN_OBSERVATIONS = {
    Phase.DATA: 50,
    Phase.STEP: 50,
    Phase.CHECKPOINT: 3,
    Phase.EVALUATION: 3,
    Phase.SAMPLES: 3,
}
"""Durations needed to learn a timeout; the other phases happen once and have none to learn from."""

RARE_PHASES = frozenset({Phase.CHECKPOINT, Phase.EVALUATION, Phase.SAMPLES})
RARE_MIN_FACTOR = 5.0
"""The shortest timeout of a rare phase, as a multiple of other phases': it is learned from few
durations, and a disk may pause for long."""


@dataclass(frozen=True)
class TimeoutBounds:
    """The shortest and the longest timeout that may be learned, in seconds."""

    shortest: float
    longest: float

    def timeout(self, phase: Phase, durations: DurationHistogram) -> float:
        """Return the seconds after which silence in ``phase`` is a stall.

        This is ``TIMEOUT_FACTOR`` times the longest duration so far, and more if durations vary
        widely: in a heavy tail the next record exceeds the last one by about as much as the last
        one exceeded the median.
        """
        longest, median = durations.longest, durations.quantile(0.5)
        if len(durations) < MIN_OBSERVATIONS.get(phase, len(durations) + 1):
            return self.longest
        if not longest or not median:
            return self.longest
        learned = longest * max(TIMEOUT_FACTOR, longest / median)
        shortest = self.shortest * (RARE_MIN_FACTOR if phase in RARE_PHASES else 1)
        return min(max(learned, shortest), self.longest)


class StallDetector:
    """Tracks how long each process has been silent, and whether that is too long.

    If two polls are more than ``max_gap`` seconds apart, the node itself was frozen or suspended,
    or its clock was set; such gaps do not count as silence.
    """

    def __init__(self, bounds: TimeoutBounds, *, max_gap: float) -> None:
        self._bounds, self._max_gap = bounds, max_gap
        self._last_poll: float | None = None
        # rank → (sequence, seconds of gaps since that heartbeat)
        self._gaps: dict[int, tuple[int, float]] = {}
        self.timeouts: dict[Phase, float] = dict.fromkeys(Phase, bounds.longest)

    def learn(self, durations: Mapping[Phase, DurationHistogram]) -> None:
        """Set the timeouts of phases from their durations on all processes of the node."""
        for phase, histogram in durations.items():
            self.timeouts[phase] = self._bounds.timeout(phase, histogram)

    def resume(self, now: float) -> None:
        """Continue after a pause between polls in which other processes could run."""
        self._last_poll = now

    def silences(self, samples: Iterable[HeartbeatSample], now: float) -> dict[int, float]:
        """Return rank → seconds since its last heartbeat, without gaps."""
        elapsed = 0.0 if self._last_poll is None else now - self._last_poll
        self._last_poll = now
        gap = elapsed if elapsed > self._max_gap or elapsed < 0 else 0.0
        silences = {}
        for sample in samples:
            sequence, gaps = self._gaps.get(sample.rank, (sample.sequence, 0.0))
            gaps = gaps + gap if sequence == sample.sequence else 0.0
            self._gaps[sample.rank] = (sample.sequence, gaps)
            silences[sample.rank] = max(0.0, now - sample.since - gaps)
        return silences

    def overdue(self, samples: Iterable[HeartbeatSample], now: float) -> list[HeartbeatSample]:
        """Return running processes that have been silent for longer than their phase's timeout."""
        samples = list(samples)
        silences = self.silences(samples, now)
        return [
            sample
            for sample in samples
            if sample.exit_state is ExitState.RUNNING
            and silences[sample.rank] > self.timeouts[sample.phase]
        ]


@dataclass(frozen=True)
class RankStatus:
    """A process as its node sees it: ``state`` as in ``/proc/PID/stat``.

    ``in_collective`` is whether its main thread waits in a collective; None if unknown.
    """

    rank: int
    node: int
    phase: Phase
    step: int
    sequence: int
    state: str = "S"
    in_collective: bool | None = None


@dataclass(frozen=True)
class Culprit:
    """The cause of a stall; ``rank`` and ``node`` are None if nothing singles one out."""

    rank: int | None
    node: int | None
    reason: str


_STATES = {
    "Z": "is dead",
    "X": "is dead",
    "T": "is stopped (SIGSTOP)",
    "t": "is stopped by a debugger",
}


def find_culprit(ranks: Sequence[RankStatus], silent_nodes: Mapping[int, float]) -> Culprit:
    """Return the process that the others wait for.

    All ranks go through the same phases in one order, so the one that has entered the fewest is
    behind. ``silent_nodes`` maps nodes that send nothing to their seconds of silence.
    """
    for one in ranks:
        if one.state in _STATES:
            return Culprit(one.rank, one.node, f"rank {one.rank} {_STATES[one.state]}")
    if silent_nodes:
        node, seconds = max(silent_nodes.items(), key=lambda item: item[1])
        return Culprit(None, node, f"node {node} has sent nothing for {seconds:.0f} s")
    lowest = min(one.sequence for one in ranks)
    behind = [one for one in ranks if one.sequence == lowest]
    if len(behind) < len(ranks):
        return _lagging(behind, max(one.sequence for one in ranks) - lowest)
    busy = [one for one in ranks if one.in_collective is False]
    waiting = [one for one in ranks if one.in_collective]
    if len(busy) == 1 and len(waiting) == len(ranks) - 1 and waiting:
        reason = f"rank {busy[0].rank} is the only one that does not wait in a collective"
        return Culprit(busy[0].rank, busy[0].node, reason)
    if len(ranks) == 1:
        return Culprit(ranks[0].rank, ranks[0].node, f"rank {ranks[0].rank} is the only one")
    one = ranks[0]
    return Culprit(
        None, None, f"all ranks are in the same phase: {one.phase.label} after step {one.step}"
    )


def _lagging(behind: Sequence[RankStatus], distance: int) -> Culprit:
    first = behind[0]
    where = f"{first.phase.label} after step {first.step}"
    if len(behind) == 1:
        reason = f"rank {first.rank} is {distance} phases behind: {where}"
        return Culprit(first.rank, first.node, reason)
    ranks = ", ".join(str(one.rank) for one in behind[:8])
    on_one_node = len({one.node for one in behind}) == 1
    return Culprit(
        None, first.node if on_one_node else None, f"ranks {ranks} are behind the others: {where}"
    )
