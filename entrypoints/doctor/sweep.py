"""Which sizes a sweep measures, how often, and when it stops: pure, so that its time is bounded.

Every rank decides from the same figures (the slowest rank's seconds), so all decide alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from sm_train.entrypoints.doctor.bus_bandwidth import COLLECTIVES, Collective, Point

GROWTH = 4
SIZES = tuple(2**10 * GROWTH**power for power in range(11))
"""1 KiB to 1 GiB, as nccl-tests with ``-b 1K -e 1G -f 4``."""

SLICE_SECONDS = 0.1
"""What the repetitions of one size should take together."""

MOST_REPEATS = 20

Measure = Callable[[Collective, int, int], float]
"""Collective, bytes, times → seconds of one, of the slowest rank; the same on all ranks."""


def sweep(
    collective: Collective, measure: Measure, *, budget: float, most_bytes: int
) -> Iterator[Point]:
    """Measure sizes from the smallest on, while the next one should fit into ``budget`` seconds.

    One warm-up goes before the timed ones. A size costs at most ``GROWTH`` times the one before,
    and twice with the warm-up: so the budget holds as long as the network does not change.
    """
    spent, last = 0.0, 0.0
    for size in SIZES:
        if size > most_bytes or 2 * GROWTH * last > budget - spent:
            break
        first = measure(collective, size, 1)
        times = min(MOST_REPEATS, max(1, int(SLICE_SECONDS / max(first, 1e-9))))
        last = measure(collective, size, times)
        spent += first + times * last
        yield Point(size, last)


def sweeps(
    measure: Measure, *, budget: float, most_bytes: int
) -> Iterator[tuple[Collective, Point]]:
    """All three collectives, in a third of ``budget`` each."""
    share = budget / len(COLLECTIVES)
    for one in COLLECTIVES:
        for point in sweep(one, measure, budget=share, most_bytes=most_bytes):
            yield one, point
