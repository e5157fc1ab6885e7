"""Content and rate limit of alerts: decisions, without effects."""

from __future__ import annotations

import html
import json
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

LEVELS = ("info", "warning", "critical")

REPEAT_SECONDS = 1800.0
"""Minimum time between two equal alerts, unless it was resolved in between."""

BURST, BURST_SECONDS = 10, 3600.0
"""Maximum number of alerts per time; the next one reports how many were suppressed."""


@dataclass(frozen=True)
class Alert:
    """One alert; ``key`` names the problem, and the alert that resolves it has the same key.

    ``symptom`` compares what is wrong with what is usual; ``worst`` is the node and rank to look
    at. ``burned_usd`` is what the instances cost in ``silent_seconds`` (None if the price is
    unknown). ``time`` is in Unix seconds. ``command`` is what to do next. ``suppressed`` counts
    the alerts that the rate limit dropped before this one.
    """

    key: str
    level: str
    title: str
    run: str
    stage: str
    symptom: str
    time: float
    worst: str | None = None
    silent_seconds: float | None = None
    burned_usd: float | None = None
    last_checkpoint: str | None = None
    command: str | None = None
    console: str | None = None
    resolved: bool = False
    suppressed: int = 0

    def lines(self) -> list[str]:
        """Return the lines of the message, the most important first."""
        burned = "unknown" if self.burned_usd is None else f"${self.burned_usd:,.2f}"
        labelled = [
            ("", self.symptom),
            ("worst: ", self.worst),
            ("burned since: ", burned if self.silent_seconds is not None else None),
            ("last checkpoint: ", self.last_checkpoint or "none"),
            ("next: ", self.command),
            ("console: ", self.console),
            ("suppressed before this: ", str(self.suppressed) if self.suppressed else None),
        ]
        return [label + value for label, value in labelled if value]

    @property
    def headline(self) -> str:
        """The first line."""
        return (
            f"[{'resolved' if self.resolved else self.level}] {self.run}/{self.stage}: {self.title}"
        )

    def text(self) -> str:
        """Return the whole message."""
        return "\n".join([self.headline, *self.lines()])

    def for_slack(self) -> bytes:
        """Return an incoming webhook's body with &, < and > escaped (docs.slack.dev, 2026)."""
        color = "good" if self.resolved else {"critical": "danger"}.get(self.level, self.level)
        body = html.escape("\n".join(self.lines()), quote=False)
        title = html.escape(self.headline, quote=False)
        attachment = {"color": color, "text": body, "fallback": title}
        return json.dumps({"text": title, "attachments": [attachment]}).encode()

    def for_webhook(self) -> bytes:
        """Return every field and the text as JSON."""
        return json.dumps({**asdict(self), "text": self.text()}).encode()

    def for_sns(self) -> dict[str, Any]:
        """Return ``publish``'s Subject (ASCII, at most 100 characters) and Message."""
        subject = self.headline.encode("ascii", "replace").decode()[:100]
        return {"Subject": subject, "Message": self.text()}


class AlertRateLimiter:
    """Decides which alerts are sent: each problem once, not too many, and its resolution only if
    the problem was sent.
    """

    def __init__(self, level: str, clock: Callable[[], float]) -> None:
        self._min_level, self._clock = LEVELS.index(level), clock
        self._open: dict[str, float] = {}
        self._sent: deque[float] = deque()
        self._suppressed = 0

    def allow(self, alert: Alert) -> int | None:
        """Return how many alerts were suppressed before this one; None if it must not be sent."""
        now = self._clock()
        if alert.resolved:
            return self._take_suppressed() if self._open.pop(alert.key, None) is not None else None
        if LEVELS.index(alert.level) < self._min_level:
            return None
        if now - self._open.get(alert.key, -REPEAT_SECONDS) < REPEAT_SECONDS:
            return None
        while self._sent and now - self._sent[0] >= BURST_SECONDS:
            self._sent.popleft()
        if len(self._sent) >= BURST:
            self._suppressed += 1
            return None
        self._sent.append(now)
        self._open[alert.key] = now
        return self._take_suppressed()

    def _take_suppressed(self) -> int:
        suppressed, self._suppressed = self._suppressed, 0
        return suppressed
