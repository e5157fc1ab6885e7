"""Exchange Python objects between ranks through the process group's key-value store.

``torch.distributed``'s object collectives send CPU or byte tensors through the backend. SMDDP is
closed-source and may accept only CUDA tensors, so no object passes through a backend here.

Values are pickled, in sealed messages (:mod:`sm_train.entrypoints.distributed.messages`).
"""

from __future__ import annotations

import pickle
import zlib
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, TypeVar

from sm_train.entrypoints.distributed.messages import Messages, job_key

T = TypeVar("T")

COLLECTIVE_TIMEOUT = timedelta(minutes=30)
"""A collective or an exchange that takes longer fails: a peer is dead. The job ends and can be
retried."""


@dataclass
class ObjectExchange:
    """Exchanges of one rank with all others; every rank makes the same calls in the same order."""

    messages: Messages
    rank: int
    world_size: int
    timeout: timedelta = COLLECTIVE_TIMEOUT
    _calls: int = 0
    _own: list[str] = field(default_factory=list)

    def all_gather(self, value: T) -> list[T]:
        """Return the values of all ranks, in rank order.

        Raises:
            MissingNodeError: a rank made no such call in time; the message names it.
        """
        earlier, self._own = self._own, []
        prefix = self._publish(value)
        values = self._read(prefix)
        # Every rank is in this call, so every rank has read the values of the earlier ones.
        self.messages.delete(earlier)
        return values

    def gather(self, value: T) -> list[T] | None:
        """Return the values of all ranks on rank 0, and None on the others, which do not wait."""
        prefix = self._publish(value)
        return self._read(prefix) if self.rank == 0 else None

    def _publish(self, value: Any) -> str:
        self._calls += 1
        prefix = f"objects/{self._calls}"
        content = zlib.compress(pickle.dumps(value), level=1)
        self._own += self.messages.put(f"{prefix}/{self.rank}", content)
        return prefix

    def _read(self, prefix: str) -> list[Any]:
        senders = {f"{prefix}/{rank}": f"rank {rank}" for rank in range(self.world_size)}
        self.messages.require(senders, self.timeout.total_seconds(), "take part in an exchange")
        return [pickle.loads(zlib.decompress(self.messages.get(name))) for name in senders]


_exchanges: dict[int, ObjectExchange] = {}


def all_gather(value: T) -> list[T]:
    """Return the values of all ranks, in rank order; without a process group, the own one."""
    exchange = _default_exchange()
    return exchange.all_gather(value) if exchange else [value]


def gather(value: T) -> list[T] | None:
    """Return the values of all ranks on rank 0, and None on the others, which do not wait."""
    exchange = _default_exchange()
    return exchange.gather(value) if exchange else [value]


def _default_exchange() -> ObjectExchange | None:
    """Return the exchange of the default process group; None without one."""
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized()):
        return None
    # torch has no public accessor; it uses this function for its own debug checks (2.3 to 2.13).
    store: Any = dist.distributed_c10d._get_default_store()
    if id(store) not in _exchanges:
        # A process has one default group; a test may create one after another.
        _exchanges.clear()
        messages = Messages(store, job_key())
        _exchanges[id(store)] = ObjectExchange(messages, dist.get_rank(), dist.get_world_size())
    return _exchanges[id(store)]
