"""Collects the facts of a job from its source: log, timeline, metrics and cost."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime

from sm_train.cost.estimate import Estimate, money
from sm_train.cost.instances import InstanceType, UnknownInstanceTypeError, instance_type
from sm_train.cost.prices import PriceTable
from sm_train.cost.timeline import Timeline, timeline
from sm_train.estimators.config.schema import RunConfig
from sm_train.toolkit.analysis.diagnose.diagnosis import Diagnosis
from sm_train.toolkit.analysis.review.job_facts import JobCost, JobFacts, JobOutcome
from sm_train.toolkit.analysis.review.job_log import JobLog
from sm_train.toolkit.analysis.review.log_parser import parse_log
from sm_train.toolkit.analysis.review.review_model import SampleImage
from sm_train.toolkit.analysis.review.sample_images import sample_images
from sm_train.toolkit.analysis.review.setting_differences import job_settings
from sm_train.toolkit.analysis.review.sources import ReviewSource
from sm_train.toolkit.aws.aws_errors import translate_aws_errors
from sm_train.toolkit.aws.cloudwatch_metrics import Series
from sm_train.toolkit.base.errors import UserError
from sm_train.toolkit.planning.run_price import estimate_steps
from sm_train.toolkit.records.job_logs import Event
from sm_train.toolkit.records.run_job import RunJob


@dataclass
class FactsCollector:
    """Collects the facts of a review's jobs; call it for the oldest job first.

    ``region`` is the run's; ``config`` is the run file of ``--run`` for the estimate; ``now`` is
    the platform's time.
    """

    region: str
    prices: PriceTable
    config: RunConfig | None = None
    now: datetime = datetime.min
    with_samples: bool = False
    warnings: list[str] = field(default_factory=list)
    """What could not be read, and what is missing because of it."""
    _last_steps: dict[tuple[str, str], int] = field(default_factory=dict)
    """(run, stage) → the last step that an earlier job of the stage reached."""

    def collect(self, source: ReviewSource) -> JobFacts:
        """Collect the facts of the source's job.

        Raises:
            UserError: AWS rejects a request, or a log cannot be read.
        """
        log = parse_log(source.blocks())
        start = log.last("start") or {}
        job = source.job
        run, stage = (job.run, job.stage) if job else (start.get("run"), start.get("stage"))
        begin, end = job.billed_interval(self.now) if job else (log.span or (0.0, 0.0))
        job_timeline = self._timeline(log, begin, end, job)
        instance_type, instances = _cluster(job, start)
        return JobFacts(
            name=source.name,
            run=run,
            stage=stage,
            begin=begin,
            end=end,
            billed=job is not None,
            log=log,
            timeline=job_timeline,
            outcome=_outcome(job) if job else None,
            diagnosis=self._diagnosis(source, log),
            instance_type=instance_type,
            instances=instances,
            metrics=self._metrics(source, begin, end),
            cost=self._cost(source, stage, job_timeline, instance_type, instances, end - begin),
            settings=job_settings(source.config or self.config, stage, start),
            samples=self._samples(source),
            diagnose_command=_diagnose_command(source),
        )

    def _diagnosis(self, source: ReviewSource, log: JobLog) -> Diagnosis | None:
        """Diagnose a job that failed, and a log whose training does not end as planned."""
        end = log.last("end")
        failed = source.job.status == "Failed" if source.job else not end or end["reason"] != "done"
        if not failed:
            return None
        try:
            return source.diagnose()
        except UserError as error:
            self.warnings.append(f"{source.name}: the logs cannot be diagnosed: {error}")
            return None

    def _samples(self, source: ReviewSource) -> tuple[SampleImage, ...]:
        if not self.with_samples:
            return ()
        try:
            if source.run is None:
                return sample_images(source.sample_grids())
            with translate_aws_errors("the sampled images"):
                return sample_images(source.sample_grids())
        except (UserError, OSError) as error:
            self.warnings.append(f"{source.name}: the sampled images are missing: {error}")
            return ()

    def _timeline(
        self, log: JobLog, begin: float, end: float, job: RunJob | None
    ) -> Timeline | None:
        """Compute the timeline; steps that an earlier job of the stage had done count as lost."""
        if not log.events["start"] or end <= begin:
            return None
        if job is None:
            return timeline(log.progress(), begin, end)
        stage = (job.run, job.stage)
        result = timeline(log.progress(), begin, end, self._last_steps.get(stage))
        self._last_steps[stage] = max(result.last_step, self._last_steps.get(stage, 0))
        return result

    def _metrics(
        self, source: ReviewSource, begin: float, end: float
    ) -> Mapping[tuple[str, str], Series]:
        run, job = source.run, source.job
        if run is None or job is None or end <= begin:
            return {}
        now = self.now.timestamp()
        try:
            metrics = run.node_metrics(job, job.nodes, begin, end, now)
        except UserError as error:
            self.warnings.append(f"{job.name}: CloudWatch metrics are missing: {error}")
            return {}
        return {key: series for key, series in metrics.items() if len(series.times)}

    def _cost(
        self,
        source: ReviewSource,
        stage: str | None,
        job_timeline: Timeline | None,
        instance_type: InstanceType | None,
        instances: int | None,
        log_seconds: float,
    ) -> JobCost:
        job = source.job
        estimate = _estimate(source.config or self.config, self.region, stage, job_timeline)
        name = job.instances[0] if job else instance_type.name if instance_type else None
        if name is None:
            return JobCost(None, estimate, "the instance type's price is unknown")
        region = job.region if job else self.region
        price = job.price(self.prices) if job else self.prices.price(name, region)
        # A spot job is billed for fewer seconds than have passed.
        seconds = log_seconds if job is None else job.billable_seconds(self.now)
        billed = money(seconds, instances or 1, price.usd_per_instance_hour)
        kind = job.platform.counted if job else "seconds in the log"
        return JobCost(
            None if billed is None else float(billed),
            estimate,
            f"{kind} × {instances or 1} × {name} in {region}, {price.source}",
        )


def _diagnose_command(source: ReviewSource) -> str:
    """Return the command that diagnoses the job, or the files of its log."""
    if source.run is None or source.job is None:
        return f"`sm-train diagnose {source.name}`"
    return f"`{source.run.diagnose_command(source.job)}`"


def _cluster(job: RunJob | None, start: Event) -> tuple[InstanceType | None, int | None]:
    """Return the instance type and count, of the job or else of its ``start`` event."""
    name, count = job.instances if job else (start.get("instance_type"), start.get("nodes"))
    try:
        return instance_type(name or ""), count
    except UnknownInstanceTypeError:
        return None, count


def _outcome(job: RunJob) -> JobOutcome:
    return JobOutcome(
        job.status,
        job.secondary_status,
        job.failure_reason,
        job.stopped_for,
        job.platform.title,
    )


def _estimate(
    config: RunConfig | None, region: str, stage: str | None, job_timeline: Timeline | None
) -> Estimate | None:
    """Estimate the cost of the steps that the job completed."""
    if config is None or job_timeline is None:
        return None
    steps = job_timeline.last_step - job_timeline.first_step
    planned = next((candidate for candidate in config.stages if candidate.name == stage), None)
    if steps <= 0 or planned is None:
        return None
    return estimate_steps(config, region, planned, steps)
