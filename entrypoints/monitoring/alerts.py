"""What people are told when a job is in trouble, and how often: decisions, without effects."""

from __future__ import annotations

import html
import json
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

LEVELS = ("info", "warning", "critical")

REPEAT_SECONDS = 1800.0
"""The same alert is not sent again within this time, unless it was resolved between."""

BURST, BURST_SECONDS = 10, 3600.0
"""At most so many alerts in so much time; how many were held back is said with the next one."""


@dataclass(frozen=True)
class Alert:
    """``key`` names the trouble: the alert that resolves it has the same.

    ``symptom`` says what is wrong against what is usual, ``worst`` the node and rank to look at,
    ``burned_usd`` what the machines cost in ``silent_seconds`` (None: the price is not known),
    ``time`` when it was (Unix seconds). ``command`` is what to do next.
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
    held_back: int = 0

    def lines(self) -> list[str]:
        """For people, most important first."""
        burned = "unknown" if self.burned_usd is None else f"${self.burned_usd:,.2f}"
        found = [
            ("", self.symptom),
            ("worst: ", self.worst),
            ("burned since: ", burned if self.silent_seconds is not None else None),
            ("last checkpoint: ", self.last_checkpoint or "none"),
            ("next: ", self.command),
            ("console: ", self.console),
            ("held back before this: ", str(self.held_back) if self.held_back else None),
        ]
        return [label + value for label, value in found if value]

    @property
    def headline(self) -> str:
        return (
            f"[{'resolved' if self.resolved else self.level}] {self.run}/{self.stage}: {self.title}"
        )

    def text(self) -> str:
        return "\n".join([self.headline, *self.lines()])

    def for_slack(self) -> bytes:
        """An incoming webhook's body (docs.slack.dev, 2026): &, < and > are its control letters."""
        colour = "good" if self.resolved else {"critical": "danger"}.get(self.level, self.level)
        body = html.escape("\n".join(self.lines()), quote=False)
        title = html.escape(self.headline, quote=False)
        attachment = {"color": colour, "text": body, "fallback": title}
        return json.dumps({"text": title, "attachments": [attachment]}).encode()

    def for_webhook(self) -> bytes:
        """Every field, and the text, as JSON."""
        return json.dumps({**asdict(self), "text": self.text()}).encode()

    def for_sns(self) -> dict[str, Any]:
        """``publish``'s Subject (ASCII, at most 100 characters) and Message."""
        subject = self.headline.encode("ascii", "replace").decode()[:100]
        return {"Subject": subject, "Message": self.text()}


class AlertRateLimiter:
    """Which alerts are worth sending: each once, not too many, and what is resolved only if its
    beginning was sent.
    """

    def __init__(self, level: str, clock: Callable[[], float]) -> None:
        self._least, self._clock = LEVELS.index(level), clock
        self._open: dict[str, float] = {}
        self._sent: deque[float] = deque()
        self._held_back = 0

    def admit(self, alert: Alert) -> int | None:
        """How many were held back before this one; None if this one is not to be sent."""
        now = self._clock()
        if alert.resolved:
            return self._count() if self._open.pop(alert.key, None) is not None else None
        if LEVELS.index(alert.level) < self._least:
            return None
        if now - self._open.get(alert.key, -REPEAT_SECONDS) < REPEAT_SECONDS:
            return None
        while self._sent and now - self._sent[0] >= BURST_SECONDS:
            self._sent.popleft()
        if len(self._sent) >= BURST:
            self._held_back += 1
            return None
        self._sent.append(now)
        self._open[alert.key] = now
        return self._count()

    def _count(self) -> int:
        held_back, self._held_back = self._held_back, 0
        return held_back
