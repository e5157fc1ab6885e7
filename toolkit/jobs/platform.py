"""What a platform states about its jobs: one table of phases, which every decision reads.

A phase is what the platform reports a job to be in, such as SageMaker's secondary status. Spending,
stalls, start-up, uploads and restarts are functions of the table of the job's platform.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Literal

Silence = Literal["waits", "prepares", "trains", "stores", "ended", "unknown"]
"""What it means that a job in a phase logs nothing: it *waits* for machines, for hours or days; it
*prepares* to train; it *trains* and must log; it *stores* what it made; or it has ended."""

LOST = "NoHeartbeat"
"""Phase of a job whose nodes send no heartbeats, on a platform that does not tell why."""


@dataclass(frozen=True)
class JobPhase:
    """One phase of a job: whether its time is billed, and what its silence means.

    ``usual`` is how long it takes at most as a rule: a warning follows. After ``limit`` a job that
    is silent is stopped; one that stores what it made is left to the user. None: there is no such
    time. ``source`` says where the platform states the phase.
    """

    name: str
    silence: Silence
    is_billed: bool
    source: str
    usual: timedelta | None = None
    limit: timedelta | None = None


@dataclass(frozen=True)
class Platform:
    """A platform that runs jobs.

    ``name`` is that of the marker of a checkpoint, ``title`` that of messages. ``log_delay`` is how
    late its logs and clocks may be, in seconds: a job that is silent for less has not stalled.
    """

    name: str
    title: str
    phases: Mapping[str, JobPhase] = field(repr=False)
    log_delay: float = 0.0
    restarted_codes: frozenset[int] | None = None
    """Exit codes after which the platform starts a job again; None if it does after any."""
    support: str = "its operators"
    """Who ends a job that does not stop."""
    is_paid: bool = True
    """Whether its time costs money."""
    counted: str = "billed seconds"
    """What :meth:`RunJob.billable_seconds` are."""
    own_retries: str = "its own retries"
    """What continues without a watch."""
    on_stop: str = ""
    """When a job reads a request to stop, after "saves a checkpoint and ends"."""

    def phase(self, name: str) -> JobPhase:
        """Return a phase; one that the table lacks may be billed, and its silence means nothing."""
        return self.phases.get(name, JobPhase(name, "unknown", is_billed=True, source="none"))


def phase_table(phases: Iterable[JobPhase]) -> Mapping[str, JobPhase]:
    """Return phases by name."""
    return {phase.name: phase for phase in phases}
