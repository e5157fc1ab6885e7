"""Several hosts on one machine: network namespaces joined by a bridge, with limited rates."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass

INTERFACE = "eth0"


def why_not() -> str | None:
    """Why there can be no namespaces here; None if there can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        return f"no {' and no '.join(missing)} here (Debian's iproute2)"
    name = f"smtry{os.getpid()}"
    made = _tried("ip", "netns", "add", name)
    if not made:
        return "this kernel or container allows no network namespaces"
    shaped = _tried(
        "ip",
        "netns",
        "exec",
        name,
        "tc",
        "qdisc",
        "add",
        "dev",
        "lo",
        "root",
        "tbf",
        "rate",
        "1mbit",
        "burst",
        "64kb",
        "latency",
        "50ms",
    )
    _tried("ip", "netns", "del", name)
    return None if shaped else "this kernel has no token bucket filter (tc tbf)"


def _tried(*command: str) -> bool:
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def call(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)


@dataclass(frozen=True)
class Hosts:
    """Namespaces; host ``n`` has the address :meth:`address` on :data:`INTERFACE`."""

    names: tuple[str, ...]
    net: int

    def address(self, host: int) -> str:
        return f"10.77.{self.net}.{host + 1}"

    def prefix(self, host: int) -> tuple[str, ...]:
        """What a command that runs on ``host`` begins with."""
        return ("ip", "netns", "exec", self.names[host])

    def limit(self, host: int, mbit: float) -> None:
        """Let ``host`` send at most so many Mbit/s."""
        call(*self.prefix(host), "tc", "qdisc", "replace", "dev", INTERFACE, "root", *_bucket(mbit))

    def limit_link(self, host: int, other: int, mbit: float) -> None:
        """Join two hosts by a link of their own of so many Mbit/s, and send all between them there.

        The kernel need not have a queue with classes for that.
        """
        mine, theirs = f"to{other}", f"to{host}"
        call(
            *self.prefix(host),
            "ip",
            "link",
            "add",
            mine,
            "type",
            "veth",
            "peer",
            "name",
            theirs,
            "netns",
            self.names[other],
        )
        for here, there, link in ((host, other, mine), (other, host, theirs)):
            inside = self.prefix(here)
            call(*inside, "ip", "link", "set", link, "up")
            call(
                *inside,
                "ip",
                "route",
                "add",
                f"{self.address(there)}/32",
                "dev",
                link,
                "src",
                self.address(here),
            )
            call(*inside, "tc", "qdisc", "replace", "dev", link, "root", *_bucket(mbit))

    def cut_link(self, host: int, other: int) -> None:
        """What ``host`` sends over the link of their own is lost, though it has the address."""
        call(*self.prefix(other), "ip", "link", "set", f"to{host}", "down")

    def sent(self, host: int, interface: str) -> int:
        """Bytes that ``host`` sent on an interface."""
        command = [*self.prefix(host), "cat", f"/sys/class/net/{interface}/statistics/tx_bytes"]
        return int(subprocess.run(command, capture_output=True, check=True).stdout)


def _bucket(mbit: float) -> tuple[str, ...]:
    return ("tbf", "rate", f"{mbit:g}mbit", "burst", "128kb", "latency", "50ms")


@contextlib.contextmanager
def hosts(count: int) -> Iterator[Hosts]:
    """``count`` hosts on one switch; all of it is gone afterwards."""
    tag = f"{os.getpid() % 100000}"
    made = Hosts(tuple(f"sm{tag}h{number}" for number in range(count)), os.getpid() % 250)
    # The switch has a namespace too: a firewall of this machine may filter bridges.
    switch = f"sm{tag}switch"
    within = ("ip", "netns", "exec", switch)
    try:
        call("ip", "netns", "add", switch)
        call(*within, "ip", "link", "add", "bridge", "type", "bridge")
        call(*within, "ip", "link", "set", "bridge", "up")
        for number, name in enumerate(made.names):
            call("ip", "netns", "add", name)
            call(
                *within,
                "ip",
                "link",
                "add",
                f"port{number}",
                "type",
                "veth",
                "peer",
                "name",
                INTERFACE,
                "netns",
                name,
            )
            call(*within, "ip", "link", "set", f"port{number}", "master", "bridge", "up")
            inside = made.prefix(number)
            call(*inside, "ip", "link", "set", "lo", "up")
            call(*inside, "ip", "addr", "add", f"{made.address(number)}/24", "dev", INTERFACE)
            call(*inside, "ip", "link", "set", INTERFACE, "up")
        yield made
    finally:
        for name in (*made.names, switch):
            _tried("ip", "netns", "del", name)
