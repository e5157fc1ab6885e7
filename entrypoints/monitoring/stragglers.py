"""Finds ranks that the others wait for in every step, from their busy times. Pure.

Whole steps take equally long on all ranks of a synchronous job. A rank's busy time is the part of
its steps outside collectives. It is compared without the part in which other programs used the CPU
cores: on a loaded node that is large, and random.

One slow step proves nothing, and one pause changes the mean of many. So busy times per step are
compared in windows of :data:`WINDOW_SECONDS`, and a rank is a straggler only if the lower bound of
its ratio to the others, over the latest windows, is above :data:`STRAGGLER_RATIO`.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median, stdev

STRAGGLER_RATIO = 1.1
"""A straggler is busy for more than this multiple of the other ranks' median busy time."""

MIN_LOST_SHARE = 0.02
"""A rank that delays the others by less than this share of the step is not reported."""

WINDOW_SECONDS = 10.0
WINDOW_STEPS = 2
"""Shortest window: so many seconds, and so many steps of every rank."""

MIN_WINDOWS, MAX_WINDOWS = 6, 12
"""Windows needed for a verdict, and windows that it looks back. A rank that is slow in either the
latest few or all of them is a straggler: a short look back is quick, a long one is exact."""

CONFIDENCE = 3.0
"""Standard errors between a rank's mean ratio and its lower bound (logarithms). Measured with Gloo
on two CPU cores at load 25 to 35, a healthy rank's ratio has a standard deviation of 0.03 to 0.11
per window, so its bound reaches :data:`STRAGGLER_RATIO` less than once in a week of training."""


@dataclass(frozen=True)
class BusyTotals:
    """What one rank has spent so far outside collectives, over ``steps`` optimizer steps.

    ``cpu_wait_seconds`` is the part of it in which its main thread was ready to run, but other
    programs used the CPU cores.
    """

    rank: int
    node: int
    steps: int
    busy_seconds: float
    cpu_wait_seconds: float

    def since(self, earlier: BusyTotals) -> BusyTotals:
        """Return what was added since ``earlier``."""
        return BusyTotals(
            self.rank,
            self.node,
            self.steps - earlier.steps,
            self.busy_seconds - earlier.busy_seconds,
            self.cpu_wait_seconds - earlier.cpu_wait_seconds,
        )

    @property
    def own_seconds(self) -> float:
        """Mean busy seconds per step without waits for a CPU core; at least a microsecond."""
        return max(1e-6, (self.busy_seconds - self.cpu_wait_seconds) / self.steps)


@dataclass(frozen=True)
class Straggler:
    """A rank that the others wait for, or a node (``rank`` is None) of which all ranks are slow.

    ``busy_seconds`` is the mean per step, ``ratio`` its multiple of the other ranks' median, and
    ``lost_share`` the part of a step by which it delays the others.
    """

    rank: int | None
    node: int
    busy_seconds: float
    ratio: float
    lost_share: float


@dataclass(frozen=True)
class _Window:
    """What every rank added in ``seconds``, by rank."""

    seconds: float
    ranks: Mapping[int, BusyTotals]

    def excess(self, rank: int) -> tuple[float, float]:
        """Return the logarithm of a rank's ratio to the others, and the lost share of a step."""
        own = self.ranks[rank]
        typical = median(
            totals.own_seconds for totals in self.ranks.values() if totals.rank != rank
        )
        lost = (own.own_seconds - typical) * own.steps / self.seconds
        return math.log(own.own_seconds / typical), lost


class StragglerDetector:
    """Compares the ranks of a job; call :meth:`add` repeatedly with all ranks' totals."""

    def __init__(self) -> None:
        self._windows: deque[_Window] = deque(maxlen=MAX_WINDOWS)
        self._started = 0.0
        self._totals: dict[int, BusyTotals] = {}

    def add(self, totals: Iterable[BusyTotals], now: float) -> bool:
        """Add totals of all ranks at ``now`` (seconds); return whether a window was completed."""
        current = {total.rank: total for total in totals}
        if current.keys() != self._totals.keys():
            # The comparison starts anew when a node joins or falls silent.
            self._windows.clear()
            self._totals, self._started = current, now
            return False
        if now - self._started < WINDOW_SECONDS:
            return False
        added = {rank: totals.since(self._totals[rank]) for rank, totals in current.items()}
        if any(totals.steps < WINDOW_STEPS for totals in added.values()):
            return False
        self._windows.append(_Window(now - self._started, added))
        self._totals, self._started = current, now
        return True

    @property
    def is_known(self) -> bool:
        """Whether there is enough data for a verdict about more than one rank."""
        return len(self._windows) >= MIN_WINDOWS and len(self._totals) > 1

    def stragglers(self) -> list[Straggler]:
        """Return the stragglers, slowest first; empty if none is certain."""
        if not self.is_known:
            return []
        slow = [
            straggler for rank in self._totals if (straggler := self._straggler(rank)) is not None
        ]
        return sorted(_merge_nodes(slow, self._totals.values()), key=lambda node: -node.ratio)

    def _straggler(self, rank: int) -> Straggler | None:
        windows = list(self._windows)
        for latest in (windows, windows[-MIN_WINDOWS:]):
            logarithms, lost = zip(*(window.excess(rank) for window in latest), strict=True)
            error = stdev(logarithms) / math.sqrt(len(latest))
            bound = fmean(logarithms) - CONFIDENCE * error
            if bound > math.log(STRAGGLER_RATIO) and fmean(lost) > MIN_LOST_SHARE:
                busy = fmean(window.ranks[rank].own_seconds for window in latest)
                ratio = math.exp(fmean(logarithms))
                return Straggler(rank, self._totals[rank].node, busy, ratio, fmean(lost))
        return None

    def slowest_ratio(self) -> float | None:
        """Return the largest ratio of a rank's busy time to the others'; None if unknown."""
        if not self.is_known:
            return None
        return max(
            math.exp(fmean(window.excess(rank)[0] for window in self._windows))
            for rank in self._totals
        )

    def arrival_skew(self) -> dict[int, float]:
        """Return node → seconds by which its last rank arrives at a step's collective after the
        last rank of the earliest node, on average; empty if unknown.
        """
        if not self.is_known:
            return {}
        last: dict[int, float] = {}
        for rank, totals in self._totals.items():
            seconds = fmean(
                window.ranks[rank].busy_seconds / window.ranks[rank].steps
                for window in self._windows
            )
            last[totals.node] = max(last.get(totals.node, 0.0), seconds)
        return {node: seconds - min(last.values()) for node, seconds in last.items()}


def _merge_nodes(slow: Sequence[Straggler], ranks: Iterable[BusyTotals]) -> list[Straggler]:
    """Replace the ranks of a node by the node if all of its ranks, at least two, are slow."""
    sizes: dict[int, int] = {}
    for rank in ranks:
        sizes[rank.node] = sizes.get(rank.node, 0) + 1
    merged = []
    for node, size in sizes.items():
        own = [straggler for straggler in slow if straggler.node == node]
        if len(own) == size > 1:
            worst = max(own, key=lambda straggler: straggler.ratio)
            merged.append(Straggler(None, node, worst.busy_seconds, worst.ratio, worst.lost_share))
        else:
            merged += own
    return merged
