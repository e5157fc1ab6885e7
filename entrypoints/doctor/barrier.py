"""Who is there: processes meet in a store before each part, and the first one keeps the roll.

Whoever is not there in time is left out of that part and named; nobody waits for ever. Every wait
here looks again and again instead of sleeping in the store, so that it can be given up.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

POLL_SECONDS = 0.05


class MissingRankError(RuntimeError):
    """Another process is not there, or this one came too late; the message is one line."""


@dataclass(frozen=True)
class RollCall:
    """The ranks that take part, and for how many seconds: none at all if that is 0.

    ``waited`` are each rank's seconds after the first one came.
    """

    members: tuple[int, ...]
    budget: float
    waited: dict[int, float]


class StoreBarrier:
    """One process's seat among ``size``; rank 0 keeps the roll."""

    def __init__(self, store: Any, rank: int, size: int) -> None:
        self.store, self.rank, self.size = store, rank, size

    def put(self, key: str, value: Any) -> None:
        self.store.set(key, json.dumps(value))

    def get(self, key: str) -> Any | None:
        """What was put under ``key``; None if nothing was."""
        if not self.store.check([key]):
            return None
        return json.loads(self.store.get(key))

    def wait(self, key: str, seconds: float) -> Any:
        """What is put under ``key`` within so many seconds.

        Raises:
            AbsentError: nothing is.
        """
        deadline = time.monotonic() + seconds
        while (value := self.get(key)) is None:
            if time.monotonic() > deadline:
                raise MissingRankError(
                    f"no word from the first process within {seconds:.0f} s ({key})"
                )
            time.sleep(POLL_SECONDS)
        return value

    def call(
        self,
        part: str,
        patience: float,
        budget: Callable[[], float],
        *,
        expected: tuple[int, ...] | None = None,
        followers_wait: float,
    ) -> RollCall:
        """Meet for ``part``: the first process waits ``patience`` seconds for the others.

        It asks ``budget`` for the part's seconds when all are there. ``expected`` are the ranks to
        wait for, by default all. The others wait ``followers_wait`` for what it decides.

        Raises:
            AbsentError: this process came too late, or the first one says nothing.
        """
        self.put(f"{part}/{self.rank}", time.time())
        if self.rank == 0:
            roll = self._keep(part, patience, budget, expected or tuple(range(self.size)))
            waited = [[rank, seconds] for rank, seconds in roll.waited.items()]
            self.put(f"{part}/roll", [list(roll.members), roll.budget, waited])
            return roll
        members, seconds, waited = self.wait(f"{part}/roll", followers_wait)
        if self.rank not in members:
            raise MissingRankError(f"came too late for {part}")
        return RollCall(tuple(members), seconds, dict(waited))

    def _keep(
        self, part: str, patience: float, budget: Callable[[], float], expected: tuple[int, ...]
    ) -> RollCall:
        started = time.monotonic()
        came: dict[int, float] = {}
        missing = list(expected)
        while True:
            now = time.monotonic() - started
            for rank in list(missing):
                if self.store.check([f"{part}/{rank}"]):
                    missing.remove(rank)
                    came[rank] = now
            if not missing or now > patience:
                break
            time.sleep(POLL_SECONDS)
        first = min(came.values(), default=0.0)
        waited = {rank: round(came[rank] - first, 2) for rank in sorted(came)}
        return RollCall(tuple(waited), max(0.0, budget()), waited)


def open_store(host: str, port: int, *, first: bool, patience: float) -> Any:
    """The store: rank 0 keeps it, the others find it.

    Raises:
        RuntimeError: nobody answers within ``patience`` seconds.
    """
    import torch.distributed

    distributed: Any = torch.distributed
    return distributed.TCPStore(
        host, port, None, first, timedelta(seconds=patience), wait_for_workers=False
    )
