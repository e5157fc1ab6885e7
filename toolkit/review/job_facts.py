"""Everything that is known of one job before anything is said of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from sm_train.cost.estimate import Estimate
from sm_train.cost.instances import InstanceType
from sm_train.cost.timeline import Timeline
from sm_train.toolkit.aws.cloudwatch_metrics import Series
from sm_train.toolkit.review.job_log import JobLog


@dataclass(frozen=True)
class JobOutcome:
    """How SageMaker says that the job stands or ended."""

    status: str
    secondary: str
    failure: str
    stopped_for: str | None
    """Why it was stopped, as whoever stopped it noted."""


@dataclass(frozen=True)
class Money:
    """Dollars; None is unknown. ``basis`` says what ``billed`` rests on."""

    billed: float | None
    estimate: Estimate | None
    basis: str


@dataclass(frozen=True)
class JobFacts:
    """Times are Unix seconds; ``line`` accounts for the seconds from ``begin`` to ``end``.

    ``billed`` says whether SageMaker billed them; of a log alone they are those it speaks of.
    """

    name: str
    run: str | None
    stage: str | None
    begin: float
    end: float
    billed: bool
    log: JobLog
    line: Timeline | None
    ending: JobOutcome | None
    machine: InstanceType | None
    instances: int | None
    metrics: Mapping[tuple[str, str], Series]
    """CloudWatch's, by machine (``algo-1``) and name."""
    money: Money

    @property
    def seconds(self) -> float:
        return self.end - self.begin

    @property
    def multi_node(self) -> bool:
        return (self.instances or 1) > 1

    @property
    def backend(self) -> str | None:
        start = self.log.last("start")
        return start["backend"] if start else None

    @property
    def trains(self) -> tuple[float, float] | None:
        """From the first step's line to the last's: start-up and the end are not in it."""
        times = self.log.steps["time"]
        return (float(times[0]), float(times[-1])) if len(times) > 1 else None

    def usd(self, seconds: float) -> float | None:
        """What ``seconds`` of the job cost."""
        if self.money.billed is None or self.seconds <= 0:
            return None
        return self.money.billed * seconds / self.seconds
