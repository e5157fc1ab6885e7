"""One job of a run on any platform: the facts that its platform states, and what follows of them.

An attempt of a stage on a cluster is a job, as is a training job of SageMaker.

A platform states the phases of its jobs in one table, which every decision reads. A phase is what
the platform reports a job to be in, such as SageMaker's secondary status. Spending, stalls,
start-up, uploads and restarts are functions of the table of the job's platform.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from decimal import Decimal
from itertools import pairwise
from typing import Literal

from sm_train.cost.prices import ON_DEMAND, TRAINING_PLAN, Price, PriceTable

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


ENDED = ("Completed", "Failed", "Stopped", "Deleting")
"""Statuses of jobs that are no longer billed. A status not listed here may be billed."""

_STOP_SECONDS = 600.0
"""How much earlier than its limit a job may end by it: clocks, and the time of its stop."""


@dataclass(frozen=True)
class RunJob:
    """One job of a run, or one attempt of a stage. Times are aware, durations in seconds.

    ``secondary_status`` is its phase, and ``phases`` are all phases so far with their begin,
    oldest first. ``started`` is when billing began. ``reported_seconds`` are those that the
    platform reports as billed, None until it does, and ``retained_seconds`` those for which a warm
    pool kept its instances. ``stopped_for`` is why a watcher or a user stopped it, ``from_step``
    the step that it resumed from, None if that is not recorded.
    """

    name: str
    run: str
    stage: str
    status: str
    platform: Platform = field(kw_only=True)
    region: str = field(kw_only=True)
    created: datetime = field(kw_only=True)
    instances: tuple[str, int] = field(kw_only=True)
    """Type and number of the billed instances."""
    nodes: tuple[str, ...] = field(kw_only=True)
    """The names of its nodes, in rank order."""
    identifier: str = field(default="", kw_only=True)
    """By which its platform knows it, such as its ARN."""
    stop_command: str | None = field(default=None, kw_only=True)
    """The platform's own command that stops it."""
    output_uri: str = field(default="", kw_only=True)
    """The address of the archives of its model and its output, without a slash at its end."""
    checkpoint_uri: str = field(default="", kw_only=True)
    """The address of its stage's checkpoints, without a slash at its end."""
    secondary_status: str = field(default="", kw_only=True)
    started: datetime | None = field(default=None, kw_only=True)
    ended: datetime | None = field(default=None, kw_only=True)
    failure_reason: str = field(default="", kw_only=True)
    """The platform's reason as one line; empty if it gives none."""
    phases: tuple[tuple[str, datetime], ...] = field(default=(), kw_only=True)
    reported_seconds: float | None = field(default=None, kw_only=True)
    reported_retained_seconds: float = field(default=0.0, kw_only=True)
    has_warm_pool: bool = field(default=False, kw_only=True)
    """Whether its instances wait for another job, and are billed."""
    spot: bool = field(default=False, kw_only=True)
    price_kind: str = field(default=ON_DEMAND, kw_only=True)
    """How :meth:`billable_seconds` are priced, one of :data:`~sm_train.cost.prices.KINDS`."""
    accepted_price: Price | None = field(default=None, kw_only=True)
    """The price with which its plan was accepted."""
    tags: Mapping[str, str] = field(default_factory=dict, kw_only=True)
    """What users and tools have attached to it."""
    max_runtime: float | None = field(default=None, kw_only=True)
    """After these seconds its platform stops it."""
    are_instances_chosen: bool = field(default=True, kw_only=True)
    """False while its platform may still choose among several types."""
    placement: int = field(default=0, kw_only=True)
    """Number of its placement (estimators.config.placement)."""
    auto_advance: bool = field(default=False, kw_only=True)
    """Whether the next stage starts automatically after this one."""
    stopped_for: str | None = field(default=None, kw_only=True)
    from_step: int | None = field(default=None, kw_only=True)
    finished_step: int | None = field(default=None, kw_only=True)
    """The step at which its program finished, if its platform keeps it."""
    got_no_instances: bool = field(default=False, kw_only=True)
    """Whether its platform gave it up because it got no instances within cluster.max_pending."""

    @property
    def live(self) -> bool:
        return self.status not in ENDED

    @property
    def may_start_again(self) -> bool:
        """Whether its platform may start an ended job again on its own."""
        return False

    @property
    def attempt(self) -> int:
        """Counted from 1 within the stage."""
        return int(self.name.rpartition("-")[2])

    @property
    def phase(self) -> JobPhase:
        """Its phase as the table of its platform has it."""
        phase = self.platform.phase(self.secondary_status)
        is_stopping = self.status == "Stopping" and phase.silence != "stores"
        return self.platform.phase("Stopping") if is_stopping else phase

    @property
    def phase_since(self) -> datetime:
        """When its phase began, or when billing began if the platform does not tell."""
        begins = [begin for name, begin in self.phases if name == self.phase.name]
        return max(begins, default=self.started or self.created)

    def seconds_in_phase(self, now: datetime) -> float:
        """Seconds since its phase began."""
        return max(0.0, (now - self.phase_since).total_seconds())

    @property
    def ended_with_its_plan(self) -> bool:
        """Whether a job on reserved hours was stopped before it had used its own."""
        if self.price_kind != TRAINING_PLAN or None in (self.max_runtime, self.started, self.ended):
            return False
        assert self.started is not None
        assert self.ended is not None
        ran = (self.ended - self.started).total_seconds()
        return ran < (self.max_runtime or 0.0) - _STOP_SECONDS

    def price(self, prices: PriceTable) -> Price:
        """Return the price of an hour of :meth:`billable_seconds` on one of its instances.

        While the platform reports no billed seconds, that of the plan with which the job was
        started applies, whatever table the machine has that asks. So does a fee that was prepaid.
        """
        if not self.platform.is_paid:
            where = f"{self.platform.title} costs nothing"
            return Price(self.instances[0], self.region, Decimal(0), "verified", where, None)
        is_prepaid = self.price_kind == TRAINING_PLAN
        if self.accepted_price and (is_prepaid or self.reported_seconds is None):
            return self.accepted_price
        return prices.price(self.instances[0], self.region, self.price_kind)

    def billable_seconds(self, now: datetime) -> float:
        """Seconds billed so far: of the job, and of the warm pool that keeps its instances."""
        return self._job_seconds(now) + self.retained_seconds(now)

    def retained_seconds(self, now: datetime) -> float:
        """Seconds billed so far for the time in which a warm pool kept its instances.

        The platform reports them; of a pool that still waits, those since the job's end if these
        are more.
        """
        if self.has_warm_pool and self.ended is not None:
            return max(self.reported_retained_seconds, (now - self.ended).total_seconds())
        return self.reported_retained_seconds

    def _job_seconds(self, now: datetime) -> float:
        """Seconds billed for the job itself; until they are reported, those of billed phases."""
        if self.reported_seconds is not None:
            return self.reported_seconds
        if self.started is None:
            return 0.0
        end = self.ended or now
        if not self.phases:
            return max(0.0, (end - self.started).total_seconds())
        seconds = 0.0
        for (name, begin), (_, until) in pairwise([*self.phases, ("", end)]):
            if self.platform.phase(name).is_billed:
                billed = min(until, end) - max(begin, self.started)
                seconds += max(0.0, billed.total_seconds())
        return seconds

    def billed_interval(self, now: datetime) -> tuple[float, float]:
        """Return the time from the first billed second to the last one (Unix seconds).

        Less than that is billed of spot instances, and of a job that waits for instances again.
        """
        end = (self.ended or now).timestamp()
        if self.started is not None and (self.spot or self.reported_seconds is None):
            return self.started.timestamp(), end
        return end - self._job_seconds(now), end
