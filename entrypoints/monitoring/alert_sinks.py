"""Alerts on their way: Slack, SNS and a webhook of anyone's, tried again until they arrive.

A thread of its own sends, so that whoever raises an alert never waits. What the secrets hold is
kept out of every message, exception and representation.
"""

from __future__ import annotations

import http.client
import json
import os
import queue
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

import tenacity
from sm_train.entrypoints.common.job_config import AlertsConfig
from sm_train.entrypoints.monitoring.alerts import Alert, AlertRateLimiter

SLACK_VARIABLE, WEBHOOK_VARIABLE = "SM_TRAIN_SLACK_WEBHOOK", "SM_TRAIN_WEBHOOK"
"""Hold the addresses themselves in a local run, where there is no cloud to ask for a secret."""

_TIMEOUT, _PATIENCE, _LONGEST_WAIT = 10.0, 6 * 3600.0, 60.0
_SSM = "ssm:"
_LOOPBACK = {"127.0.0.1", "::1", "localhost"}


class UndeliveredError(Exception):
    """One attempt failed; the message names no address. ``after`` is when to try again.

    ``final`` says that trying again is no use.
    """

    def __init__(self, reason: str, *, after: float = 0.0, final: bool = False) -> None:
        super().__init__(reason)
        self.after, self.final = after, final


class AlertSink(Protocol):
    """One way to people."""

    name: str

    def send(self, alert: Alert) -> None:
        """Deliver, once.

        Raises:
            UndeliveredError: it did not arrive.
        """


class WebhookSink:
    """POSTs JSON to an address that is as good as a password, so nothing shows it."""

    def __init__(
        self,
        name: str,
        address: str,
        body: Callable[[Alert], bytes],
        *,
        timeout: float = _TIMEOUT,
    ) -> None:
        if not _is_safe(address):
            raise UndeliveredError("the secret holds no https:// address", final=True)
        self.name, self._address, self._body = name, address, body
        self._timeout = timeout

    def __repr__(self) -> str:
        return f"Webhook({self.name!r}, ***)"

    def send(self, alert: Alert) -> None:
        failure: UndeliveredError
        try:
            request = urllib.request.Request(
                self._address,
                data=self._body(alert),
                headers={"Content-Type": "application/json", "User-Agent": "sm-train"},
            )
            with _opener().open(request, timeout=self._timeout) as answer:
                answer.read(1024)
            return
        except urllib.error.HTTPError as error:
            failure = _refused(error)
            error.close()
        except (OSError, http.client.HTTPException, ValueError) as error:
            # Their texts may hold the address.
            reason = getattr(error, "reason", None)
            cause = reason if isinstance(reason, OSError) else error
            no_address = isinstance(error, (ValueError, http.client.InvalidURL))
            failure = UndeliveredError(type(cause).__name__, final=no_address)
        # Outside the handlers, so that the cause, which knows the address, is not attached.
        raise failure


def _is_safe(address: str) -> bool:
    """Whether what is sent there can be read by nobody on the way."""
    try:
        parts = urllib.parse.urlsplit(address)
    except ValueError:
        return False
    return parts.scheme == "https" or (parts.scheme == "http" and parts.hostname in _LOOPBACK)


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Rejects redirects: another host must not receive the message."""

    def redirect_request(self, *_: Any) -> None:
        return None


def _opener() -> urllib.request.OpenerDirector:
    return urllib.request.build_opener(_NoRedirect)


def _refused(error: urllib.error.HTTPError) -> UndeliveredError:
    """429, 408 and 5xx pass; any other answer stays what it is."""
    passing = error.code in (408, 429) or error.code >= 500
    told = error.headers.get("Retry-After", "") if error.code in (429, 503) else ""
    after = min(float(told), _PATIENCE) if told.isdigit() else 0.0
    return UndeliveredError(f"HTTP {error.code}", after=after, final=not passing)


class SnsSink:
    """Publishes to a topic, with the job's own role."""

    def __init__(self, topic: str) -> None:
        self.name, self._topic = "sns", topic

    def send(self, alert: Alert) -> None:
        try:
            _client("sns", self._topic.split(":")[3]).publish(
                TopicArn=self._topic, **alert.for_sns()
            )
        except Exception as error:
            raise UndeliveredError(_reason(error), final=_is_final(error)) from None


def _client(service: Literal["sns", "secretsmanager", "ssm"], region: str | None = None) -> Any:
    import boto3
    from botocore.config import Config

    settings = Config(
        connect_timeout=_TIMEOUT, read_timeout=_TIMEOUT, retries={"total_max_attempts": 1}
    )
    return boto3.client(service, region_name=region, config=settings)


def _reason(error: Exception) -> str:
    """AWS's error code, or the exception's name: texts may hold account and secret names only."""
    response = getattr(error, "response", None)
    code = response.get("Error", {}).get("Code") if isinstance(response, dict) else None
    return str(code or type(error).__name__)


def _is_final(error: Exception) -> bool:
    """Whether AWS refused what is asked for, rather than failed."""
    response = getattr(error, "response", None)
    if not isinstance(response, dict):
        return isinstance(error, ImportError)
    status = response.get("ResponseMetadata", {}).get("HTTPStatusCode", 500)
    throttled = "Throttl" in _reason(error) or "TooMany" in _reason(error)
    return 400 <= status < 500 and not throttled


def secret(name: str) -> str:
    """The address in a secret of Secrets Manager, or in the SSM parameter of ``ssm:NAME``.

    The secret is the address itself or, as the console makes them, a JSON object with it in.

    Raises:
        UndeliveredError: it cannot be read; the message names the secret only.
    """
    region = name.split(":")[3] if name.startswith("arn:") else None
    try:
        if name.startswith(_SSM):
            found = _client("ssm").get_parameter(Name=name.removeprefix(_SSM), WithDecryption=True)
            text = found["Parameter"]["Value"]
        else:
            text = _client("secretsmanager", region).get_secret_value(SecretId=name)["SecretString"]
    except Exception as error:
        raise UndeliveredError(f"{name}: {_reason(error)}", final=_is_final(error)) from None
    return _address_in(text)


def _address_in(text: str) -> str:
    text = text.strip()
    if text.startswith("{"):
        try:
            values = list(json.loads(text).values())
        except ValueError:
            values = []
        text = next((one for one in values if isinstance(one, str) and "://" in one), "")
    return text


@dataclass(frozen=True)
class SinkFactory:
    """How a sink is had: at the first use, which may fail and be tried again."""

    name: str
    make: Callable[[], AlertSink]


def configured_sinks(alerts: AlertsConfig) -> list[SinkFactory]:
    """The sinks that the run file or, in a local run, the environment asks for."""
    environment = os.environ
    found: list[SinkFactory] = []
    if address := environment.get(SLACK_VARIABLE):
        found.append(SinkFactory("slack", lambda: WebhookSink("slack", address, Alert.for_slack)))
    elif name := alerts.slack_secret:
        found.append(
            SinkFactory("slack", lambda: WebhookSink("slack", secret(name), Alert.for_slack))
        )
    if other := environment.get(WEBHOOK_VARIABLE):
        found.append(
            SinkFactory("webhook", lambda: WebhookSink("webhook", other, Alert.for_webhook))
        )
    elif hook := alerts.webhook_secret:
        found.append(
            SinkFactory("webhook", lambda: WebhookSink("webhook", secret(hook), Alert.for_webhook))
        )
    if topic := alerts.sns_topic:
        found.append(SinkFactory("sns", lambda: SnsSink(topic)))
    return found


Report = Callable[[str, str], None]
"""Writes a warning event: code, message."""


class AlertDispatcher:
    """Sends alerts to every sink, each by a thread of its own and in their order."""

    def __init__(
        self,
        alerts: AlertsConfig,
        say: Report,
        *,
        clock: Callable[[], float] = time.monotonic,
        shortest_wait: float = 1.0,
    ) -> None:
        self._say, self._shortest_wait = say, shortest_wait
        self._throttle = AlertRateLimiter(alerts.level, clock)
        self._lines = [SinkWorker(way, self) for way in configured_sinks(alerts)]
        self._ended = threading.Event()
        for line in self._lines:
            threading.Thread(target=line.run, name=f"alerts-{line.way.name}", daemon=True).start()

    def send(self, alert: Alert) -> bool:
        """Put on its way, if it is worth it; returns at once, and never raises."""
        held_back = self._throttle.admit(alert)
        if held_back is None:
            return False
        for line in self._lines:
            line.waiting.put(replace(alert, held_back=held_back))
        return bool(self._lines)

    def finish(self, seconds: float) -> None:
        """Wait so long for what is on its way; the rest is given up."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and any(line.busy for line in self._lines):
            time.sleep(0.05)
        self._ended.set()
        for line in self._lines:
            if line.busy:
                self._say("alert-lost", f"an alert did not reach {line.way.name}: {line.trouble}")


class SinkWorker:
    """The alerts of one sink."""

    def __init__(self, way: SinkFactory, delivery: AlertDispatcher) -> None:
        self.way, self._delivery = way, delivery
        self.waiting: queue.Queue[Alert] = queue.Queue()
        self.trouble = "no answer yet"
        self._sink: AlertSink | None = None

    @property
    def busy(self) -> bool:
        return self.waiting.unfinished_tasks > 0

    def run(self) -> None:
        self._open()
        while True:
            alert = self.waiting.get()
            try:
                self._deliver(alert)
            except UndeliveredError as error:
                self._delivery._say("alert-failed", f"no alert to {self.way.name}: {error}")
            finally:
                self.waiting.task_done()

    def _open(self) -> None:
        """A secret that cannot be read is said when the job starts, not when it stalls."""
        try:
            self._sink = self.way.make()
        except UndeliveredError as error:
            message = f"alerts to {self.way.name} will not arrive: {error}"
            self._delivery._say("alerts-broken", message)

    def _deliver(self, alert: Alert) -> None:
        attempts = tenacity.Retrying(
            retry=tenacity.retry_if_exception(_passes),
            wait=self._wait,
            stop=tenacity.stop_after_delay(_PATIENCE)
            | tenacity.stop_when_event_set(self._delivery._ended),
            sleep=self._sleep,
            reraise=True,
        )
        attempts(self._attempt, alert)

    def _attempt(self, alert: Alert) -> None:
        try:
            if self._sink is None:
                self._sink = self.way.make()
            self._sink.send(alert)
        except UndeliveredError as error:
            self.trouble = str(error)
            raise
        except Exception as error:
            # Whatever it is, the thread must live on; its text may hold the address.
            raise UndeliveredError(type(error).__name__, final=True) from None

    def _sleep(self, seconds: float) -> None:
        self._delivery._ended.wait(seconds)

    def _wait(self, state: tenacity.RetryCallState) -> float:
        """As long as the other side asks for, else longer each time."""
        error = state.outcome.exception() if state.outcome else None
        least = self._delivery._shortest_wait
        backing_off = tenacity.wait_exponential(multiplier=least, max=_LONGEST_WAIT)(state)
        backing_off += tenacity.wait_random(0, least)(state)
        return max(backing_off, error.after if isinstance(error, UndeliveredError) else 0.0)


def _passes(error: BaseException) -> bool:
    return isinstance(error, UndeliveredError) and not error.final
