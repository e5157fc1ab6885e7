"""Reading CloudWatch metrics: planning of calls, and calls to moto's server."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import boto3
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sm_train.toolkit.aws.cloudwatch_metrics import (
    INSTANCE_METRICS,
    MAX_POINTS,
    MAX_QUERIES,
    NAMESPACE,
    TIERS,
    Metric,
    instance_metrics,
    plan_calls,
    split_range,
)
from sm_train.toolkit.aws.session import unix_seconds
from sm_train.toolkit.base.errors import ExitCode, UserError

from tests.conftest import Aws
from tests.support.fake_services import FakeRequest, FakeResponse, FakeServer, fake_server

NOW = 1795260000.0
DAY, MINUTE = 86400, 60
_ago = st.floats(0, 500 * DAY)


# ------------------------------------------------------------------ the plan


@given(_ago, _ago, st.floats(0, 7200))
def test_each_minute_is_read_once_at_a_period_still_kept(
    value: float, other: float, sub: float
) -> None:
    now = NOW + sub
    begin, end = now - max(value, other), now - min(value, other)
    found = split_range(begin, end, now)
    for before, after in pairwise(found):
        assert before.end == after.begin
    for window in found:
        assert window.begin % window.period == window.end % window.period == 0 < window.points
        assert window.begin > now - dict(TIERS)[window.period]
        finer = [kept for period, kept in TIERS if period < window.period]
        # An hour for the margin, another for the whole hours at which windows meet.
        assert all(window.end <= now - kept + 7200 for kept in finer)
    kept_at_all = now - TIERS[-1][1] + 7200
    if begin < end and end > kept_at_all:
        assert found[0].begin <= max(begin, kept_at_all)
        assert end <= found[-1].end < end + found[-1].period
    if begin == end:
        assert found == []


@given(_ago, _ago, st.integers(1, 2500))
def test_calls_respect_limits_and_read_each_metric_of_each_window(
    value: float, other: float, count: int
) -> None:
    begin, end = NOW - max(value, other), NOW - min(value, other)
    metrics = [Metric(str(number), "Host", "job/algo-1") for number in range(count)]
    calls = list(plan_calls(metrics, begin, end, NOW))
    assert all(len(call.metrics) <= MAX_QUERIES for call in calls)
    assert all(len(call.metrics) * call.window.points <= MAX_POINTS for call in calls)
    for window in split_range(begin, end, NOW):
        read = [metric for call in calls if call.window == window for metric in call.metrics]
        assert read == metrics


def test_two_weeks_of_sixteen_nodes_take_sixteen_calls() -> None:
    metrics = [Metric(str(number), "Host", "job/algo-1") for number in range(16 * 5)]
    assert len(list(plan_calls(metrics, NOW - 14 * DAY, NOW, NOW))) == 16


@pytest.mark.parametrize("text", [1.5e9, "2017-07-14T02:40:00Z", "2017-07-14T02:40:00+00:00"])
def test_timestamps_of_all_protocols_are_parsed(text: float | str) -> None:
    assert unix_seconds(text) == 1.5e9


# ------------------------------------------------------------------ moto


class Account:
    """moto's CloudWatch, read as by a command."""

    def __init__(self, aws: Aws) -> None:
        self.aws = aws
        self.session = boto3.Session("testing", "testing", region_name="us-east-1")

    def put(self, metric: str, dimension: str, value: str, points: dict[float, float]) -> None:
        data = [
            {
                "MetricName": metric,
                "Timestamp": at,
                "Value": figure,
                "Dimensions": [{"Name": dimension, "Value": value}],
            }
            for at, figure in points.items()
        ]
        self.aws.client("cloudwatch").put_metric_data(Namespace=NAMESPACE, MetricData=data)


@pytest.fixture
def account(aws: Aws, monkeypatch: pytest.MonkeyPatch) -> Account:
    for name, value in aws.environment.items():
        monkeypatch.setenv(name, value)
    return Account(aws)


def test_each_node_has_its_own_points_in_order_of_time(account: Account) -> None:
    minutes = {NOW - MINUTE * ago: 700.0 - ago for ago in range(1, 6)}
    account.put("GPUUtilization", "Host", "demo/algo-1", minutes)
    account.put("GPUUtilization", "Host", "demo/algo-2", {NOW - MINUTE: 12.5})
    account.put("GPUUtilization", "Host", "demo-2/algo-1", {NOW - MINUTE: 1.0})
    found = instance_metrics(
        account.session, "demo", ["algo-1", "algo-2"], NOW - 3600, NOW, now=NOW
    )
    assert set(found) == {
        (node, name) for node in ("algo-1", "algo-2") for name in INSTANCE_METRICS
    }
    first = found["algo-1", "GPUUtilization"]
    assert first.times.tolist() == sorted(minutes)
    assert first.values.tolist() == [minutes[at] for at in sorted(minutes)]
    assert first.times.dtype == first.values.dtype == np.float64
    assert found["algo-2", "GPUUtilization"].values.tolist() == [12.5]
    assert found["algo-2", "CPUUtilization"].times.size == 0


def test_each_point_is_read_with_the_requested_statistic(account: Account) -> None:
    account.put("GPUUtilization", "Host", "demo/algo-1", {NOW - 50: 3.0, NOW - 40: 1.0})
    for statistic, value in (("Average", 2.0), ("Maximum", 3.0)):
        found = instance_metrics(
            account.session,
            "demo",
            ["algo-1"],
            NOW - 60,
            NOW,
            now=NOW,
            names=["GPUUtilization"],
            statistic=statistic,
        )
        assert found["algo-1", "GPUUtilization"].values.tolist() == [value]


def test_long_range_is_read_at_the_period_kept_for_each_part(account: Account) -> None:
    """moto keeps all of the 70 days, so the requests are checked."""
    points = {NOW - ago * DAY: float(ago) for ago in (69, 50, 30, 16, 3, 1)}
    account.put("GPUUtilization", "Host", "demo/algo-1", points)
    found = instance_metrics(
        account.session, "demo", ["algo-1"], NOW - 70 * DAY, NOW, now=NOW, names=["GPUUtilization"]
    )
    series = found["algo-1", "GPUUtilization"]
    assert series.values.tolist() == [69, 50, 30, 16, 3, 1]
    requested = {
        body["MetricDataQueries"][0]["MetricStat"]["Period"]: NOW - body["StartTime"]
        for body in account.aws.bodies("GetMetricData")
    }
    assert set(requested) == {60, 300, 3600}
    assert requested[60] < 15 * DAY < requested[300] < 63 * DAY < requested[3600]


def test_month_old_job_has_metrics(account: Account) -> None:
    account.put("GPUUtilization", "Host", "demo/algo-1", {NOW - 30 * DAY: 5.0})
    found = instance_metrics(
        account.session, "demo", ["algo-1"], NOW - 30.5 * DAY, NOW - 29.5 * DAY, now=NOW
    )
    assert found["algo-1", "GPUUtilization"].values.tolist() == [5.0]
    [body] = account.aws.bodies("GetMetricData")
    assert {query["MetricStat"]["Period"] for query in body["MetricDataQueries"]} == {300}


def test_more_metrics_than_fit_into_a_call(account: Account) -> None:
    nodes = [f"algo-{number}" for number in range(1, 129)]
    account.put("DiskUtilization", "Host", "demo/algo-128", {NOW - 60: 7.0})
    found = instance_metrics(account.session, "demo", nodes, NOW - 600, NOW, now=NOW)
    assert len(found) == 640
    assert found["algo-128", "DiskUtilization"].values.tolist() == [7.0]
    sizes = [len(body["MetricDataQueries"]) for body in account.aws.bodies("GetMetricData")]
    assert sorted(sizes) == [140, 500]


def test_aws_error_is_one_line(account: Account, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    account.aws.error_codes["GetMetricData"] = "AccessDeniedException"
    with pytest.raises(UserError, match="GetMetricData: AWS returned AccessDenied") as error:
        instance_metrics(account.session, "demo", ["algo-1"], NOW - 60, NOW, now=NOW)
    assert error.value.exit_code == ExitCode.PERMISSION


# ------------------------------------------------------------------ what moto never answers


@pytest.fixture
def answering(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., FakeServer]]:
    """Start a CloudWatch that responds with the given pages, whatever is requested."""
    open_servers = []

    def start(*pages: dict[str, Any]) -> FakeServer:
        left = list(pages)

        def respond(request: FakeRequest) -> FakeResponse:
            page = left.pop(0)
            status = page.pop("status", 200)
            return FakeResponse(status, json.dumps(page).encode())

        server = fake_server(respond)
        open_servers.append(server)
        fake = server.__enter__()
        monkeypatch.setenv("AWS_ENDPOINT_URL", fake.url)
        return fake

    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "4")
    yield start
    for server in open_servers:
        server.__exit__(None, None, None)


def page(*points: tuple[float, float], token: str = "", state: str = "Complete") -> dict[str, Any]:
    result = {
        "Id": "m0",
        "Label": "x",
        "StatusCode": state,
        "Timestamps": [at for at, _ in points],
        "Values": [value for _, value in points],
    }
    return {"MetricDataResults": [result]} | ({"NextToken": token} if token else {})


def read() -> list[tuple[float, float]]:
    session = boto3.Session("testing", "testing", region_name="us-east-1")
    found = instance_metrics(
        session, "demo", ["algo-1"], NOW - 600, NOW, now=NOW, names=["GPUUtilization"]
    )
    series = found["algo-1", "GPUUtilization"]
    return list(zip(series.times.tolist(), series.values.tolist(), strict=True))


Answering = Callable[..., FakeServer]


def test_empty_page_is_not_the_end(answering: Answering) -> None:
    server = answering(
        page((NOW - 300, 1.0), token="b", state="PartialData"),
        {"MetricDataResults": [], "NextToken": "c"},
        # A repeated point, and an integer.
        page((NOW - 300, 1.0), (NOW - 240, 2)),
    )
    assert read() == [(NOW - 300, 1.0), (NOW - 240, 2.0)]
    assert [json.loads(request.body).get("NextToken") for request in server.requests] == [
        None,
        "b",
        "c",
    ]


def test_incomplete_metric_is_read_again(
    answering: Answering, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time, "sleep", lambda _: None)
    answering(page((NOW - 300, 1.0), state="InternalError"), page((NOW - 300, 2.0)))
    assert read() == [(NOW - 300, 2.0)]
    answering(*(page(state="InternalError") for _ in range(3)))
    with pytest.raises(UserError, match=r"GPUUtilization of demo/algo-1: .* InternalError"):
        read()


def test_forbidden_metrics_name_the_permission(answering: Answering) -> None:
    answering(page(state="Forbidden"))
    with pytest.raises(UserError, match="allow cloudwatch:GetMetricData") as error:
        read()
    assert error.value.exit_code == ExitCode.PERMISSION


def test_message_of_incomplete_results_is_an_error(answering: Answering) -> None:
    answering(page() | {"Messages": [{"Code": "MaxMetricsExceeded", "Value": "too many"}]})
    with pytest.raises(UserError, match="MaxMetricsExceeded"):
        read()


def test_repeated_token_is_an_error(answering: Answering) -> None:
    answering(*({"MetricDataResults": [], "NextToken": "a"} for _ in range(9)))
    with pytest.raises(UserError, match="repeatedly"):
        read()


def test_throttled_call_is_retried(answering: Answering) -> None:
    busy = {"status": 400, "__type": "ThrottlingException", "message": "Rate exceeded"}
    server = answering(busy, dict(busy), page((NOW - 300, 1.0)))
    assert read() == [(NOW - 300, 1.0)]
    assert len(server.requests) == 3
