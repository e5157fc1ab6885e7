"""Exchange Python objects between ranks through the process group's key-value store.

``torch.distributed``'s object collectives send CPU or byte tensors through the backend. SMDDP is
closed-source and may accept only CUDA tensors, so no object passes through a backend here.

Values are pickled. Any host that reaches the rendezvous's port can write to the store, so every
value carries a code that only the processes of the job can compute, for its key in the store, and
any other value is refused before it is unpickled.
"""

from __future__ import annotations

import pickle
import time
import zlib
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Protocol, TypeVar

from sm_train.entrypoints.common.digests import machine_key, seal, unseal
from sm_train.entrypoints.common.error import Error

T = TypeVar("T")

COLLECTIVE_TIMEOUT = timedelta(minutes=30)
"""A collective or an exchange that takes longer fails: a peer is dead. The job ends and can be
retried."""

CHUNK_BYTES = 4 * 2**20
"""TCPStore's libuv server closes a connection that sends more than 8 MiB in a value
(TCPStoreLibUvBackend.cpp, PyTorch 2.3 to 2.13)."""

_FIRST_POLL_SECONDS, _LAST_POLL_SECONDS = 0.001, 0.1


class Store(Protocol):
    """The calls of ``torch.distributed.Store`` that are used here."""

    def set(self, key: str, value: bytes | str) -> None: ...

    def get(self, key: str) -> bytes: ...

    def check(self, keys: list[str]) -> bool: ...

    def delete_key(self, key: str) -> bool: ...


class ForgedValueError(Error):
    """A value in the store was not written by a process of the job."""


@dataclass
class ObjectExchange:
    """Exchanges of one rank with all others; every rank makes the same calls in the same order.

    ``key`` is that of the job's messages; all ranks have the same.
    """

    store: Store
    rank: int
    world_size: int
    key: bytes
    timeout: timedelta = COLLECTIVE_TIMEOUT
    _calls: int = 0
    _own_keys: list[str] = field(default_factory=list)

    def all_gather(self, value: T) -> list[T]:
        """Return the values of all ranks, in rank order.

        Raises:
            TimeoutError: a rank made no such call in time; the message names it.
        """
        earlier, self._own_keys = self._own_keys, []
        prefix = self._publish(value)
        values = self._read(prefix)
        # Every rank is in this call, so every rank has read the values of the earlier ones.
        for key in earlier:
            self.store.delete_key(key)
        return values

    def gather(self, value: T) -> list[T] | None:
        """Return the values of all ranks on rank 0, and None on the others, which do not wait."""
        prefix = self._publish(value)
        return self._read(prefix) if self.rank == 0 else None

    def _publish(self, value: Any) -> str:
        self._calls += 1
        prefix = f"objects/{self._calls}"
        data = zlib.compress(pickle.dumps(value), level=1)
        chunks = [data[start : start + CHUNK_BYTES] for start in range(0, len(data), CHUNK_BYTES)]
        for index, chunk in enumerate(chunks):
            self._set(f"{prefix}/{self.rank}/{index}", chunk)
        # Written last: readers wait for the number of chunks, so all of them exist by then.
        self._set(f"{prefix}/{self.rank}", str(len(chunks)).encode())
        return prefix

    def _set(self, key: str, value: bytes) -> None:
        self.store.set(key, seal(value, self.key, key))
        self._own_keys.append(key)

    def _read(self, prefix: str) -> list[Any]:
        keys = [f"{prefix}/{rank}" for rank in range(self.world_size)]
        self._wait(keys)
        return [self._load(key) for key in keys]

    def _load(self, key: str) -> Any:
        chunks = [self._get(f"{key}/{index}") for index in range(int(self._get(key)))]
        return pickle.loads(zlib.decompress(b"".join(chunks)))

    def _get(self, key: str) -> bytes:
        """Return a value of the store.

        Raises:
            ForgedValueError: no process of the job wrote it.
        """
        value = unseal(bytes(self.store.get(key)), self.key, key)
        if value is None:
            raise ForgedValueError(
                f"{key}: the value in the rendezvous's store was not written by a process of this "
                "job; allow only the job's nodes to reach the port of its first node"
            )
        return value

    def _wait(self, keys: list[str]) -> None:
        """Poll: the store's own ``wait`` would block its connection for other threads."""
        deadline = time.monotonic() + self.timeout.total_seconds()
        pause = _FIRST_POLL_SECONDS
        while not self.store.check(keys):
            if time.monotonic() > deadline:
                missing = [rank for rank, key in enumerate(keys) if not self.store.check([key])]
                raise TimeoutError(
                    f"ranks {', '.join(map(str, missing))} did not take part in an exchange within "
                    f"{self.timeout.total_seconds():.0f} s"
                )
            time.sleep(pause)
            pause = min(2 * pause, _LAST_POLL_SECONDS)


_exchanges: dict[int, ObjectExchange] = {}
_job_key: bytes | None = None


def use_job_key(key: bytes) -> None:
    """Make ``key`` that of all exchanges of this process."""
    global _job_key
    _job_key = key


def job_key() -> bytes:
    """Return the key of the job's messages; outside of a job, that of the user on this machine."""
    return machine_key() if _job_key is None else _job_key


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
        _exchanges[id(store)] = ObjectExchange(
            store, dist.get_rank(), dist.get_world_size(), job_key()
        )
    return _exchanges[id(store)]
