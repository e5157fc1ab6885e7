"""Before torchrun: a job's machines meet, so that one that never comes is named.

torchrun waits for a number of machines, whose names it does not know, and says nothing meanwhile.
Here the first machine keeps the roll: the others connect, say their names and wait for its word.
"""

from __future__ import annotations

import contextlib
import select
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

TIMEOUT_SECONDS = 600.0
"""Machines of a job start together; the largest images are pulled in a few minutes."""

REMINDER_SECONDS = 60.0
_RETRY_SECONDS = 1.0
_LONGEST_NAME = 256

HINT = (
    "in a VPC, the security group must let its members reach each other in and out on all ports; "
    "else see whether its log has begun, and resubmit"
)


class MissingNodeError(RuntimeError):
    """A machine is not there; the message is one line and names it."""


@dataclass(frozen=True)
class RendezvousAddress:
    """Where the first machine keeps the roll."""

    address: str
    port: int


def wait_for_nodes(
    hosts: Sequence[str],
    port: int,
    say: Callable[[str], None],
    *,
    patience: float = TIMEOUT_SECONDS,
    reminder: float = REMINDER_SECONDS,
) -> None:
    """Wait, on the first of ``hosts``, for all others; ``say`` hears who is missing meanwhile.

    Raises:
        AbsentError: somebody is not there within ``patience`` seconds; those who are know it too.
    """
    missing = set(hosts[1:])
    began, said = time.monotonic(), 0.0
    with contextlib.ExitStack() as open_, socket.create_server(("", port)) as server:
        came: list[socket.socket] = []
        while missing:
            passed = time.monotonic() - began
            if passed > patience:
                break
            if passed - said > reminder:
                said = passed
                say(f"waiting for {_names(missing, hosts)} for {passed:.0f} s")
            for one in _newcomers(server):
                open_.enter_context(one)
                missing.discard(_name(one))
                came.append(one)
        absent = _names(missing, hosts)
        for one in came:
            with contextlib.suppress(OSError):
                one.sendall(f"{absent}\n".encode())
    if missing:
        raise MissingNodeError(f"{absent} did not come within {patience:.0f} s: {HINT}")


def join(name: str, first: RendezvousAddress, *, patience: float = TIMEOUT_SECONDS) -> None:
    """Tell the first machine, from another, that ``name`` is there, and wait for all others.

    Raises:
        AbsentError: the first one cannot be reached, or it misses somebody.
    """
    deadline = time.monotonic() + patience
    while True:
        try:
            absent = _ask(name, first, deadline + REMINDER_SECONDS)
            break
        except OSError as error:
            if time.monotonic() > deadline:
                raise MissingNodeError(
                    f"{first.address} could not be reached on port {first.port} within "
                    f"{patience:.0f} s ({error}): {HINT}"
                ) from None
            time.sleep(_RETRY_SECONDS)
    if absent:
        raise MissingNodeError(f"{absent} did not come: {HINT}")


def _ask(name: str, first: RendezvousAddress, deadline: float) -> str:
    """Who is missing in the end; nobody if that is empty."""
    wait = max(1.0, deadline - time.monotonic())
    with socket.create_connection((first.address, first.port), timeout=10.0) as connection:
        connection.sendall(f"{name}\n".encode())
        connection.settimeout(wait)
        with connection.makefile(encoding="utf-8") as lines:
            line = lines.readline()
    if not line.endswith("\n"):
        raise ConnectionError("it went away")
    return line.strip()


def _newcomers(server: socket.socket) -> Iterator[socket.socket]:
    if select.select([server], [], [], _RETRY_SECONDS)[0]:
        yield server.accept()[0]


def _name(connection: socket.socket) -> str:
    """What somebody says who came; nothing of somebody who says no name."""
    connection.settimeout(_RETRY_SECONDS)
    with contextlib.suppress(OSError), connection.makefile("rb") as lines:
        return lines.readline(_LONGEST_NAME).decode("utf-8", "replace").strip()
    return ""


def _names(missing: set[str], hosts: Sequence[str]) -> str:
    return ", ".join(host for host in hosts if host in missing)
