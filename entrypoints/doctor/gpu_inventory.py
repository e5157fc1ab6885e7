"""A node's GPUs as the driver tells of them: nvidia-smi's answers, parsed."""

from __future__ import annotations

import csv
import re
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass, replace

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
"""The last one's name before driver 535; a name that is not known fails the whole query."""

_LINK = re.compile(r"Link (?P<number>\d+): (?P<state>.+)")
_TIMEOUT = 20


@dataclass(frozen=True)
class Gpu:
    """One GPU; None is what the driver does not say.

    Memory is in MiB and clocks in MHz; ``ecc_errors`` are uncorrected ones since the driver was
    loaded; ``slowdown`` is the hardware's own (heat or power); ``links`` are active NVLinks.
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
    """This node's GPUs; empty without a driver."""
    *names, slowdown = _QUERY.values()
    for last in (slowdown, _OLD_SLOWDOWN):
        query = ",".join([*names, last])
        if answer := _ask(f"--query-gpu={query}", "--format=csv,noheader,nounits"):
            return with_links(parse_gpus(answer), _ask("nvlink", "--status"))
    return ()


def _ask(*arguments: str) -> str:
    try:
        return subprocess.run(
            ["nvidia-smi", *arguments], capture_output=True, text=True, timeout=_TIMEOUT, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return ""


def parse_gpus(text: str) -> tuple[Gpu, ...]:
    """The rows of :data:`_QUERY`; those of another shape are passed over."""
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
    return int(text) if re.fullmatch(r"[0-9]{1,15}", text) else None


def _switch(text: str, on: str, off: str) -> bool | None:
    return {on: True, off: False}.get(text)


def with_links(gpus: tuple[Gpu, ...], status: str) -> tuple[Gpu, ...]:
    """``gpus`` with what ``nvidia-smi nvlink --status`` says of each, in the same order."""
    counts = list(link_counts(status.splitlines()))
    if len(counts) != len(gpus):
        return gpus
    return tuple(
        replace(gpu, links=active, links_inactive=inactive)
        for gpu, (active, inactive) in zip(gpus, counts, strict=True)
    )


def link_counts(lines: Iterable[str]) -> list[tuple[int, int]]:
    """Active and inactive NVLinks of each GPU: an active one shows its rate."""
    counts: list[tuple[int, int]] = []
    for line in lines:
        if re.match(r"GPU \d+:", line):
            counts.append((0, 0))
        elif counts and (match := _LINK.search(line)):
            active, inactive = counts[-1]
            up = "GB/s" in match["state"]
            counts[-1] = (active + up, inactive + (not up))
    return counts
