"""Totals over the account's past jobs by month and tag: ``cost --report``."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

from sm_train.cost.instances import UnknownInstanceTypeError, instance_type
from sm_train.cost.prices import PriceTable
from sm_train.toolkit.base.errors import UserError
from sm_train.toolkit.planning.spent import job_usd
from sm_train.toolkit.records.training_job import TrainingJob, jobs_since

if TYPE_CHECKING:
    import boto3

COLUMNS = (
    "month group jobs instance_hours gpu_hours cost_usd cost_at_least_usd price_status".split()
)

_DEFAULT_MONTHS = 3
"""Calendar months that are reported, the current one included."""

_LONGEST_JOB = timedelta(days=56)
"""A job created earlier has ended: it waits and runs for 28 days each at most (SageMaker API
reference, StoppingCondition)."""

_TAG = "tag:"
_GROUPS: dict[str, Callable[[TrainingJob], str]] = {
    "run": lambda job: job.run,
    "stage": lambda job: f"{job.run} {job.stage}",
    "instance-type": lambda job: job.instances[0],
    "status": lambda job: job.status,
    "region": lambda job: job.region,
}


@dataclass
class _Row:
    """Sums of a month's jobs of one group; ``usd`` counts the jobs whose price is known."""

    jobs: set[str] = field(default_factory=set)
    instance_hours: float = 0.0
    gpu_hours: float = 0.0
    usd: float = 0.0
    is_complete: bool = True
    statuses: set[str] = field(default_factory=set)

    def add(self, job: TrainingJob, share: float, seconds: float, prices: PriceTable) -> None:
        """Add ``share`` of the job's billed ``seconds``."""
        name, count = job.instances
        hours = share * seconds * count / 3600
        self.jobs.add(job.name)
        self.instance_hours += hours
        try:
            self.gpu_hours += hours * instance_type(name).accelerators
        except UnknownInstanceTypeError:
            self.is_complete = False
            return
        self.statuses.add(job.price(prices).status)
        usd = job_usd(job, prices, share * seconds)
        self.usd += usd or 0.0
        self.is_complete = self.is_complete and usd is not None

    def as_dict(self, month: str, group: str | None) -> dict[str, Any]:
        return {
            "month": month,
            "group": group,
            "jobs": len(self.jobs),
            "instance_hours": round(self.instance_hours, 3),
            "gpu_hours": round(self.gpu_hours, 3),
            "cost_usd": round(self.usd, 2) if self.is_complete else None,
            "cost_at_least_usd": round(self.usd, 2),
            "price_status": ", ".join(sorted(self.statuses)),
        }


def reported_period(since: str | None, now: datetime) -> tuple[datetime, datetime]:
    """Return the first moment of the report and the one after its last, in UTC.

    Raises:
        UserError: ``since`` is no date.
    """
    if since is not None:
        return _date(since), now
    first = now.replace(day=1, hour=0, minute=0, second=0, microsecond=0)
    for _ in range(_DEFAULT_MONTHS - 1):
        first = (first - timedelta(days=1)).replace(day=1)
    return first, now


def past_jobs_document(
    session: boto3.Session,
    prices: PriceTable,
    by: str,
    period: tuple[datetime, datetime],
    now: datetime,
) -> dict[str, Any]:
    """Return the document of ``cost --report``: what the jobs of all runs cost.

    A job's billed time counts in the months in which it was billed.

    Raises:
        UserError: ``by`` is unknown, or AWS returns an error.
    """
    group_of = _grouping(by)
    jobs = jobs_since(session, period[0] - _LONGEST_JOB)
    rows: dict[tuple[str, str | None], _Row] = {}
    total = _Row()
    for job in jobs:
        seconds = job.billable_seconds(now)
        for month, share in _months(job, period, now):
            if seconds * share > 0:
                rows.setdefault((month, group_of(job)), _Row()).add(job, share, seconds, prices)
                total.add(job, share, seconds, prices)
    ordered = sorted(rows, key=lambda key: (key[0], -rows[key].usd, key[1] or ""))
    return {
        "by": by,
        "since": period[0].isoformat(),
        "until": period[1].isoformat(),
        "region": session.region_name,
        "rows": [rows[key].as_dict(*key) for key in ordered],
        "total": total.as_dict("", None),
    }


def _grouping(by: str) -> Callable[[TrainingJob], str | None]:
    if by.startswith(_TAG) and len(by) > len(_TAG):
        key = by.removeprefix(_TAG)
        return lambda job: job.tags.get(key)
    if by not in _GROUPS:
        raise UserError(f"--by: {by!r} must be tag:KEY or one of {', '.join(_GROUPS)}")
    return _GROUPS[by]


def _months(
    job: TrainingJob, period: tuple[datetime, datetime], now: datetime
) -> Iterator[tuple[str, float]]:
    """Yield each month of the period in which the job was billed, and its share of the time."""
    start, end = job.billed_interval(now)
    if end <= start:
        return
    first = max(start, period[0].timestamp())
    last = min(end, period[1].timestamp())
    moment = datetime.fromtimestamp(first, UTC)
    while first < last:
        following = min(_next_month(moment).timestamp(), last)
        yield f"{moment:%Y-%m}", (following - first) / (end - start)
        first, moment = following, datetime.fromtimestamp(following, UTC)


def _next_month(moment: datetime) -> datetime:
    first = moment.replace(day=1, hour=0, minute=0, second=0, microsecond=0)
    return (first + timedelta(days=32)).replace(day=1)


def _date(since: str) -> datetime:
    try:
        if not re.fullmatch(r"\d+-\d+-\d+", since):
            raise ValueError
        return datetime.strptime(since, "%Y-%m-%d").replace(tzinfo=UTC)
    except ValueError:
        raise UserError(f"--since: {since!r} must be a date such as 2026-09-01") from None


def table_rows(document: dict[str, Any]) -> Iterable[tuple[str, ...]]:
    """Return the cells of the report, the total first."""
    for row in (document["total"] | {"month": "total", "group": ""}, *document["rows"]):
        group = "(no tag)" if row["group"] is None else row["group"]
        unknown = row["cost_usd"] is None
        yield (
            row["month"],
            group,
            f"{row['jobs']:,}",
            f"{row['gpu_hours']:,.1f}",
            f"{'≥ ' * unknown}${row['cost_at_least_usd']:,.2f}",
            row["price_status"],
        )
