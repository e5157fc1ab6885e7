"""Barriers of the doctor's ranks in a store, each with a timeout and a time budget.

Before each part of the benchmark the ranks meet at a barrier. Rank 0 decides which ranks take part:
a rank that does not arrive in time is left out and reported, so no rank waits forever. Values that
later decide the verdict are put into the same store as soon as they are known.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from sm_train.entrypoints.distributed.rendezvous import (
    KeyValueStore,
    MissingNodeError,
    wait_for_keys,
)


@dataclass(frozen=True)
class BarrierResult:
    """The ranks that take part, and the seconds they may use; 0 skips the part.

    ``delays`` are each rank's seconds after the first arrival.
    """

    ranks: tuple[int, ...]
    budget: float
    delays: dict[int, float]


class StoreBarrier:
    """Barriers and JSON values of one rank in ``store``; rank 0 of ``size`` ranks decides."""

    def __init__(self, store: KeyValueStore, rank: int, size: int) -> None:
        self.store, self.rank, self.size = store, rank, size

    def put(self, key: str, value: Any) -> None:
        """Store ``value`` as JSON."""
        self.store.set(key, json.dumps(value))

    def get(self, key: str) -> Any | None:
        """Return the value of ``key``; None if there is none yet."""
        if not self.store.check([key]):
            return None
        return json.loads(self.store.get(key))

    def wait(self, key: str, seconds: float) -> Any:
        """Wait for the value of ``key``.

        Raises:
            MissingNodeError: there is none within ``seconds``.
        """
        if not wait_for_keys(self.store, [key], seconds):
            raise MissingNodeError(f"rank 0 did not set {key} within {seconds:.0f} s")
        return self.get(key)

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
        arrived = wait_for_keys(self.store, by_key, timeout)
        first = min(arrived.values(), default=0.0)
        delays = {by_key[key]: round(seconds - first, 2) for key, seconds in arrived.items()}
        ranks = tuple(sorted(delays))
        return BarrierResult(ranks, max(0.0, budget()), {rank: delays[rank] for rank in ranks})
