"""Several network hosts on one computer: namespaces joined by a bridge, with limited bandwidth."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass

INTERFACE = "eth0"


def unavailable_reason() -> str | None:
    """Return why namespaces cannot be created here; None if they can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        return f"{' and '.join(missing)} not found (Debian's iproute2)"
    name = f"smtry{os.getpid()}"
    if not _succeeds("ip", "netns", "add", name):
        return "this kernel or container allows no network namespaces"
    in_namespace = ("ip", "netns", "exec", name)
    shaped = _succeeds(*in_namespace, "tc", "qdisc", "add", "dev", "lo", "root", *_token_bucket(1))
    _succeeds("ip", "netns", "del", name)
    return None if shaped else "this kernel has no token bucket filter (tc tbf)"


def _succeeds(*command: str) -> bool:
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def _call(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)


@dataclass(frozen=True)
class NetworkNamespaces:
    """One namespace per host; host ``n`` has the address :meth:`address` on :data:`INTERFACE`."""

    names: tuple[str, ...]
    subnet: int

    def address(self, host: int) -> str:
        """Return the IPv4 address of ``host``."""
        return f"10.77.{self.subnet}.{host + 1}"

    def prefix(self, host: int) -> tuple[str, ...]:
        """Return the arguments in front of a command that runs it on ``host``."""
        return ("ip", "netns", "exec", self.names[host])

    def limit_egress(self, host: int, mbit: float) -> None:
        """Let ``host`` send at most ``mbit`` Mbit/s."""
        qdisc = ("tc", "qdisc", "replace", "dev", INTERFACE, "root", *_token_bucket(mbit))
        _call(*self.prefix(host), *qdisc)

    def limit_link(self, host: int, other: int, mbit: float) -> None:
        """Route all traffic between two hosts over a link of their own with ``mbit`` Mbit/s.

        Unlike a queue with classes, this needs no further kernel module.
        """
        device, other_device = f"to{other}", f"to{host}"
        add_pair = ("ip", "link", "add", device, "type", "veth", "peer", "name", other_device)
        _call(*self.prefix(host), *add_pair, "netns", self.names[other])
        for source, target, link in ((host, other, device), (other, host, other_device)):
            inside = self.prefix(source)
            _call(*inside, "ip", "link", "set", link, "up")
            route = ("ip", "route", "add", f"{self.address(target)}/32", "dev", link)
            _call(*inside, *route, "src", self.address(source))
            _call(*inside, "tc", "qdisc", "replace", "dev", link, "root", *_token_bucket(mbit))

    def cut_link(self, host: int, other: int) -> None:
        """Drop everything that ``host`` sends over the link made by :meth:`limit_link`."""
        _call(*self.prefix(other), "ip", "link", "set", f"to{host}", "down")

    def set_up(self, host: int, *, up: bool) -> None:
        """Plug or unplug the cable between ``host`` and the switch."""
        _call(*self.prefix(host), "ip", "link", "set", INTERFACE, "up" if up else "down")

    def sent_bytes(self, host: int, interface: str) -> int:
        """Return the bytes that ``host`` has sent on an interface."""
        command = [*self.prefix(host), "cat", f"/sys/class/net/{interface}/statistics/tx_bytes"]
        return int(subprocess.run(command, capture_output=True, check=True).stdout)


def _token_bucket(mbit: float) -> tuple[str, ...]:
    return ("tbf", "rate", f"{mbit:g}mbit", "burst", "128kb", "latency", "50ms")


@contextlib.contextmanager
def network_namespaces(count: int) -> Iterator[NetworkNamespaces]:
    """Create ``count`` hosts on one switch, and delete everything afterwards."""
    tag = f"{os.getpid() % 100000}"
    names = tuple(f"sm{tag}h{number}" for number in range(count))
    namespaces = NetworkNamespaces(names, os.getpid() % 250)
    # The switch has its own namespace too: a firewall of this computer may filter bridges.
    switch = f"sm{tag}switch"
    in_switch = ("ip", "netns", "exec", switch)
    try:
        _call("ip", "netns", "add", switch)
        _call(*in_switch, "ip", "link", "add", "bridge", "type", "bridge")
        _call(*in_switch, "ip", "link", "set", "bridge", "up")
        for number, name in enumerate(names):
            _call("ip", "netns", "add", name)
            port = f"port{number}"
            add_pair = ("ip", "link", "add", port, "type", "veth", "peer", "name", INTERFACE)
            _call(*in_switch, *add_pair, "netns", name)
            _call(*in_switch, "ip", "link", "set", port, "master", "bridge", "up")
            inside, address = namespaces.prefix(number), f"{namespaces.address(number)}/24"
            _call(*inside, "ip", "link", "set", "lo", "up")
            _call(*inside, "ip", "addr", "add", address, "dev", INTERFACE)
            _call(*inside, "ip", "link", "set", INTERFACE, "up")
        yield namespaces
    finally:
        for name in (*names, switch):
            _succeeds("ip", "netns", "del", name)
