"""Inventory of a node's GPUs, parsed from nvidia-smi."""

from __future__ import annotations

import csv
import re
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass, replace

# Field of Gpu → nvidia-smi property. The slowdown property stays last: see read_gpus.
_QUERY = {
    "name": "name",
    "memory_mib": "memory.total",
    "clock_mhz": "clocks.current.sm",
    "clock_limit_mhz": "clocks.max.sm",
    "ecc": "ecc.mode.current",
    "ecc_errors": "ecc.errors.uncorrected.volatile.total",
    "temperature": "temperature.gpu",
    "driver": "driver_version",
    "slowdown": "clocks_event_reasons.hw_slowdown",
}
_OLD_SLOWDOWN = "clocks_throttle_reasons.hw_slowdown"
"""The slowdown property's name before driver 535; an unknown name fails the whole query."""

# "nvidia-smi nvlink --status" prints a header per GPU ("GPU 0: NVIDIA A100 (UUID: …)") and a line
# per link: " Link 0: 25 GB/s" if it is up, " Link 1: <inactive>" if it is down.
_GPU_HEADER = re.compile(r"GPU \d+:")
_LINK = re.compile(r"Link \d+: (?P<state>.+)")
_NUMBER = re.compile(r"[0-9]{1,15}")  # not "[N/A]", nor digits that int() cannot mean
_TIMEOUT_SECONDS = 20


@dataclass(frozen=True)
class Gpu:
    """One GPU; None is what the driver does not report.

    Memory is in MiB, clocks in MHz, temperature in °C. ``ecc_errors`` counts uncorrected errors
    since the driver was loaded; ``slowdown`` is the hardware's own (heat or power); ``links``
    counts active NVLinks.
    """

    name: str
    memory_mib: int | None
    clock_mhz: int | None
    clock_limit_mhz: int | None
    ecc: bool | None
    ecc_errors: int | None
    temperature: int | None
    slowdown: bool | None
    driver: str | None
    links: int | None = None
    links_inactive: int | None = None


def read_gpus() -> tuple[Gpu, ...]:
    """Return this node's GPUs; empty without a driver."""
    *names, slowdown = _QUERY.values()
    for last in (slowdown, _OLD_SLOWDOWN):
        query = ",".join([*names, last])
        if text := _nvidia_smi(f"--query-gpu={query}", "--format=csv,noheader,nounits"):
            return with_links(parse_gpus(text), _nvidia_smi("nvlink", "--status"))
    return ()


def _nvidia_smi(*arguments: str) -> str:
    """Return nvidia-smi's output; empty if it is missing, fails or hangs."""
    try:
        return subprocess.run(
            ["nvidia-smi", *arguments],
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_SECONDS,
            check=True,
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return ""


def parse_gpus(text: str) -> tuple[Gpu, ...]:
    """Parse CSV rows with the columns of :data:`_QUERY`; skips rows with another column count."""
    rows = csv.reader(text.splitlines(), skipinitialspace=True)
    return tuple(
        _gpu(dict(zip(_QUERY, map(str.strip, row), strict=True)))
        for row in rows
        if len(row) == len(_QUERY)
    )


def _gpu(row: dict[str, str]) -> Gpu:
    return Gpu(
        name=row["name"],
        memory_mib=_number(row["memory_mib"]),
        clock_mhz=_number(row["clock_mhz"]),
        clock_limit_mhz=_number(row["clock_limit_mhz"]),
        ecc=_switch(row["ecc"], "Enabled", "Disabled"),
        ecc_errors=_number(row["ecc_errors"]),
        temperature=_number(row["temperature"]),
        slowdown=_switch(row["slowdown"], "Active", "Not Active"),
        driver=row["driver"] or None,
    )


def _number(text: str) -> int | None:
    return int(text) if _NUMBER.fullmatch(text) else None


def _switch(text: str, on: str, off: str) -> bool | None:
    return {on: True, off: False}.get(text)


def with_links(gpus: tuple[Gpu, ...], status: str) -> tuple[Gpu, ...]:
    """Return ``gpus`` with the link counts of ``nvidia-smi nvlink --status``, in the same order."""
    counts = list(link_counts(status.splitlines()))
    if len(counts) != len(gpus):
        return gpus
    return tuple(
        replace(gpu, links=active, links_inactive=inactive)
        for gpu, (active, inactive) in zip(gpus, counts, strict=True)
    )


def link_counts(lines: Iterable[str]) -> list[tuple[int, int]]:
    """Return ``(active, inactive)`` NVLinks of each GPU; an active link shows its rate."""
    counts: list[tuple[int, int]] = []
    for line in lines:
        if _GPU_HEADER.match(line):
            counts.append((0, 0))
        elif counts and (match := _LINK.search(line)):
            active, inactive = counts[-1]
            up = "GB/s" in match["state"]
            counts[-1] = (active + up, inactive + (not up))
    return counts
