"""A job's CloudWatch metrics, in bulk: as fine as they still exist, in as few calls as allowed.

Limits and retention are those of the GetMetricData reference and of CloudWatch's quotas
(docs.aws.amazon.com/AmazonCloudWatch, 2026-11). A call is billed by its number of metrics, not by
their points: so a metric's window is never cut up where one call can carry it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from sm_train.estimators.request.metrics import NAMESPACE
from sm_train.toolkit.aws.session import client_with_unix_times, translate_aws_errors
from sm_train.toolkit.errors import ExitCode, UserError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

INSTANCE_METRICS = (
    "CPUUtilization",
    "MemoryUtilization",
    "GPUUtilization",
    "GPUMemoryUtilization",
    "DiskUtilization",
)
"""In percent; those of the CPU and the GPUs are sums: a machine of 8 GPUs has up to 800."""

MAX_QUERIES, MAX_POINTS = 500, 100_800
"""Of one call."""

_DAY, _HOUR = 86400, 3600
TIERS = ((60, 15 * _DAY), (300, 63 * _DAY), (3600, 455 * _DAY))
"""Period → how long its points are kept, in seconds. Older ones are there at the next period."""

_MARGIN = _HOUR
"""Points are not asked for in their last hour: they might go while they are being read."""

_AT_ONCE = 3
"""Calls: together fewer than the 396,000 points a second that an account may read."""

_ATTEMPTS = 3


@dataclass(frozen=True)
class Series:
    """Points in order of time, each for the period that begins then: of 60 s, in older parts of
    a window of 300 s or an hour. What CloudWatch has no value for is not there.
    """

    times: NDArray[np.float64]
    """Unix seconds."""
    values: NDArray[np.float64]


@dataclass(frozen=True)
class Metric:
    """A metric of :data:`NAMESPACE`, by its only dimension."""

    name: str
    dimension: str
    value: str


@dataclass(frozen=True)
class MetricWindow:
    """Of a window, in Unix seconds, the end excluded: both ends are multiples of ``period``."""

    begin: int
    end: int
    period: int

    @property
    def points(self) -> int:
        """Of one metric."""
        return (self.end - self.begin) // self.period


@dataclass(frozen=True)
class Call:
    """One question to CloudWatch, within its limits."""

    part: MetricWindow
    metrics: tuple[Metric, ...]


def instance_metrics(
    session: Any,
    job: str,
    hosts: Sequence[str],
    begin: float,
    end: float,
    *,
    now: float,
    names: Sequence[str] = INSTANCE_METRICS,
    statistic: str = "Average",
) -> dict[tuple[str, str], Series]:
    """What the machines ``hosts`` (``algo-1``, …) did, by host and metric.

    ``begin``, ``end`` and ``now`` are Unix seconds; ``now`` by AWS's clock (:func:`server_time`).

    Raises:
        UserError: AWS refuses, or cannot give a metric completely.
    """
    asked = {
        (host, name): Metric(name, "Host", f"{job}/{host}") for host in hosts for name in names
    }
    found = read(session, list(asked.values()), begin, end, now=now, statistic=statistic)
    return {key: found[metric] for key, metric in asked.items()}


def algorithm_metrics(
    session: Any,
    job: str,
    names: Sequence[str],
    begin: float,
    end: float,
    *,
    now: float,
    statistic: str = "Average",
) -> dict[str, Series]:
    """What SageMaker read from the job's log by its metric definitions (``sm_train:loss``, …).

    Times and errors are those of :func:`instance_metrics`.
    """
    asked = {name: Metric(name, "TrainingJobName", job) for name in names}
    found = read(session, list(asked.values()), begin, end, now=now, statistic=statistic)
    return {name: found[metric] for name, metric in asked.items()}


def read(
    session: Any,
    metrics: Sequence[Metric],
    begin: float,
    end: float,
    *,
    now: float,
    statistic: str,
) -> dict[Metric, Series]:
    """Every metric from ``begin`` to ``end``."""
    client = client_with_unix_times(session, "cloudwatch")
    calls = list(plan(metrics, begin, end, now))
    pieces: dict[Metric, list[Series]] = {metric: [] for metric in metrics}
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        for answer in pool.map(lambda call: _answer(client, call, statistic), calls):
            for metric, some in answer.items():
                pieces[metric] += some
    return {metric: _joined(some) for metric, some in pieces.items()}


# ------------------------------------------------------------------ the plan


def plan(metrics: Sequence[Metric], begin: float, end: float, now: float) -> Iterator[Call]:
    """The calls that read ``metrics``, each point once."""
    for part in parts(begin, end, now):
        # A part is at most 15 days of minutes, so that one metric of it always fits.
        size = min(MAX_QUERIES, MAX_POINTS // part.points)
        for first in range(0, len(metrics), size):
            yield Call(part, tuple(metrics[first : first + size]))


def parts(begin: float, end: float, now: float) -> list[MetricWindow]:
    """The window up to ``now`` by the finest period that each part of it is kept in, the oldest
    first; what is kept no more is left out.

    The first and the last point may reach over the window. Parts meet at whole hours, which are
    multiples of every period, as CloudWatch wants the beginning to be.
    """
    found: list[MetricWindow] = []
    upper = min(end, now)
    for period, kept in TIERS:
        oldest = _ceiling(now - kept + _MARGIN, _HOUR)
        first = max(int(begin // period) * period, oldest)
        if begin < upper and first < upper:
            found.append(MetricWindow(first, _ceiling(upper, period), period))
            upper = first
    return found[::-1]


def _ceiling(moment: float, step: int) -> int:
    return -int(-moment // step) * step


# ------------------------------------------------------------------ the answers


def _answer(client: Any, call: Call, statistic: str) -> dict[Metric, list[Series]]:
    """Ask until every metric is complete; what was given of one that is not is given again."""
    found: dict[Metric, list[Series]] = {}
    missing = list(call.metrics)
    for attempt in range(_ATTEMPTS):
        if attempt:
            time.sleep(0.5 * 2**attempt)
        pieces, lacking = _ask(client, call.part, missing, statistic)
        found |= pieces
        missing = list(lacking)
        if not missing:
            return found
    metric, answer = next(iter(lacking.items()))
    raise UserError(
        f"GetMetricData: {metric.name} of {metric.value}: CloudWatch answers {answer}; try later",
        ExitCode.UNEXPECTED,
    )


def _ask(
    client: Any, part: MetricWindow, metrics: Sequence[Metric], statistic: str
) -> tuple[dict[Metric, list[Series]], dict[Metric, str]]:
    """What CloudWatch gives of ``metrics`` over all pages, and which it has not given wholly."""
    import numpy as np

    pieces: dict[Metric, list[Series]] = {metric: [] for metric in metrics}
    states: dict[Metric, str] = {}
    for page in _pages(client, _request(part, metrics, statistic)):
        for one in page["MetricDataResults"]:
            metric = metrics[int(one["Id"].removeprefix("m"))]
            pieces[metric].append(Series(np.array(one["Timestamps"]), np.array(one["Values"])))
            states[metric] = one.get("StatusCode", "Complete")
        for message in page.get("Messages", []):
            # Within the limits there are none; with one, something has been left out.
            raise UserError(f"GetMetricData: CloudWatch says {message}", ExitCode.UNEXPECTED)
    lacking = {metric: state for metric, state in states.items() if state != "Complete"}
    if "Forbidden" in lacking.values():
        raise UserError(
            "GetMetricData: CloudWatch forbids the metrics; allow cloudwatch:GetMetricData",
            ExitCode.PERMISSION,
        )
    return pieces, lacking


def _pages(client: Any, request: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """A page may be empty, or its token the one before: CloudWatch was not ready then."""
    tokens: list[str] = []
    while True:
        given = {"NextToken": tokens[-1]} if tokens else {}
        with translate_aws_errors("GetMetricData"):
            page = client.get_metric_data(**request, **given)
        yield page
        token = page.get("NextToken")
        if not token:
            return
        tokens.append(token)
        if tokens[-_ATTEMPTS:].count(token) == _ATTEMPTS:
            raise UserError(
                "GetMetricData: CloudWatch gives the same page again and again; try later",
                ExitCode.UNEXPECTED,
            )


def _request(part: MetricWindow, metrics: Sequence[Metric], statistic: str) -> dict[str, Any]:
    queries = [
        {
            "Id": f"m{index}",
            "MetricStat": {
                "Metric": {
                    "Namespace": NAMESPACE,
                    "MetricName": metric.name,
                    "Dimensions": [{"Name": metric.dimension, "Value": metric.value}],
                },
                "Period": part.period,
                "Stat": statistic,
            },
        }
        for index, metric in enumerate(metrics)
    ]
    return {
        "MetricDataQueries": queries,
        "StartTime": datetime.fromtimestamp(part.begin, UTC),
        "EndTime": datetime.fromtimestamp(part.end, UTC),
        "ScanBy": "TimestampAscending",
    }


def _joined(pieces: Sequence[Series]) -> Series:
    """In order of time; a point that came twice is kept once."""
    import numpy as np

    times = np.concatenate([np.empty(0), *(piece.times for piece in pieces)])
    values = np.concatenate([np.empty(0), *(piece.values for piece in pieces)])
    times, places = np.unique(times, return_index=True)
    return Series(times, values[places])
