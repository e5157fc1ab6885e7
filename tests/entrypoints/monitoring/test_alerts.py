"""Alerts: what they say, how often, and that they arrive, against real servers on loopback."""

from __future__ import annotations

import json
import traceback
from collections.abc import Iterator
from dataclasses import replace

import pytest
from sm_train.entrypoints.common.job_config import AlertsConfig
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
    BURST,
    BURST_SECONDS,
    REPEAT_SECONDS,
    Alert,
    AlertRateLimiter,
)

from tests.conftest import Aws
from tests.support.webhook_server import SECRET, Hook, webhook

STALL = Alert(
    key="stall",
    level="critical",
    title="training has stalled",
    run="my-model",
    stage="256px",
    symptom="no sign for 190 s in step after step 70 (limit 120 s, usually 0.52 s)",
    time=1.8e9,
    worst="node 3, rank 27: rank 27 is stopped",
    silent_seconds=190.0,
    burned_usd=12.5,
    last_checkpoint="step-00000060",
    command="sm-train resume my-model",
    console="https://us-east-1.console.aws.amazon.com/sagemaker/home?region=us-east-1#/jobs/j",
)
NOBODY = AlertsConfig(None, None, None, "warning")


@pytest.fixture
def hook() -> Iterator[Hook]:
    with webhook() as one:
        yield one


@pytest.fixture
def said() -> list[tuple[str, str]]:
    return []


def deliver(
    hook: Hook, said: list[tuple[str, str]], monkeypatch: pytest.MonkeyPatch
) -> AlertDispatcher:
    monkeypatch.setenv(SLACK_VARIABLE, hook.address)
    return AlertDispatcher(NOBODY, lambda *words: said.append(words), shortest_wait=0.05)


# ---------------------------------------------------------------------- what they say


def test_an_alert_says_everything_that_is_known_of_it() -> None:
    text = STALL.text()
    for part in (
        "[critical] my-model/256px: training has stalled",
        "no sign for 190 s",
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


def test_slacks_control_letters_are_escaped() -> None:
    body = json.loads(replace(STALL, symptom="<!channel> & co").for_slack())
    assert "&lt;!channel&gt; &amp; co" in body["attachments"][0]["text"]
    assert body["attachments"][0]["color"] == "danger"


def test_an_sns_subject_is_short_and_ascii() -> None:
    subject = replace(STALL, title="é" * 200).for_sns()["Subject"]
    assert len(subject) <= 100
    assert subject.isascii()


# ---------------------------------------------------------------------- how often


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_an_alert_is_sent_once_until_it_is_resolved() -> None:
    clock = Clock()
    throttle = AlertRateLimiter("warning", clock)
    assert throttle.admit(STALL) == 0
    clock.now = REPEAT_SECONDS - 1
    assert throttle.admit(STALL) is None
    clock.now = REPEAT_SECONDS
    assert throttle.admit(STALL) == 0
    assert throttle.admit(replace(STALL, resolved=True)) == 0
    assert throttle.admit(replace(STALL, resolved=True)) is None
    assert throttle.admit(STALL) == 0


def test_what_was_not_sent_is_not_resolved_and_levels_count() -> None:
    throttle = AlertRateLimiter("critical", Clock())
    assert throttle.admit(replace(STALL, level="warning")) is None
    assert throttle.admit(replace(STALL, resolved=True)) is None


def test_a_burst_is_cut_off_and_said_later() -> None:
    clock = Clock()
    throttle = AlertRateLimiter("info", clock)
    admitted = [throttle.admit(replace(STALL, key=str(number))) for number in range(BURST + 3)]
    assert admitted == [0] * BURST + [None] * 3
    clock.now = BURST_SECONDS
    assert throttle.admit(replace(STALL, key="later")) == 3


# ---------------------------------------------------------------------- that they arrive


def test_it_is_tried_again_after_500_and_429(
    hook: Hook, said: list[tuple[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    hook.answers = [(500, {}), (503, {}), (429, {"Retry-After": "1"})]
    delivery = deliver(hook, said, monkeypatch)
    delivery.send(STALL)
    [body] = hook.wait_for(1)
    assert "training has stalled" in body["text"]
    # As long as Slack asks for, not as long as backing off would take.
    assert hook.times[3] - hook.times[2] >= 1.0
    delivery.finish(5)
    assert said == []


def test_slack_is_down_and_comes_back_and_the_order_stays(
    said: list[tuple[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    with webhook() as down:
        port = down.port
    down.port = port  # refused from now on
    delivery = deliver(down, said, monkeypatch)
    assert delivery.send(STALL)
    assert delivery.send(replace(STALL, resolved=True))
    with webhook(port) as up:
        first, second = up.wait_for(2)
    assert first["text"].startswith("[critical]")
    assert second["text"].startswith("[resolved]")


def test_an_alert_that_never_arrives_harms_nobody_and_is_said(
    said: list[tuple[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    with webhook() as down:
        pass
    delivery = deliver(down, said, monkeypatch)
    delivery.send(STALL)
    delivery.finish(0.3)
    [(code, message)] = said
    assert code == "alert-lost"
    assert "ConnectionRefusedError" in message or "no answer" in message


@pytest.mark.parametrize("status", [404, 403, 400])
def test_a_refusal_is_not_tried_again(
    status: int, hook: Hook, said: list[tuple[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    hook.answers = [(status, {})] * 3
    delivery = deliver(hook, said, monkeypatch)
    delivery.send(STALL)
    delivery.finish(20)
    assert said == [("alert-failed", f"no alert to slack: HTTP {status}")]
    assert len(hook.times) == 1


def test_a_time_out_and_a_redirect_are_no_delivery(hook: Hook) -> None:
    hook.hang = 1.0
    with pytest.raises(UndeliveredError, match="TimeoutError") as slow:
        WebhookSink("slack", hook.address, Alert.for_slack, timeout=0.1).send(STALL)
    assert not slow.value.final
    hook.hang, hook.answers = 0.0, [(302, {"Location": hook.address})]
    with pytest.raises(UndeliveredError, match="HTTP 302"):
        WebhookSink("slack", hook.address, Alert.for_slack).send(STALL)


def test_any_webhook_gets_every_field(
    hook: Hook, said: list[tuple[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(WEBHOOK_VARIABLE, hook.address)
    AlertDispatcher(NOBODY, lambda *words: said.append(words)).send(STALL)
    [body] = hook.wait_for(1)
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
def test_an_address_shows_nowhere(address: str, capfd: pytest.CaptureFixture[str]) -> None:
    try:
        hook = WebhookSink("slack", address.format(secret=SECRET), Alert.for_slack)
        assert SECRET not in repr(hook)
        hook.send(STALL)
    except UndeliveredError as error:
        shown = "".join(traceback.format_exception(error)) + repr(error)
    assert SECRET not in shown
    assert "secret" in shown or "Error" in shown
    assert SECRET not in "".join(capfd.readouterr())


def enter_cloud(aws: Aws, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (aws.environment | {"AWS_DEFAULT_REGION": "us-east-1"}).items():
        monkeypatch.setenv(name, value)


def test_secrets_are_read_by_name(aws: Aws, monkeypatch: pytest.MonkeyPatch) -> None:
    enter_cloud(aws, monkeypatch)
    address = f"https://hooks.slack.com/services/{SECRET}"
    manager = aws.client("secretsmanager")
    manager.create_secret(Name="plain", SecretString=address)
    arn = manager.create_secret(Name="json", SecretString=json.dumps({"url": address}))["ARN"]
    aws.client("ssm").put_parameter(Name="/sm/slack", Value=address, Type="SecureString")
    assert secret("plain") == secret("json") == secret(arn) == secret("ssm:/sm/slack") == address
    with pytest.raises(UndeliveredError, match="absent: ResourceNotFoundException") as missing:
        secret("absent")
    assert missing.value.final


def test_a_secret_that_cannot_be_read_is_said_at_the_start(
    aws: Aws, said: list[tuple[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    enter_cloud(aws, monkeypatch)
    aws.client("secretsmanager").create_secret(Name="empty", SecretString="{}")
    alerts = AlertsConfig("empty", "absent", None, "warning")
    delivery = AlertDispatcher(alerts, lambda *words: said.append(words))
    delivery.send(STALL)
    delivery.finish(20)
    codes = sorted(code for code, _ in said)
    assert codes == ["alert-failed", "alert-failed", "alerts-broken", "alerts-broken"]


def test_sns_publishes(aws: Aws, monkeypatch: pytest.MonkeyPatch) -> None:
    enter_cloud(aws, monkeypatch)
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
