"""From a source to the facts of a job: its lines, its seconds, its metrics and its dollars."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from sm_train.cost.estimate import Estimate, Purchase, hourly_price, money
from sm_train.cost.instances import InstanceType, instance_types
from sm_train.cost.prices import PriceTable
from sm_train.cost.timeline import Timeline, timeline
from sm_train.estimators.config.schema import RunConfig
from sm_train.toolkit.aws.cloudwatch_metrics import Series, instance_metrics
from sm_train.toolkit.costing.run_price import estimate_steps
from sm_train.toolkit.errors import UserError
from sm_train.toolkit.jobs.training_job import STOPPED_TAG, TrainingJob
from sm_train.toolkit.review.job_facts import JobFacts, JobOutcome, Money
from sm_train.toolkit.review.job_log import JobLog
from sm_train.toolkit.review.log_parser import parse_log
from sm_train.toolkit.review.sources import ReviewSource


@dataclass
class Gatherer:
    """Of the jobs of one review, the oldest first.

    ``session`` is None where nothing is asked of AWS; ``region`` is the run's own; ``config`` is a
    run file that was named for the estimate, ``now`` is AWS's time.
    """

    region: str
    prices: PriceTable
    session: Any = None
    config: RunConfig | None = None
    now: datetime = datetime.min
    notes: list[str] = field(default_factory=list)
    """What could not be read, and what that hides."""
    _reached: dict[tuple[str, str], int] = field(default_factory=dict)

    def gather(self, source: ReviewSource) -> JobFacts:
        """Read everything about the source's job.

        Raises:
            UserError: AWS refuses, or a log cannot be read.
        """
        told = parse_log(source.blocks())
        start = told.last("start") or {}
        job = source.job
        run, stage = (job.run, job.stage) if job else (start.get("run"), start.get("stage"))
        begin, end = job.billed_interval(self.now) if job else (told.span or (0.0, 0.0))
        line = self._account(told, begin, end, job)
        machine, instances = _machines(job, start)
        return JobFacts(
            name=source.name,
            run=run,
            stage=stage,
            begin=begin,
            end=end,
            billed=job is not None,
            log=told,
            line=line,
            ending=_ending(job) if job else None,
            machine=machine,
            instances=instances,
            metrics=self._metrics(job, begin, end),
            money=self._money(source, stage, line, machine, instances, end - begin),
        )

    def _account(
        self, told: JobLog, begin: float, end: float, job: TrainingJob | None
    ) -> Timeline | None:
        """What an earlier job of the stage had reached, and this one did again, was lost."""
        if not told.events["start"] or end <= begin:
            return None
        if job is None:
            return timeline(told.progress(), begin, end)
        stage = (job.run, job.stage)
        line = timeline(told.progress(), begin, end, self._reached.get(stage))
        self._reached[stage] = max(line.last_step, self._reached.get(stage, 0))
        return line

    def _metrics(
        self, job: TrainingJob | None, begin: float, end: float
    ) -> Mapping[tuple[str, str], Series]:
        if job is None or end <= begin:
            return {}
        now = self.now.timestamp()
        try:
            found = instance_metrics(
                self.session, job.name, job.nodes, begin, end, now=now, region=job.region
            )
        except UserError as error:
            self.notes.append(f"{job.name}: without CloudWatch's metrics: {error}")
            return {}
        return {key: series for key, series in found.items() if len(series.times)}

    def _money(
        self,
        source: ReviewSource,
        stage: str | None,
        line: Timeline | None,
        machine: InstanceType | None,
        instances: int | None,
        passed: float,
    ) -> Money:
        job = source.job
        estimate = _estimate(source.config or self.config, self.region, stage, line)
        name = job.instances[0] if job else machine.name if machine else None
        if name is None:
            return Money(None, estimate, "the machines' price is not known")
        region = job.region if job else self.region
        purchase = Purchase(region, job.capacity if job else "on-demand")
        price = hourly_price(name, purchase, self.prices)
        # The billed seconds of a spot job are fewer than those that passed.
        seconds = passed if job is None else job.billable_seconds(self.now)
        billed = money(seconds, instances or 1, price.usd_per_instance_hour)
        what = "billed seconds" if job else "seconds in the log"
        return Money(
            None if billed is None else float(billed),
            estimate,
            f"{what} × {instances or 1} × {name} in {region}, {price.source}",
        )


def _machines(
    job: TrainingJob | None, start: Mapping[str, Any]
) -> tuple[InstanceType | None, int | None]:
    name, count = job.instances if job else (start.get("instance_type"), start.get("nodes"))
    return {one.name: one for one in instance_types()}.get(name or ""), count


def _ending(job: TrainingJob) -> JobOutcome:
    return JobOutcome(
        job.status, job.secondary_status, job.failure_reason, job.tags.get(STOPPED_TAG)
    )


def _estimate(
    config: RunConfig | None, region: str, stage: str | None, line: Timeline | None
) -> Estimate | None:
    """Of the iterations that the job did."""
    if config is None or line is None or line.last_step <= line.first_step:
        return None
    planned = next((one for one in config.stages if one.name == stage), None)
    if planned is None:
        return None
    return estimate_steps(config, region, planned, line.last_step - line.first_step)
