"""Delivers alerts to Slack, SNS and webhooks, with retries until they arrive.

Each sink has its own thread, so sending an alert never blocks. The contents of secrets stay
out of every message, exception and representation.
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
from typing import Any, Protocol

import tenacity
from sm_train.entrypoints.job_interface.job_config import AlertsConfig
from sm_train.entrypoints.monitoring.alerts import Alert, AlertRateLimiter
from sm_train.entrypoints.monitoring.secret_values import (
    SecretError,
    aws_reason,
    client_config,
    is_final,
    read_secret,
)

SLACK_VARIABLE, WEBHOOK_VARIABLE = "SM_TRAIN_SLACK_WEBHOOK", "SM_TRAIN_WEBHOOK"
"""Variables that hold the addresses themselves, for local runs without AWS secrets."""

_TIMEOUT, _RETRY_SECONDS, _MAX_BACKOFF = 10.0, 6 * 3600.0, 60.0
_LOOPBACK = {"127.0.0.1", "::1", "localhost"}


class UndeliveredError(Exception):
    """One attempt failed; the message contains no address.

    ``retry_after`` are the seconds that the receiver asks for; ``final`` errors are not retried.
    """

    def __init__(self, reason: str, *, retry_after: float = 0.0, final: bool = False) -> None:
        super().__init__(reason)
        self.retry_after, self.final = retry_after, final


class AlertSink(Protocol):
    """A receiver of alerts."""

    name: str

    def send(self, alert: Alert) -> None:
        """Deliver ``alert``, in one attempt.

        Raises:
            UndeliveredError: it did not arrive.
        """


class WebhookSink:
    """POSTs JSON to an address that is a secret, so no message, error or repr contains it."""

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
        return f"WebhookSink({self.name!r}, ***)"

    def send(self, alert: Alert) -> None:
        failure: UndeliveredError
        try:
            request = urllib.request.Request(
                self._address,
                data=self._body(alert),
                headers={"Content-Type": "application/json", "User-Agent": "sm-train"},
            )
            with _opener().open(request, timeout=self._timeout) as response:
                response.read(1024)
            return
        except urllib.error.HTTPError as error:
            failure = _http_failure(error)
            error.close()
        except (OSError, http.client.HTTPException, ValueError) as error:
            # Their texts may contain the address.
            reason = getattr(error, "reason", None)
            cause = reason if isinstance(reason, OSError) else error
            no_address = isinstance(error, (ValueError, http.client.InvalidURL))
            failure = UndeliveredError(type(cause).__name__, final=no_address)
        # Outside the handlers, so that the cause, which contains the address, is not attached.
        raise failure


def _is_safe(address: str) -> bool:
    """Return whether the connection is encrypted, or does not leave this node."""
    try:
        parts = urllib.parse.urlsplit(address)
    except ValueError:
        return False
    return parts.scheme == "https" or (parts.scheme == "http" and parts.hostname in _LOOPBACK)


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Rejects redirects: the secret path would be sent to another server."""

    def redirect_request(self, *_: Any) -> None:
        return None


def _opener() -> urllib.request.OpenerDirector:
    return urllib.request.build_opener(_NoRedirect)


def _http_failure(error: urllib.error.HTTPError) -> UndeliveredError:
    """Return the failure; 408, 429 and 5xx are transient, any other status is final."""
    transient = error.code in (408, 429) or error.code >= 500
    header = error.headers.get("Retry-After", "") if error.code in (429, 503) else ""
    retry_after = min(float(header), _RETRY_SECONDS) if header.isdigit() else 0.0
    return UndeliveredError(f"HTTP {error.code}", retry_after=retry_after, final=not transient)


class SnsSink:
    """Publishes to an SNS topic with the job's role."""

    def __init__(self, topic: str) -> None:
        self.name, self._topic = "sns", topic

    def send(self, alert: Alert) -> None:
        try:
            import boto3

            region = self._topic.split(":")[3]
            sns = boto3.client("sns", region_name=region, config=client_config())
            sns.publish(TopicArn=self._topic, **alert.for_sns())
        except Exception as error:
            raise UndeliveredError(aws_reason(error), final=is_final(error)) from None


def secret(name: str) -> str:
    """Return the address in a secret: its text, or the one in a JSON object.

    Raises:
        UndeliveredError: it cannot be read; the message contains only its name.
    """
    try:
        return _address_in(read_secret(name))
    except SecretError as error:
        raise UndeliveredError(str(error), final=error.final) from None


def _address_in(text: str) -> str:
    if text.startswith("{"):
        try:
            values = list(json.loads(text).values())
        except ValueError:
            values = []
        text = next((value for value in values if isinstance(value, str) and "://" in value), "")
    return text


@dataclass(frozen=True)
class SinkFactory:
    """Creates a sink on first use; creation may fail and is retried."""

    name: str
    create: Callable[[], AlertSink]


def configured_sinks(alerts: AlertsConfig) -> list[SinkFactory]:
    """Return the sinks that the run file or, in a local run, the environment configures."""
    environment = os.environ
    sinks: list[SinkFactory] = []
    if address := environment.get(SLACK_VARIABLE):
        sinks.append(SinkFactory("slack", lambda: WebhookSink("slack", address, Alert.for_slack)))
    elif name := alerts.slack_secret:
        sinks.append(
            SinkFactory("slack", lambda: WebhookSink("slack", secret(name), Alert.for_slack))
        )
    if other := environment.get(WEBHOOK_VARIABLE):
        sinks.append(
            SinkFactory("webhook", lambda: WebhookSink("webhook", other, Alert.for_webhook))
        )
    elif hook := alerts.webhook_secret:
        sinks.append(
            SinkFactory("webhook", lambda: WebhookSink("webhook", secret(hook), Alert.for_webhook))
        )
    if topic := alerts.sns_topic:
        sinks.append(SinkFactory("sns", lambda: SnsSink(topic)))
    return sinks


Warn = Callable[[str, str], None]
"""``(code, message)``: logs a warning event."""


class AlertDispatcher:
    """Sends alerts to every sink, in order; each sink has its own thread."""

    def __init__(
        self,
        alerts: AlertsConfig,
        warn: Warn,
        *,
        clock: Callable[[], float] = time.monotonic,
        min_backoff: float = 1.0,
    ) -> None:
        self._warn = warn
        self._rate_limiter = AlertRateLimiter(alerts.level, clock)
        self._finished = threading.Event()
        self._workers = [
            SinkWorker(factory, warn, self._finished, min_backoff)
            for factory in configured_sinks(alerts)
        ]
        for worker in self._workers:
            name = f"alerts-{worker.factory.name}"
            threading.Thread(target=worker.run, name=name, daemon=True).start()

    def send(self, alert: Alert) -> bool:
        """Queue ``alert`` unless the rate limit drops it; returns whether it will be sent.

        Never blocks and never raises.
        """
        suppressed = self._rate_limiter.allow(alert)
        if suppressed is None:
            return False
        for worker in self._workers:
            worker.pending.put(replace(alert, suppressed=suppressed))
        return bool(self._workers)

    def finish(self, seconds: float) -> None:
        """Wait at most ``seconds`` for queued alerts, then drop the rest."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and any(worker.busy for worker in self._workers):
            time.sleep(0.05)
        self._finished.set()
        for worker in self._workers:
            if worker.busy:
                message = f"an alert did not reach {worker.factory.name}: {worker.last_error}"
                self._warn("alert-lost", message)


class SinkWorker:
    """Sends one sink's alerts in order, with retries; :meth:`run` is its thread."""

    def __init__(
        self, factory: SinkFactory, warn: Warn, finished: threading.Event, min_backoff: float
    ) -> None:
        self.factory, self._warn = factory, warn
        self._finished, self._min_backoff = finished, min_backoff
        self.pending: queue.Queue[Alert] = queue.Queue()
        self.last_error = "no response yet"
        self._sink: AlertSink | None = None

    @property
    def busy(self) -> bool:
        """Whether an alert is queued or being sent."""
        return self.pending.unfinished_tasks > 0

    def run(self) -> None:
        """Send queued alerts forever."""
        self._open()
        while True:
            alert = self.pending.get()
            try:
                self._deliver(alert)
            except UndeliveredError as error:
                self._warn("alert-failed", f"no alert to {self.factory.name}: {error}")
            finally:
                self.pending.task_done()

    def _open(self) -> None:
        """Create the sink at once: an unreadable secret is reported before the first alert."""
        try:
            self._sink = self.factory.create()
        except UndeliveredError as error:
            message = f"alerts to {self.factory.name} will not arrive: {error}"
            self._warn("alerts-misconfigured", message)

    def _deliver(self, alert: Alert) -> None:
        attempts = tenacity.Retrying(
            retry=tenacity.retry_if_exception(_is_transient),
            wait=self._backoff,
            stop=tenacity.stop_after_delay(_RETRY_SECONDS)
            | tenacity.stop_when_event_set(self._finished),
            # Returns early when the dispatcher finishes.
            sleep=tenacity.sleep_using_event(self._finished),
            reraise=True,
        )
        attempts(self._attempt, alert)

    def _attempt(self, alert: Alert) -> None:
        try:
            if self._sink is None:
                self._sink = self.factory.create()
            self._sink.send(alert)
        except UndeliveredError as error:
            self.last_error = str(error)
            raise
        except Exception as error:
            # Whatever it is, the thread must keep running; its text may contain the address.
            raise UndeliveredError(type(error).__name__, final=True) from None

    def _backoff(self, state: tenacity.RetryCallState) -> float:
        """Return the seconds that the receiver asks for, or an exponential backoff with jitter."""
        error = state.outcome.exception() if state.outcome else None
        minimum = self._min_backoff
        backoff = tenacity.wait_exponential(multiplier=minimum, max=_MAX_BACKOFF)(state)
        backoff += tenacity.wait_random(0, minimum)(state)
        return max(backoff, error.retry_after if isinstance(error, UndeliveredError) else 0.0)


def _is_transient(error: BaseException) -> bool:
    return isinstance(error, UndeliveredError) and not error.final
