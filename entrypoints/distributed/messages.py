"""Messages between the ranks or nodes of a job, in a key-value store of torch.

Any host that reaches the store's port can write to it. So every message carries a code that only
the processes of the job can compute, for its name, and any other value is refused before it is
parsed. Waiting polls: the store's own ``wait`` blocks its connection for other threads, and reports
neither who has arrived nor who is missing.

torch is not imported here: the launcher of a single-node job needs none.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from sm_train.entrypoints.base.digests import machine_key, seal, unseal
from sm_train.entrypoints.base.error import Error

CHUNK_BYTES = 4 * 2**20
"""TCPStore's libuv server closes a connection that sends more than 8 MiB in a value
(TCPStoreLibUvBackend.cpp, PyTorch 2.3 to 2.13)."""

_FIRST_POLL_SECONDS, _LAST_POLL_SECONDS = 0.001, 0.1

_WHOLE, _CHUNKED = b"w", b"c"
"""First byte of a message: its content follows, or the number of its chunks."""


class KeyValueStore(Protocol):
    """The calls of ``torch.distributed.Store`` that neither block nor need all ranks."""

    def set(self, key: str, value: bytes) -> None: ...

    def get(self, key: str) -> bytes: ...

    def check(self, keys: list[str]) -> bool: ...

    def delete_key(self, key: str) -> bool: ...


class MissingNodeError(TimeoutError):
    """A node or rank is missing, or this one came too late; the message is one line."""


class ForgedMessageError(Error):
    """A message in the store was not written by a process of the job."""


@dataclass(frozen=True)
class Messages:
    """Messages in ``store``. All processes of the job have the same ``key``."""

    store: KeyValueStore
    key: bytes

    def put(self, name: str, content: bytes) -> list[str]:
        """Write a message, in chunks if it is large; return the store's keys that it takes."""
        if len(content) <= CHUNK_BYTES:
            self._set(name, _WHOLE + content)
            return [name]
        starts = range(0, len(content), CHUNK_BYTES)
        chunks = [f"{name}/{index}" for index in range(len(starts))]
        for key, start in zip(chunks, starts, strict=True):
            self._set(key, content[start : start + CHUNK_BYTES])
        # Written last: whoever sees the number of chunks finds all of them.
        self._set(name, _CHUNKED + str(len(chunks)).encode())
        return [*chunks, name]

    def put_json(self, name: str, value: Any) -> None:
        """Write ``value`` as JSON."""
        self.put(name, json.dumps(value).encode())

    def get(self, name: str) -> bytes:
        """Return a message that exists.

        Raises:
            ForgedMessageError: no process of the job wrote it.
        """
        message = self._get(name)
        kind, content = message[:1], message[1:]
        if kind == _WHOLE:
            return content
        return b"".join(self._get(f"{name}/{index}") for index in range(int(content)))

    def get_json(self, name: str) -> Any | None:
        """Return the value of a message that was written as JSON; None if there is none yet.

        Raises:
            ForgedMessageError: no process of the job wrote it.
        """
        return json.loads(self.get(name)) if self.has([name]) else None

    def has(self, names: Iterable[str]) -> bool:
        """Return whether all of these messages exist."""
        return self.store.check(list(names))

    def delete(self, keys: Iterable[str]) -> None:
        """Delete messages by what :meth:`put` returned for them."""
        for key in keys:
            self.store.delete_key(key)

    def require(self, senders: Mapping[str, str], seconds: float, purpose: str) -> None:
        """Wait until all messages exist; ``senders`` maps the name of each to who writes it.

        Raises:
            MissingNodeError: some did not come in time; it names their senders.
        """
        for _ in _polls(seconds):
            if self.has(senders):
                return
        missing = [who for name, who in senders.items() if not self.has([name])]
        raise MissingNodeError(f"{', '.join(missing)} did not {purpose} within {seconds:g} s")

    def arrivals(
        self,
        names: Iterable[str],
        seconds: float,
        *,
        on_poll: Callable[[list[str], float], None] = lambda missing, seconds: None,
    ) -> dict[str, float]:
        """Wait for messages; return name → seconds until it was there, of those that came.

        ``on_poll`` is called with the names that are missing and the seconds waited.

        Raises:
            ForgedMessageError: no process of the job wrote one of them.
        """
        arrived: dict[str, float] = {}
        missing = list(names)
        for elapsed in _polls(seconds):
            for name in [name for name in missing if self.has([name])]:
                self._get(name)
                missing.remove(name)
                arrived[name] = elapsed
            if not missing:
                break
            on_poll(missing, elapsed)
        return arrived

    def _set(self, key: str, value: bytes) -> None:
        self.store.set(key, seal(value, self.key, key))

    def _get(self, key: str) -> bytes:
        value = unseal(bytes(self.store.get(key)), self.key, key)
        if value is None:
            raise ForgedMessageError(
                f"{key}: the value in the rendezvous's store was not written by a process of this "
                "job; allow only the job's nodes to reach the port of its first node"
            )
        return value


def _polls(seconds: float) -> Iterator[float]:
    """Yield the seconds waited so far, with growing pauses, the last time after ``seconds``."""
    started, pause = time.monotonic(), _FIRST_POLL_SECONDS
    while (elapsed := time.monotonic() - started) <= seconds:
        yield elapsed
        time.sleep(pause)
        pause = min(2 * pause, _LAST_POLL_SECONDS)
    yield elapsed


_job_key: bytes | None = None


def use_job_key(key: bytes) -> None:
    """Make ``key`` that of all messages of this process."""
    global _job_key
    _job_key = key


def job_key() -> bytes:
    """Return the key of the job's messages; outside of a job, that of the user on this machine."""
    return machine_key() if _job_key is None else _job_key
