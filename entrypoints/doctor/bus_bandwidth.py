"""Bandwidths of collectives by nccl-tests' definitions, and the fit that prices any size.

``algbw`` is the collective's size over its time. ``busbw`` is ``algbw`` times a factor that makes
it comparable with the speed of one link whatever the number of ranks; the factors are those of
https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md. As there, the size of an
all-gather or reduce-scatter is that of the whole vector, not of one rank's part.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

Collective = Literal["all_reduce", "all_gather", "reduce_scatter"]
COLLECTIVES: tuple[Collective, ...] = ("all_reduce", "all_gather", "reduce_scatter")


@dataclass(frozen=True)
class Point:
    """One size of a sweep: ``seconds`` is the mean time of the slowest rank."""

    bytes: int
    seconds: float


def bus_factor(collective: Collective, ranks: int) -> float:
    """busbw ÷ algbw on ``ranks`` ranks: 0 for one rank, which sends nothing.

    Raises:
        ValueError: no ranks at all.
    """
    if ranks < 1:
        raise ValueError(f"ranks: {ranks} must be at least 1")
    share = (ranks - 1) / ranks
    return 2 * share if collective == "all_reduce" else share


def algbw(point: Point) -> float:
    """Bytes a second."""
    return point.bytes / point.seconds


def busbw(collective: Collective, ranks: int, point: Point) -> float:
    """Bytes a second, comparable with a link's."""
    return algbw(point) * bus_factor(collective, ranks)


def best_busbw(collective: Collective, ranks: int, points: Sequence[Point]) -> float | None:
    """The highest busbw of a sweep: what the fabric gives to large messages."""
    return max((busbw(collective, ranks, one) for one in points), default=None)


def seconds_for(size: float, points: Sequence[Point]) -> float | None:
    """Time of a collective of ``size`` bytes, from a sweep; None without one.

    Between two sizes the time is a straight line (latency plus bytes over bandwidth); below the
    smallest it is that one's, above the largest the largest's bandwidth is kept. A larger message
    never takes less time than a smaller one: what says so is noise, and is lifted.
    """
    if not points:
        return None
    rising: list[Point] = []
    for one in sorted(points, key=lambda point: point.bytes):
        floor = rising[-1].seconds if rising else 0.0
        rising.append(Point(one.bytes, max(one.seconds, floor)))
    if size <= rising[0].bytes:
        return rising[0].seconds
    for low, high in pairwise(rising):
        if size <= high.bytes:
            share = (size - low.bytes) / (high.bytes - low.bytes)
            return low.seconds + share * (high.seconds - low.seconds)
    last = rising[-1]
    return last.seconds * size / last.bytes
