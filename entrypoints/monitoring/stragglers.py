"""Finds ranks that the others wait for in every step, from their busy times. Pure."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class BusyTotals:
    """What one rank has spent so far outside collectives, over ``steps`` optimizer steps.

    ``cpu_wait_seconds`` is how long its main thread was ready to run while other programs used the
    CPU cores.
    """

    rank: int
    node: int
    steps: int
    busy_seconds: float
    cpu_wait_seconds: float
