"""Training plans: reserved hours of instances for a fee, as SageMaker describes them.

API reference: DescribeTrainingPlan, SearchTrainingPlanOfferings (botocore 1.44.8).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import TYPE_CHECKING, Any, Literal

from sm_train.cost.prices import TRAINING_PLAN, PriceRow
from sm_train.estimators.config.schema import RunConfig
from sm_train.toolkit.aws.aws_errors import translate_aws_errors
from sm_train.toolkit.base.errors import UserError
from sm_train.toolkit.planning.price_table import store_prices
from sm_train.toolkit.terminal.formatting import format_duration, format_usd

if TYPE_CHECKING:
    import boto3

USABLE = ("Active", "Scheduled")
"""Statuses of a plan on which jobs can be created; they wait for a plan that is scheduled."""


@dataclass(frozen=True)
class TrainingPlan:
    """Reserved instances of one type.

    ``seconds`` is the time that the fee has bought of each of ``instances``. A plan may consist of
    several periods between ``start`` and ``end``. ``fee`` is in US dollars, None if it is in
    another currency or not known.
    """

    arn: str
    status: str
    instance_type: str
    instances: int
    in_use: int
    start: datetime | None
    end: datetime | None
    seconds: float
    fee: Decimal | None
    periods: tuple[tuple[datetime, datetime], ...] = ()

    @property
    def name(self) -> str:
        return self.arn.rpartition("/")[2]

    @property
    def region(self) -> str:
        return self.arn.split(":")[3]

    @property
    def usd_per_instance_hour(self) -> Decimal | None:
        """The fee ÷ the hours that it has bought of all instances."""
        return _hourly(self.fee, self.seconds, self.instances)

    def seconds_left(self, now: datetime) -> float:
        """Return the reserved seconds of an instance that are still to come."""
        periods = self.periods
        if not periods and self.start is not None and self.end is not None:
            periods = ((self.start, self.end),)
        left = ((end - max(begin, now)).total_seconds() for begin, end in periods)
        return sum(max(0.0, seconds) for seconds in left)

    def describe(self, now: datetime) -> str:
        """Return one line: type, number, status, times, fee, and the hours that are left."""
        days = [f"{at:%Y-%m-%d %H:%M}" for at in (self.start, self.end) if at is not None]
        reserved = f"{' to '.join(days)} UTC" if days else "no times yet"
        price = self.usd_per_instance_hour
        share = "" if price is None else f", {format_usd(float(price))} an instance-hour"
        return (
            f"{self.name}: {self.instances} × {self.instance_type or 'unknown'} ({self.in_use} in "
            "use), "
            f"{self.status}, {reserved}, {format_duration(self.seconds_left(now))} of "
            f"{format_duration(self.seconds)} left; fee "
            f"{format_usd(None if self.fee is None else float(self.fee))}{share}"
        )

    def price_row(self, today: date) -> PriceRow:
        """Return the price of an instance-hour, which is unknown if the fee is."""
        usd = self.usd_per_instance_hour
        return PriceRow(
            self.instance_type,
            self.region,
            TRAINING_PLAN,
            usd,
            "unknown" if usd is None else "verified",
            f"plan {self.name}: no fee in dollars is known"
            if usd is None
            else f"the fee of plan {self.name} ÷ its hours",
            today.isoformat(),
        )

    def document(self, now: datetime) -> dict[str, Any]:
        """Return it for JSON documents."""
        return {
            "name": self.name,
            "status": self.status,
            "instance_type": self.instance_type,
            "instances": self.instances,
            "instances_in_use": self.in_use,
            "start": None if self.start is None else self.start.isoformat(),
            "end": None if self.end is None else self.end.isoformat(),
            "hours": self.seconds / 3600,
            "hours_left": self.seconds_left(now) / 3600,
            "fee_usd": None if self.fee is None else float(self.fee),
        }


def plan_of(session: boto3.Session, config: RunConfig) -> TrainingPlan | None:
    """Return the plan of a run, and cache its price; None if the run file names none.

    Raises:
        UserError: there is no such plan, or AWS refuses the request.
    """
    if config.cluster.training_plan is None:
        return None
    plan = describe_plan(session, config.cluster.training_plan)
    if plan.instance_type:
        with suppress(OSError):  # a cache that cannot be written keeps nobody from submitting
            store_prices([plan.price_row(datetime.now(UTC).date())], {})
    return plan


def described_plan(
    session: boto3.Session, config: RunConfig
) -> tuple[TrainingPlan | None, str | None]:
    """Return the plan of a run as :func:`plan_of`, and why it is unknown if it cannot be read."""
    try:
        return plan_of(session, config), None
    except UserError as error:
        return None, str(error)


def plan_problems(
    plan: TrainingPlan, config: RunConfig, region: str, needed: float | None, now: datetime
) -> Iterator[tuple[Literal["error", "warning"], str, str]]:
    """Yield what keeps the run from the plan: level, message and fix.

    ``region`` is the run's, and ``needed`` are the seconds that it takes, None if unknown.
    """
    cluster, instances = config.cluster, max(stage.instances for stage in config.stages)
    buy = "`sm-train plans RUN` searches offerings"
    if region != plan.region:
        message = f"{plan.name} is in {plan.region}, the run in {region}"
        yield "error", message, "write the ARN of a plan in the run's region"
    if plan.status not in USABLE:
        yield "error", f"{plan.name} is {plan.status}, and accepts no jobs", buy
    if plan.instance_type not in ("", cluster.instance_type):
        fix = f"write cluster.instance_type: {plan.instance_type}, or the ARN of another plan"
        yield "error", f"{plan.name} reserves {plan.instance_type}", fix
    elif plan.instances < instances:
        message = f"{plan.name} reserves {plan.instances} instances, a stage needs {instances}"
        yield "error", message, f"use fewer instances; {buy}"
    left = plan.seconds_left(now)
    if needed is not None and plan.status in USABLE and left < needed:
        moves = bool(config.recovery.fallbacks)
        then = "then the run moves to its next placement" if moves else "then it stops"
        yield (
            "warning",
            f"{plan.name} has {format_duration(left)} left, the run takes "
            f"{format_duration(needed)}: {then}",
            "extend the plan (ExtendTrainingPlan), or add recovery.fallbacks",
        )


def describe_plan(session: boto3.Session, arn: str) -> TrainingPlan:
    """Return a plan by its ARN.

    Raises:
        UserError: there is none, or AWS refuses the request.
    """
    name, region = arn.rpartition("/")[2], arn.split(":")[3]
    with translate_aws_errors("DescribeTrainingPlan"):
        client = session.client("sagemaker", region_name=region)
        found: Mapping[str, Any] = client.describe_training_plan(TrainingPlanName=name)
    capacities = found.get("ReservedCapacitySummaries", ())
    types = {each["InstanceType"] for each in capacities}
    if len(types) > 1:
        raise UserError(
            f"cluster.training_plan: {name} has no single instance type: {types or '–'}"
        )
    return TrainingPlan(
        arn=found["TrainingPlanArn"],
        status=found["Status"],
        instance_type=types.pop() if types else "",
        instances=found.get("TotalInstanceCount", 0),
        in_use=found.get("InUseInstanceCount", 0),
        start=found.get("StartTime"),
        end=found.get("EndTime"),
        seconds=_seconds(found),
        fee=_fee(found),
        periods=tuple(
            (each["StartTime"], each["EndTime"])
            for each in capacities
            if "StartTime" in each and "EndTime" in each
        ),
    )


@dataclass(frozen=True)
class PlanOffering:
    """Reserved hours that are for sale: ``fee`` dollars for all ``instances``."""

    identifier: str
    instance_type: str
    instances: int
    start: datetime | None
    end: datetime | None
    seconds: float
    fee: Decimal | None

    @property
    def usd_per_instance_hour(self) -> float | None:
        """The fee ÷ the hours of all instances."""
        hourly = _hourly(self.fee, self.seconds, self.instances)
        return None if hourly is None else float(hourly)


def search_offerings(
    session: boto3.Session, instance_type: str, instances: int, hours: int, after: datetime
) -> Sequence[PlanOffering]:
    """Return what is for sale for training jobs, cheapest first.

    Raises:
        UserError: AWS refuses the request.
    """
    with translate_aws_errors("SearchTrainingPlanOfferings"):
        found = session.client("sagemaker").search_training_plan_offerings(
            InstanceType=instance_type,  # type: ignore[arg-type]  # any that the run file may name
            InstanceCount=instances,
            DurationHours=hours,
            StartTimeAfter=after,
            TargetResources=["training-job"],
        )
    offerings = [_offering(each) for each in found["TrainingPlanOfferings"]]
    return sorted(offerings, key=lambda each: (each.fee is None, each.fee or 0))


def _offering(found: Mapping[str, Any]) -> PlanOffering:
    capacities = found.get("ReservedCapacityOfferings", ())
    starts = [each["StartTime"] for each in capacities if "StartTime" in each]
    ends = [each["EndTime"] for each in capacities if "EndTime" in each]
    return PlanOffering(
        found["TrainingPlanOfferingId"],
        capacities[0]["InstanceType"] if capacities else "",
        max((each["InstanceCount"] for each in capacities), default=0),
        min(starts, default=None),
        max(ends, default=None),
        _seconds(found),
        _fee(found),
    )


def _hourly(fee: Decimal | None, seconds: float, instances: int) -> Decimal | None:
    """Return the dollars of an instance-hour of ``seconds`` on all instances, bought for a fee."""
    hours = Decimal(seconds) / 3600 * instances
    return fee / hours if fee is not None and hours else None


def _seconds(found: Mapping[str, Any]) -> float:
    seconds = 3600 * found.get("DurationHours", 0) + 60 * found.get("DurationMinutes", 0)
    return float(seconds)


def _fee(found: Mapping[str, Any]) -> Decimal | None:
    is_known = found.get("UpfrontFee") and found.get("CurrencyCode", "USD") == "USD"
    return Decimal(found["UpfrontFee"].replace(",", "")) if is_known else None
