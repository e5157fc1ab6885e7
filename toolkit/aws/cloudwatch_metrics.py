"""Reads a job's CloudWatch metrics in bulk: at the finest period still kept, in the fewest calls.

Limits and retention are those of the GetMetricData reference and of CloudWatch's quotas
(docs.aws.amazon.com/AmazonCloudWatch, 2026-11). A call is billed by its number of metrics, not by
their points, so a metric's time range is never split where one call can carry it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from sm_train.estimators.request.metric_definitions import NAMESPACE
from sm_train.toolkit.aws.aws_errors import translate_aws_errors
from sm_train.toolkit.aws.session import cloudwatch_with_unix_times
from sm_train.toolkit.base.errors import ExitCode, UserError

if TYPE_CHECKING:
    import boto3
    import numpy as np
    from numpy.typing import NDArray
    from types_boto3_cloudwatch import CloudWatchClient
    from types_boto3_cloudwatch.type_defs import GetMetricDataOutputTypeDef

INSTANCE_METRICS = (
    "CPUUtilization",
    "MemoryUtilization",
    "GPUUtilization",
    "GPUMemoryUtilization",
    "DiskUtilization",
)
"""Metrics in percent. The CPU's and the GPUs' are sums: an instance with 8 GPUs has up to 800."""

MAX_QUERIES, MAX_POINTS = 500, 100_800
"""Metrics and points of one call."""

_DAY, _HOUR = 86400, 3600
TIERS = ((60, 15 * _DAY), (300, 63 * _DAY), (3600, 455 * _DAY))
"""Period → how long CloudWatch keeps its points, in seconds. It then keeps the next period's."""

_MARGIN = _HOUR
"""Points in the last hour of their retention are not requested: they may expire while reading."""

_CONCURRENT_CALLS = 3
"""Together below the 396,000 points a second that an account may read."""

_ATTEMPTS = 3


@dataclass(frozen=True)
class Series:
    """Points in order of time, float64 ``(num_points,)``; each covers the period that starts at
    its time: 60 s, or 300 s or an hour in older parts of a range. Missing values have no point.
    """

    times: NDArray[np.float64]
    """Unix seconds."""
    values: NDArray[np.float64]


@dataclass(frozen=True)
class Metric:
    """A metric of :data:`NAMESPACE`, identified by its only dimension."""

    name: str
    dimension: str
    value: str


@dataclass(frozen=True)
class MetricWindow:
    """A time range in Unix seconds, the end excluded; both ends are multiples of ``period``."""

    begin: int
    end: int
    period: int

    @property
    def points(self) -> int:
        """Points of one metric."""
        return (self.end - self.begin) // self.period


@dataclass(frozen=True)
class MetricCall:
    """One GetMetricData call within CloudWatch's limits."""

    window: MetricWindow
    metrics: tuple[Metric, ...]


def instance_metrics(
    session: boto3.Session,
    job: str,
    nodes: Sequence[str],
    begin: float,
    end: float,
    *,
    now: float,
    region: str | None = None,
    names: Sequence[str] = INSTANCE_METRICS,
    statistic: str = "Average",
) -> dict[tuple[str, str], Series]:
    """Return the metrics of ``nodes`` (``algo-1``, …) by node and metric name.

    ``begin``, ``end`` and ``now`` are Unix seconds; ``now`` by AWS's clock (``server_time``).
    ``region`` is the session's unless given.

    Raises:
        UserError: AWS returns an error, or cannot return a metric completely.
    """
    requested = {
        (node, name): Metric(name, "Host", f"{job}/{node}") for node in nodes for name in names
    }
    client = cloudwatch_with_unix_times(session, region or session.region_name)
    series = _read(client, list(requested.values()), begin, end, now=now, statistic=statistic)
    return {key: series[metric] for key, metric in requested.items()}


def _read(
    client: CloudWatchClient,
    metrics: Sequence[Metric],
    begin: float,
    end: float,
    *,
    now: float,
    statistic: str,
) -> dict[Metric, Series]:
    calls = list(plan_calls(metrics, begin, end, now))
    parts: dict[Metric, list[Series]] = {metric: [] for metric in metrics}
    with ThreadPoolExecutor(_CONCURRENT_CALLS) as pool:
        for result in pool.map(lambda call: _complete(client, call, statistic), calls):
            for metric, series in result.items():
                parts[metric] += series
    return {metric: _merge(series) for metric, series in parts.items()}


# ------------------------------------------------------------------ planning


def plan_calls(
    metrics: Sequence[Metric], begin: float, end: float, now: float
) -> Iterator[MetricCall]:
    """Yield the calls that read each point of ``metrics`` once."""
    for window in split_range(begin, end, now):
        # A window has at most 15 days of minutes, so one metric of it always fits into a call.
        size = min(MAX_QUERIES, MAX_POINTS // window.points)
        for first in range(0, len(metrics), size):
            yield MetricCall(window, tuple(metrics[first : first + size]))


def split_range(begin: float, end: float, now: float) -> list[MetricWindow]:
    """Split the range up to ``now`` by the finest period that CloudWatch still keeps, oldest
    first; leave out what has expired.

    The first and the last point may extend past the range. Windows meet at whole hours, which
    are multiples of every period, as CloudWatch requires of a start time.
    """
    windows: list[MetricWindow] = []
    upper = min(end, now)
    for period, retention in TIERS:
        oldest = _round_up(now - retention + _MARGIN, _HOUR)
        first = max(int(begin // period) * period, oldest)
        if begin < upper and first < upper:
            windows.append(MetricWindow(first, _round_up(upper, period), period))
            upper = first
    return windows[::-1]


def _round_up(moment: float, step: int) -> int:
    return -int(-moment // step) * step


# ------------------------------------------------------------------ responses


def _complete(
    client: CloudWatchClient, call: MetricCall, statistic: str
) -> dict[Metric, list[Series]]:
    """Repeat the call until every metric is complete; an incomplete one is read again whole."""
    complete: dict[Metric, list[Series]] = {}
    missing = list(call.metrics)
    for attempt in range(_ATTEMPTS):
        if attempt:
            time.sleep(0.5 * 2**attempt)
        series, incomplete = _call_once(client, call.window, missing, statistic)
        complete |= series
        missing = list(incomplete)
        if not missing:
            return complete
    metric, status = next(iter(incomplete.items()))
    raise UserError(
        f"GetMetricData: {metric.name} of {metric.value}: CloudWatch returned {status}; "
        "try again later",
        ExitCode.UNEXPECTED,
    )


def _call_once(
    client: CloudWatchClient, window: MetricWindow, metrics: Sequence[Metric], statistic: str
) -> tuple[dict[Metric, list[Series]], dict[Metric, str]]:
    """Return the series of all pages, and the status of each metric that is incomplete."""
    import numpy as np

    series: dict[Metric, list[Series]] = {metric: [] for metric in metrics}
    statuses: dict[Metric, str] = {}
    for page in _pages(client, _request(window, metrics, statistic)):
        for result in page["MetricDataResults"]:
            metric = metrics[int(result["Id"].removeprefix("m"))]
            times = np.array(result["Timestamps"], np.float64)
            series[metric].append(Series(times, np.array(result["Values"], np.float64)))
            statuses[metric] = result.get("StatusCode", "Complete")
        for message in page.get("Messages", []):
            # CloudWatch sends messages only if it has left something out.
            raise UserError(f"GetMetricData: CloudWatch returned {message}", ExitCode.UNEXPECTED)
    incomplete = {metric: status for metric, status in statuses.items() if status != "Complete"}
    if "Forbidden" in incomplete.values():
        raise UserError(
            "GetMetricData: CloudWatch denies access; allow cloudwatch:GetMetricData",
            ExitCode.PERMISSION,
        )
    return series, incomplete


def _pages(
    client: CloudWatchClient, request: dict[str, Any]
) -> Iterator[GetMetricDataOutputTypeDef]:
    """Yield all pages. A page may be empty or repeat the previous token while CloudWatch is not
    ready; the same token three times is an error.
    """
    tokens: list[str] = []
    while True:
        continuation: dict[str, Any] = {"NextToken": tokens[-1]} if tokens else {}
        with translate_aws_errors("GetMetricData"):
            page = client.get_metric_data(**request, **continuation)
        yield page
        token = page.get("NextToken")
        if not token:
            return
        tokens.append(token)
        if tokens[-_ATTEMPTS:].count(token) == _ATTEMPTS:
            raise UserError(
                "GetMetricData: CloudWatch returns the same page repeatedly; try again later",
                ExitCode.UNEXPECTED,
            )


def _request(window: MetricWindow, metrics: Sequence[Metric], statistic: str) -> dict[str, Any]:
    queries = [
        {
            "Id": f"m{index}",
            "MetricStat": {
                "Metric": {
                    "Namespace": NAMESPACE,
                    "MetricName": metric.name,
                    "Dimensions": [{"Name": metric.dimension, "Value": metric.value}],
                },
                "Period": window.period,
                "Stat": statistic,
            },
        }
        for index, metric in enumerate(metrics)
    ]
    return {
        "MetricDataQueries": queries,
        "StartTime": datetime.fromtimestamp(window.begin, UTC),
        "EndTime": datetime.fromtimestamp(window.end, UTC),
        "ScanBy": "TimestampAscending",
    }


def _merge(parts: Sequence[Series]) -> Series:
    """Concatenate in order of time; keep the first of repeated points."""
    import numpy as np

    times = np.concatenate([np.empty(0), *(part.times for part in parts)])
    values = np.concatenate([np.empty(0), *(part.values for part in parts)])
    times, indices = np.unique(times, return_index=True)
    return Series(times, values[indices])
