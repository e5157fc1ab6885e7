"""Alerts: content, rate limit and delivery, against real servers on loopback."""

from __future__ import annotations

import json
import traceback
from collections.abc import Iterator
from dataclasses import replace

import pytest
from sm_train.entrypoints.job_interface.job_config import AlertsConfig
from sm_train.entrypoints.monitoring.alert_sinks import (
    SLACK_VARIABLE,
    WEBHOOK_VARIABLE,
    AlertDispatcher,
    SnsSink,
    UndeliveredError,
    WebhookSink,
    secret,
)
from sm_train.entrypoints.monitoring.alerts import (
    Alert,
    AlertRateLimiter,
)
from sm_train.entrypoints.monitoring.secret_values import read_key

from tests.conftest import Aws
from tests.support.webhook_server import SECRET, WebhookServer, webhook_server

STALL = Alert(
    key="stall",
    level="critical",
    title="training has stalled",
    run="my-model",
    stage="256px",
    symptom="no heartbeat for 190 s in step after step 70 (limit 120 s, usually 0.52 s)",
    time=1.8e9,
    worst="node 3, rank 27: rank 27 is stopped",
    silent_seconds=190.0,
    burned_usd=12.5,
    last_checkpoint="step-00000060",
    command="sm-train resume my-model",
    console="https://us-east-1.console.aws.amazon.com/sagemaker/home?region=us-east-1#/jobs/j",
)
NO_SINKS = AlertsConfig(None, None, None, "warning")


@pytest.fixture
def server() -> Iterator[WebhookServer]:
    with webhook_server() as running:
        yield running


@pytest.fixture
def warnings() -> list[tuple[str, str]]:
    return []


def slack_dispatcher(
    server: WebhookServer, warnings: list[tuple[str, str]], monkeypatch: pytest.MonkeyPatch
) -> AlertDispatcher:
    monkeypatch.setenv(SLACK_VARIABLE, server.address)
    return AlertDispatcher(NO_SINKS, lambda *warning: warnings.append(warning), min_backoff=0.05)


# ---------------------------------------------------------------------- content


def test_alert_text_has_everything_that_is_known() -> None:
    text = STALL.text()
    for part in (
        "[critical] my-model/256px: training has stalled",
        "no heartbeat for 190 s",
        "worst: node 3, rank 27",
        "burned since: $12.50",
        "last checkpoint: step-00000060",
        "next: sm-train resume my-model",
        "console: https://us-east-1",
    ):
        assert part in text
    unknown = replace(STALL, burned_usd=None, last_checkpoint=None, console=None).text()
    assert "burned since: unknown" in unknown
    assert "last checkpoint: none" in unknown
    assert "console" not in unknown
    assert replace(STALL, resolved=True).text().startswith("[resolved]")


def test_slack_control_characters_are_escaped() -> None:
    body = json.loads(replace(STALL, symptom="<!channel> & co").for_slack())
    assert "&lt;!channel&gt; &amp; co" in body["attachments"][0]["text"]
    assert body["attachments"][0]["color"] == "danger"


def test_sns_subject_is_short_and_ascii() -> None:
    subject = replace(STALL, title="é" * 200).for_sns()["Subject"]
    assert len(subject) <= 100
    assert subject.isascii()


# ---------------------------------------------------------------------- rate limit


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_alert_is_sent_once_until_it_is_resolved() -> None:
    clock = Clock()
    limiter = AlertRateLimiter("warning", clock)
    assert limiter.allow(STALL) == 0
    clock.now = 1800.0 - 1
    assert limiter.allow(STALL) is None
    clock.now = 1800.0
    assert limiter.allow(STALL) == 0
    assert limiter.allow(replace(STALL, resolved=True)) == 0
    assert limiter.allow(replace(STALL, resolved=True)) is None
    assert limiter.allow(STALL) == 0


def test_alert_below_the_level_is_neither_sent_nor_resolved() -> None:
    limiter = AlertRateLimiter("critical", Clock())
    assert limiter.allow(replace(STALL, level="warning")) is None
    assert limiter.allow(replace(STALL, resolved=True)) is None


def test_burst_is_suppressed_and_counted_later() -> None:
    clock = Clock()
    limiter = AlertRateLimiter("info", clock)
    admitted = [limiter.allow(replace(STALL, key=str(number))) for number in range(10 + 3)]
    assert admitted == [0] * 10 + [None] * 3
    clock.now = 3600.0
    assert limiter.allow(replace(STALL, key="later")) == 3


# ---------------------------------------------------------------------- delivery


def test_delivery_is_retried_after_500_and_429(
    server: WebhookServer, warnings: list[tuple[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    server.responses = [(500, {}), (503, {}), (429, {"Retry-After": "1"})]
    dispatcher = slack_dispatcher(server, warnings, monkeypatch)
    dispatcher.send(STALL)
    [body] = server.wait_for(1)
    assert "training has stalled" in body["text"]
    # Slack's Retry-After counts, not the shorter backoff.
    assert server.times[3] - server.times[2] >= 1.0
    dispatcher.finish(5)
    assert warnings == []


def test_alerts_arrive_in_order_once_slack_is_back(
    warnings: list[tuple[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    with webhook_server() as down:
        port = down.port
    down.port = port  # refused from now on
    dispatcher = slack_dispatcher(down, warnings, monkeypatch)
    assert dispatcher.send(STALL)
    assert dispatcher.send(replace(STALL, resolved=True))
    with webhook_server(port) as up:
        first, second = up.wait_for(2)
    assert first["text"].startswith("[critical]")
    assert second["text"].startswith("[resolved]")


def test_undelivered_alert_is_logged(
    warnings: list[tuple[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    with webhook_server() as down:
        pass
    dispatcher = slack_dispatcher(down, warnings, monkeypatch)
    dispatcher.send(STALL)
    dispatcher.finish(0.3)
    [(code, message)] = warnings
    assert code == "alert-lost"
    assert "ConnectionRefusedError" in message or "no response" in message


@pytest.mark.parametrize("status", [404, 403, 400])
def test_rejected_alert_is_not_retried(
    status: int,
    server: WebhookServer,
    warnings: list[tuple[str, str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    server.responses = [(status, {})] * 3
    dispatcher = slack_dispatcher(server, warnings, monkeypatch)
    dispatcher.send(STALL)
    dispatcher.finish(20)
    assert warnings == [("alert-failed", f"no alert to slack: HTTP {status}")]
    assert len(server.times) == 1


def test_timeout_and_redirect_are_failures(server: WebhookServer) -> None:
    server.delay = 1.0
    with pytest.raises(UndeliveredError, match="TimeoutError") as slow:
        WebhookSink("slack", server.address, Alert.for_slack, timeout=0.1).send(STALL)
    assert not slow.value.final
    server.delay, server.responses = 0.0, [(302, {"Location": server.address})]
    with pytest.raises(UndeliveredError, match="HTTP 302"):
        WebhookSink("slack", server.address, Alert.for_slack).send(STALL)


def test_generic_webhook_gets_every_field(
    server: WebhookServer, warnings: list[tuple[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(WEBHOOK_VARIABLE, server.address)
    AlertDispatcher(NO_SINKS, lambda *warning: warnings.append(warning)).send(STALL)
    [body] = server.wait_for(1)
    assert body["burned_usd"] == 12.5
    assert body["key"] == "stall"


# ---------------------------------------------------------------------- secrets


@pytest.mark.parametrize(
    "address",
    [
        "https://127.0.0.1:1/{secret}",  # refused
        "https://no-such-host.invalid/{secret}",
        "https://127.0.0.1:1/{secret} blank",  # not an address at all
        "https://[::1/{secret}",
        "http://example.com/{secret}",
        "file:///{secret}",
        "{secret}",
    ],
)
def test_secret_address_appears_nowhere(address: str, capfd: pytest.CaptureFixture[str]) -> None:
    try:
        sink = WebhookSink("slack", address.format(secret=SECRET), Alert.for_slack)
        assert SECRET not in repr(sink)
        sink.send(STALL)
    except UndeliveredError as error:
        shown = "".join(traceback.format_exception(error)) + repr(error)
    assert SECRET not in shown
    assert "secret" in shown or "Error" in shown
    assert SECRET not in "".join(capfd.readouterr())


def use_fake_aws(aws: Aws, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (aws.environment | {"AWS_DEFAULT_REGION": "us-east-1"}).items():
        monkeypatch.setenv(name, value)


def test_secrets_are_read_by_name(aws: Aws, monkeypatch: pytest.MonkeyPatch) -> None:
    use_fake_aws(aws, monkeypatch)
    address = f"https://hooks.slack.com/services/{SECRET}"
    manager = aws.client("secretsmanager")
    manager.create_secret(Name="plain", SecretString=address)
    arn = manager.create_secret(Name="json", SecretString=json.dumps({"url": address}))["ARN"]
    aws.client("ssm").put_parameter(Name="/sm/slack", Value=address, Type="SecureString")
    assert secret("plain") == secret("json") == secret(arn) == secret("ssm:/sm/slack") == address
    with pytest.raises(UndeliveredError, match="absent: ResourceNotFoundException") as missing:
        secret("absent")
    assert missing.value.final


def test_unreadable_secret_is_logged_at_the_start(
    aws: Aws, warnings: list[tuple[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    use_fake_aws(aws, monkeypatch)
    aws.client("secretsmanager").create_secret(Name="empty", SecretString="{}")
    alerts = AlertsConfig("empty", "absent", None, "warning")
    dispatcher = AlertDispatcher(alerts, lambda *warning: warnings.append(warning))
    dispatcher.send(STALL)
    dispatcher.finish(20)
    codes = sorted(code for code, _ in warnings)
    assert codes == ["alert-failed", "alert-failed", "alerts-misconfigured", "alerts-misconfigured"]


def test_sns_publishes(aws: Aws, monkeypatch: pytest.MonkeyPatch) -> None:
    use_fake_aws(aws, monkeypatch)
    sns, sqs = aws.client("sns"), aws.client("sqs")
    topic = sns.create_topic(Name="alerts")["TopicArn"]
    queue = sqs.create_queue(QueueName="alerts")["QueueUrl"]
    arn = sqs.get_queue_attributes(QueueUrl=queue, AttributeNames=["QueueArn"])["Attributes"]
    sns.subscribe(TopicArn=topic, Protocol="sqs", Endpoint=arn["QueueArn"])
    SnsSink(topic).send(STALL)
    [message] = sqs.receive_message(QueueUrl=queue)["Messages"]
    assert "rank 27" in json.loads(message["Body"])["Message"]
    with pytest.raises(UndeliveredError, match="NotFound") as missing:
        SnsSink(topic + "-of-another").send(STALL)
    assert missing.value.final


@pytest.mark.parametrize(
    ("text", "key"),
    [("{not JSON", "{not JSON"), ('{"key": " abc "}', "abc"), ('{"a": "1", "b": "2"}', None)],
)
def test_a_secret_may_be_an_object_or_any_text(
    aws: Aws, monkeypatch: pytest.MonkeyPatch, text: str, key: str | None
) -> None:
    use_fake_aws(aws, monkeypatch)
    aws.client("secretsmanager").create_secret(Name="wandb", SecretString=text)
    assert read_key("wandb") == (text if key is None else key)
