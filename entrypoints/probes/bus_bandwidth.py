"""Sweeps of collectives over message sizes, and their bandwidths by nccl-tests' definitions.

``algbw`` is the collective's size over its time. ``busbw`` is ``algbw`` times a factor that makes
it comparable with the speed of one link, whatever the number of ranks; the factors are those of
https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md. As there, the size of an
all-gather or reduce-scatter is that of the whole vector, not of one rank's shard.

A sweep decides only from the slowest rank's seconds, which all ranks know, so every rank measures
the same sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from sm_train.cost.network import COLLECTIVES, Collective, bus_factor

GROWTH = 4
SIZES = tuple(2**10 * GROWTH**power for power in range(11))
"""1 KiB to 1 GiB, as nccl-tests with ``-b 1K -e 1G -f 4``."""

SLICE_SECONDS = 0.1
"""Target time of all repetitions of one size."""

MAX_REPEATS = 20

Sweeps = Mapping[Collective, Sequence["SweepPoint"]]
"""Each collective's measured sizes."""

Measure = Callable[[Collective, int, int], float]
"""``(collective, bytes, repeats)`` → the slowest rank's seconds of one call, on every rank."""


@dataclass(frozen=True)
class SweepPoint:
    """One size of a sweep: ``seconds`` is the mean time of the slowest rank."""

    bytes: int
    seconds: float


def sweep(
    collective: Collective, measure: Measure, *, budget: float, max_bytes: int
) -> Iterator[SweepPoint]:
    """Measure sizes in ascending order while the next one should fit into ``budget`` seconds.

    Each size has one warm-up call. A size costs at most ``GROWTH`` times the one before, and twice
    that with the warm-up, so the budget holds as long as the network does not change.
    """
    spent, last = 0.0, 0.0
    for size in SIZES:
        if size > max_bytes or 2 * GROWTH * last > budget - spent:
            break
        warm_up = measure(collective, size, 1)
        repeats = min(MAX_REPEATS, max(1, int(SLICE_SECONDS / max(warm_up, 1e-9))))
        last = measure(collective, size, repeats)
        spent += warm_up + repeats * last
        yield SweepPoint(size, last)


def sweeps(
    measure: Measure, *, budget: float, max_bytes: int
) -> Iterator[tuple[Collective, SweepPoint]]:
    """Sweep all three collectives, in a third of ``budget`` seconds each."""
    for collective in COLLECTIVES:
        share = budget / len(COLLECTIVES)
        for point in sweep(collective, measure, budget=share, max_bytes=max_bytes):
            yield collective, point


def algbw(point: SweepPoint) -> float:
    """Return the algorithm bandwidth in bytes per second."""
    return point.bytes / point.seconds


def busbw(collective: Collective, ranks: int, point: SweepPoint) -> float:
    """Return the bus bandwidth in bytes per second, comparable with a link's."""
    return algbw(point) * bus_factor(collective, ranks)


def seconds_for(size: float, points: Sequence[SweepPoint]) -> float | None:
    """Return the seconds of a collective of ``size`` bytes; None if the sweep is empty.

    Between two measured sizes the time is interpolated linearly (latency plus bytes over
    bandwidth). Below the smallest size it is that size's time; above the largest, that size's
    bandwidth is kept. A larger message never takes less time than a smaller one: measurements that
    contradict this are noise and are raised to the smaller size's time.
    """
    if not points:
        return None
    rising: list[SweepPoint] = []
    for point in sorted(points, key=lambda point: point.bytes):
        floor = rising[-1].seconds if rising else 0.0
        rising.append(SweepPoint(point.bytes, max(point.seconds, floor)))
    if size <= rising[0].bytes:
        return rising[0].seconds
    for low, high in pairwise(rising):
        if size <= high.bytes:
            share = (size - low.bytes) / (high.bytes - low.bytes)
            return low.seconds + share * (high.seconds - low.seconds)
    largest = rising[-1]
    return largest.seconds * size / largest.bytes
