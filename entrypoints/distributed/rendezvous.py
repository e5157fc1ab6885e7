"""Rendezvous of a job's nodes on torch's TCPStore, which names the nodes that are missing.

torchrun waits for a number of nodes, whose names it does not know, and logs nothing meanwhile. So
the launcher calls :func:`wait_for_nodes` on the first node and :func:`join` on the others before
it starts torchrun. The doctor's barriers use the same store and the same error.

torch is imported only when a store is opened: the launcher of a single-node job needs none.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from sm_train.entrypoints.distributed.messages import (
    KeyValueStore,
    Messages,
    MissingNodeError,
    job_key,
)

TIMEOUT_SECONDS = 600.0
"""The instances of a job start together; the largest images are pulled in a few minutes."""

REMINDER_SECONDS = 60.0
_CONNECT_SECONDS = 10.0
_RETRY_SECONDS = 0.5
_ACKNOWLEDGE_SECONDS = 10.0
"""How long the first node keeps the store open for nodes that have not read the outcome yet."""

_MISSING_KEY = "missing"

SECURITY_GROUP_HINT = (
    "the security group must let its members reach each other on all ports, in and out"
)
_HINT = f"in a VPC, {SECURITY_GROUP_HINT}; otherwise check whether its log has begun, and resubmit"


@dataclass(frozen=True)
class RendezvousAddress:
    """Where the first node serves the store."""

    host: str
    port: int


def serve_store(port: int, *, timeout: float) -> tuple[KeyValueStore, int]:
    """Serve a TCPStore on all interfaces; returns it with its port, a free one for ``port`` 0.

    The server closes when the store object is garbage-collected.

    Raises:
        RuntimeError: the port is taken.
    """
    store = _tcp_store("127.0.0.1", port, is_server=True, timeout=timeout)
    return store, int(store.port)


def connect_store(address: RendezvousAddress, *, timeout: float) -> KeyValueStore:
    """Connect to the TCPStore that the first node serves.

    Raises:
        RuntimeError: nothing answers; torch tries twice, each time for ``timeout`` seconds.
    """
    store: KeyValueStore = _tcp_store(address.host, address.port, is_server=False, timeout=timeout)
    return store


def _tcp_store(host: str, port: int, *, is_server: bool, timeout: float) -> Any:
    # Not at the top: importing torch takes seconds, which a single-node launcher does not need.
    import torch.distributed

    distributed: Any = torch.distributed
    return distributed.TCPStore(
        host, port, None, is_server, timedelta(seconds=timeout), wait_for_workers=False
    )


def wait_for_nodes(
    names: Sequence[str],
    port: int,
    warn: Callable[[str], None],
    *,
    timeout: float = TIMEOUT_SECONDS,
    reminder: float = REMINDER_SECONDS,
) -> None:
    """Wait on the first node of ``names`` for all others, and publish the outcome to them.

    ``warn`` is called every ``reminder`` seconds with the nodes that are missing.

    Raises:
        MissingNodeError: a node did not join within ``timeout`` seconds; it is raised on all nodes.
    """
    by_key = {_node_key(name): name for name in names[1:]}
    last_reminder = 0.0

    def remind(missing: list[str], seconds: float) -> None:
        nonlocal last_reminder
        if seconds - last_reminder > reminder:
            last_reminder = seconds
            waiting_for = ", ".join(by_key[key] for key in missing)
            warn(f"waiting for {waiting_for} for {seconds:.0f} s")

    store, _ = serve_store(port, timeout=timeout)
    messages = Messages(store, job_key())
    joined = messages.arrivals(by_key, timeout, on_poll=remind)
    missing = ", ".join(name for key, name in by_key.items() if key not in joined)
    messages.put_json(_MISSING_KEY, missing)
    # The store closes with this call: leave the others time to read the outcome.
    acknowledged = [_acknowledged_key(by_key[key]) for key in joined]
    messages.arrivals(acknowledged, _ACKNOWLEDGE_SECONDS)
    if missing:
        raise MissingNodeError(f"{missing} did not join within {timeout:.0f} s: {_HINT}")


def join(name: str, first: RendezvousAddress, *, timeout: float = TIMEOUT_SECONDS) -> None:
    """Report node ``name`` to the first node and wait until all nodes have joined.

    Raises:
        MissingNodeError: the first node cannot be reached, or a node did not join.
    """
    deadline = time.monotonic() + timeout
    while True:
        try:
            missing = _join_once(name, first, deadline)
            break
        except RuntimeError as error:
            # Refused, or lost: the first node may start later than this one, or start again.
            if time.monotonic() > deadline:
                raise MissingNodeError(
                    f"{first.host} could not be reached on port {first.port} within "
                    f"{timeout:.0f} s ({_first_line(error)}): {_HINT}"
                ) from None
            time.sleep(_RETRY_SECONDS)
    if missing:
        raise MissingNodeError(f"{missing} did not join: {_HINT}")


def _join_once(name: str, first: RendezvousAddress, deadline: float) -> str:
    """Join once; returns the names of the missing nodes, empty if there are none.

    Raises:
        RuntimeError: the connection failed, or there was no outcome in time.
    """
    remaining = deadline - time.monotonic()
    timeout = min(_CONNECT_SECONDS, max(_RETRY_SECONDS, remaining))
    messages = Messages(connect_store(first, timeout=timeout), job_key())
    messages.put(_node_key(name), b"")
    # The first node may have started its own timeout later than this node did.
    if not messages.arrivals([_MISSING_KEY], max(0.0, remaining) + REMINDER_SECONDS):
        raise RuntimeError("it is up, but did not report which nodes joined")
    missing: str = messages.get_json(_MISSING_KEY) or ""
    # The first node may close the store as soon as it has read this.
    with contextlib.suppress(RuntimeError):
        messages.put(_acknowledged_key(name), b"")
    return missing


def _node_key(name: str) -> str:
    return f"node/{name}"


def _acknowledged_key(name: str) -> str:
    return f"acknowledged/{name}"


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
