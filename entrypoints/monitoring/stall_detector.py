"""Decides when silence is a stall and which rank is the culprit. Pure: no clock, no effects.

Each phase has its own timeout, learned from its latest durations without stalls and isolated
pauses. Until enough durations are known, and in phases that happen only once, it is the longest one
that the run file allows.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from sm_train.entrypoints.monitoring.heartbeat import (
    EMPTY_HISTOGRAM,
    DurationHistogram,
    ExitState,
    HeartbeatSample,
    Phase,
)

TIMEOUT_FACTOR = 5.0
"""A phase may take this many times its longest duration (as in nvidia-resiliency-ext, 2025)."""

PAUSE_FACTOR, PAUSE_ALLOWANCE = 1.05, 1.45
"""The longest durations may each exceed the next one by ``PAUSE_FACTOR``: one that exceeds it by
more is an isolated pause. All of them extend the timeout at most ``PAUSE_ALLOWANCE`` times. So one
pause extends a timeout at most PAUSE_FACTOR² · PAUSE_ALLOWANCE = 1.6 times, three of them twice.
Smaller values raise false alarms in runs with heavy tails (tests/entrypoints/monitoring)."""

_MAX_PAUSES = 300
"""PAUSE_FACTOR to this power exceeds the ratio of any two durations."""

MIN_MEDIAN = 0.05
"""Shortest median, in seconds: waits for prefetched data take a millisecond, and any pause is a
thousand times as long."""

MIN_OBSERVATIONS = {
    Phase.DATA: 50,
    Phase.STEP: 50,
    Phase.CHECKPOINT: 3,
    Phase.EVALUATION: 3,
    Phase.SAMPLES: 3,
}
"""Durations needed to learn a timeout; the other phases happen once and have none to learn from."""

WINDOW_DURATIONS = {
    Phase.DATA: 1000,
    Phase.STEP: 1000,
    Phase.CHECKPOINT: 20,
    Phase.EVALUATION: 20,
    Phase.SAMPLES: 20,
}
"""A timeout is learned from at least this many of each rank's latest durations, if there are as
many, and at most twice as many."""

RARE_PHASES = frozenset({Phase.CHECKPOINT, Phase.EVALUATION, Phase.SAMPLES})
RARE_MIN_FACTOR = 5.0
"""The shortest timeout of a rare phase, as a multiple of other phases': it is learned from few
durations, and a disk may pause for long."""


@dataclass(frozen=True)
class TimeoutBounds:
    """The shortest and the longest timeout that may be learned, in seconds."""

    shortest: float
    longest: float

    def timeout(self, phase: Phase, durations: DurationHistogram, ranks: int = 1) -> float:
        """Return the seconds after which silence in ``phase`` is a stall.

        This is ``TIMEOUT_FACTOR`` times the longest duration, and more if durations vary widely: in
        a heavy tail the next record exceeds the last one by about as much as the last one exceeded
        the median, and by more if few durations are known. ``durations`` are those of so many
        ``ranks``, which a pause hits together.
        """
        median = durations.quantile(0.5)
        if median is None or len(durations) < MIN_OBSERVATIONS.get(phase, len(durations) + 1):
            return self.longest
        shortest = self.shortest * (RARE_MIN_FACTOR if phase in RARE_PHASES else 1)

        # A heavy tail counts five times as much at first, and ever less later.
        few = min(TIMEOUT_FACTOR, 1 + 5 * MIN_OBSERVATIONS[phase] * ranks / len(durations))

        def learned(longest: float) -> float:
            ratio = few * longest / max(median, MIN_MEDIAN)
            return max(shortest, longest * max(TIMEOUT_FACTOR, ratio))

        records = durations.longest_values(_MAX_PAUSES, ranks)
        # The n-th longest duration bounds the longest one: each may exceed the next by a factor.
        usual = learned(min(value * PAUSE_FACTOR**n for n, value in enumerate(records)))
        return min(learned(records[0]), PAUSE_ALLOWANCE * usual, self.longest)


class _LatestDurations:
    """A phase's latest durations, in two generations: when one is full, the older is forgotten."""

    def __init__(self) -> None:
        self._seen = self._older = self._newer = EMPTY_HISTOGRAM

    def add(self, all_durations: DurationHistogram, *, timeout: float, generation: int) -> None:
        """Add what is new in ``all_durations``, but no stalls: durations above ``timeout``."""
        new = all_durations - self._seen
        self._seen = all_durations
        self._newer += new.up_to(timeout)
        if len(self._newer) >= generation:
            self._older, self._newer = self._newer, EMPTY_HISTOGRAM

    @property
    def durations(self) -> DurationHistogram:
        return self._older + self._newer


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
        self._latest = {phase: _LatestDurations() for phase in Phase}
        self.timeouts: dict[Phase, float] = dict.fromkeys(Phase, bounds.longest)

    def learn(self, durations: Mapping[Phase, DurationHistogram], ranks: int = 1) -> None:
        """Set the timeouts of phases from all their durations so far, on ``ranks`` of the node."""
        for phase, histogram in durations.items():
            self._latest[phase].add(
                histogram,
                timeout=self.timeouts[phase],
                generation=WINDOW_DURATIONS[phase] * ranks,
            )
            self.timeouts[phase] = self._bounds.timeout(phase, self.durations(phase), ranks)

    def durations(self, phase: Phase) -> DurationHistogram:
        """Return the durations from which the phase's timeout was learned."""
        return self._latest[phase].durations

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
            and silences[sample.rank] > self.timeout(sample)
        ]

    def timeout(self, sample: HeartbeatSample) -> float:
        """Return the seconds after which the silence of a process is a stall.

        That of a compilation cannot be learned: each compiles other layers or shapes.
        """
        return self._bounds.longest if sample.compiling else self.timeouts[sample.phase]


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
    for status in ranks:
        if status.state in _STATES:
            return Culprit(status.rank, status.node, f"rank {status.rank} {_STATES[status.state]}")
    if silent_nodes:
        node, seconds = max(silent_nodes.items(), key=lambda item: item[1])
        return Culprit(None, node, f"node {node} has sent nothing for {seconds:.0f} s")
    lowest = min(rank.sequence for rank in ranks)
    behind = [rank for rank in ranks if rank.sequence == lowest]
    if len(behind) < len(ranks):
        return _lagging(behind, max(rank.sequence for rank in ranks) - lowest)
    busy = [rank for rank in ranks if rank.in_collective is False]
    waiting = [rank for rank in ranks if rank.in_collective]
    if len(busy) == 1 and len(waiting) == len(ranks) - 1 and waiting:
        reason = f"rank {busy[0].rank} is the only one that does not wait in a collective"
        return Culprit(busy[0].rank, busy[0].node, reason)
    if len(ranks) == 1:
        return Culprit(ranks[0].rank, ranks[0].node, f"rank {ranks[0].rank} is the only one")
    first = ranks[0]
    return Culprit(
        None, None, f"all ranks are in the same phase: {first.phase.label} after step {first.step}"
    )


def _lagging(behind: Sequence[RankStatus], distance: int) -> Culprit:
    first = behind[0]
    where = f"{first.phase.label} after step {first.step}"
    if len(behind) == 1:
        reason = f"rank {first.rank} is {distance} phases behind: {where}"
        return Culprit(first.rank, first.node, reason)
    ranks = ", ".join(str(status.rank) for status in behind[:8])
    on_one_node = len({status.node for status in behind}) == 1
    return Culprit(
        None, first.node if on_one_node else None, f"ranks {ranks} are behind the others: {where}"
    )
