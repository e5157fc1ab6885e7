"""Barriers of the doctor's ranks in a store, each with a timeout and a time budget.

Before each part of the benchmark the ranks meet at a barrier. Rank 0 decides which ranks take part:
a rank that does not arrive in time is left out and reported, so no rank waits forever. Values that
later decide the verdict are put into the same store as soon as they are known.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from sm_train.entrypoints.distributed.messages import Messages, MissingNodeError


@dataclass(frozen=True)
class BarrierResult:
    """The ranks that take part, and the seconds they may use; 0 skips the part.

    ``delays`` are each rank's seconds after the first arrival.
    """

    ranks: tuple[int, ...]
    budget: float
    delays: dict[int, float]


class StoreBarrier:
    """Barriers of one rank, by messages; rank 0 of ``size`` ranks decides."""

    def __init__(self, messages: Messages, rank: int, size: int) -> None:
        self.messages, self.rank, self.size = messages, rank, size

    def put(self, name: str, value: Any) -> None:
        """Send ``value`` to the other ranks."""
        self.messages.put_json(name, value)

    def get(self, name: str) -> Any | None:
        """Return a value that a rank has sent; None if there is none yet."""
        return self.messages.get_json(name)

    def wait(self, name: str, seconds: float) -> Any:
        """Wait for a value of rank 0.

        Raises:
            MissingNodeError: there is none within ``seconds``.
        """
        self.messages.require({name: "rank 0"}, seconds, f"set {name}")
        return self.get(name)

    def meet(
        self,
        part: str,
        timeout: float,
        budget: Callable[[], float],
        *,
        expected: tuple[int, ...] | None = None,
        result_timeout: float,
    ) -> BarrierResult:
        """Meet before ``part``: rank 0 waits ``timeout`` seconds for the other ranks.

        Rank 0 calls ``budget`` for the part's seconds when the barrier closes. ``expected`` are the
        ranks that it waits for, by default all. The others wait ``result_timeout`` for its result.

        Raises:
            MissingNodeError: this rank came too late, or rank 0 did not publish a result.
        """
        self.put(f"{part}/{self.rank}", time.time())
        if self.rank == 0:
            result = self._close(part, timeout, budget, expected or tuple(range(self.size)))
            delays = [[rank, seconds] for rank, seconds in result.delays.items()]
            self.put(f"{part}/result", [list(result.ranks), result.budget, delays])
            return result
        ranks, seconds, delays = self.wait(f"{part}/result", result_timeout)
        if self.rank not in ranks:
            raise MissingNodeError(f"rank {self.rank} came too late for {part}")
        return BarrierResult(tuple(ranks), seconds, dict(delays))

    def _close(
        self, part: str, timeout: float, budget: Callable[[], float], expected: tuple[int, ...]
    ) -> BarrierResult:
        by_key = {f"{part}/{rank}": rank for rank in expected}
        arrived = self.messages.arrivals(by_key, timeout)
        first = min(arrived.values(), default=0.0)
        delays = {by_key[key]: round(seconds - first, 2) for key, seconds in arrived.items()}
        ranks = tuple(sorted(delays))
        return BarrierResult(ranks, max(0.0, budget()), {rank: delays[rank] for rank in ranks})
