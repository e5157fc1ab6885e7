"""All facts about one job, from which the verdicts, figures and charts are derived."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from sm_train.cost.estimate import Estimate
from sm_train.cost.instances import InstanceType
from sm_train.cost.timeline import Timeline
from sm_train.toolkit.analysis.diagnose.diagnosis import Diagnosis
from sm_train.toolkit.analysis.review.job_log import JobLog
from sm_train.toolkit.analysis.review.review_model import SampleImage
from sm_train.toolkit.aws.cloudwatch_metrics import Series


@dataclass(frozen=True)
class JobOutcome:
    """The job's status and failure reason, as ``platform`` reports them."""

    status: str
    secondary: str
    failure: str
    stopped_for: str | None
    """Why the job was stopped, from the tag that the stopping program set."""
    platform: str = "SageMaker"


@dataclass(frozen=True)
class JobCost:
    """Costs in dollars; None is unknown. ``basis`` describes how ``billed`` was calculated."""

    billed: float | None
    estimate: Estimate | None
    basis: str


@dataclass(frozen=True)
class JobFacts:
    """Times are Unix seconds; ``timeline`` accounts for the seconds from ``begin`` to ``end``.

    ``billed`` means that SageMaker billed these seconds; for a log alone, they are those between
    its first and last event.
    """

    name: str
    run: str | None
    stage: str | None
    begin: float
    end: float
    billed: bool
    log: JobLog
    timeline: Timeline | None
    outcome: JobOutcome | None
    instance_type: InstanceType | None
    instances: int | None
    diagnosis: Diagnosis | None
    """Why the job failed or its log has no end; None for any other job."""
    metrics: Mapping[tuple[str, str], Series]
    """CloudWatch metrics by instance (``algo-1``) and name."""
    cost: JobCost
    settings: Mapping[str, str]
    samples: tuple[SampleImage, ...]
    diagnose_command: str
    """The command that diagnoses the job."""

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
    def training_span(self) -> tuple[float, float] | None:
        """The times of the first and last step events: excludes start-up and shut-down."""
        times = self.log.steps["time"]
        return (float(times[0]), float(times[-1])) if len(times) > 1 else None

    def usd(self, seconds: float) -> float | None:
        """Return the cost of ``seconds`` of the job."""
        if self.cost.billed is None or self.seconds <= 0:
            return None
        return self.cost.billed * seconds / self.seconds
