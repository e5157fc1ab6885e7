"""Alerts that a watcher of a run has decided on, and the sinks that each has yet to reach.

Decisions and deliveries are stored apart: a sink that is broken repeats no alert to the others, and
an alert that no sink took is sent again at the next check.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from sm_train.entrypoints.base.stored_fields import (
    checked_fields,
    integer,
    mapping_of,
    optional,
    text,
    timestamp,
)
from sm_train.entrypoints.job_interface.node_description import RECORDS
from sm_train.entrypoints.monitoring.alert_sinks import SinkFactory, UndeliveredError
from sm_train.entrypoints.monitoring.alerts import Alert
from sm_train.entrypoints.storage.storage import Storage, read_document, write_file

ALERTS_FILE = f"{RECORDS}/alerts.json"
FORMAT_VERSION = 2

_KEPT_SECONDS = 7 * 24 * 3600.0
"""An alert that did not reach a sink for so long is no longer sent to it."""


@dataclass(frozen=True)
class Delivery:
    """An alert, how many sinks it was sent to now, and for each that failed the reason."""

    alert: Alert
    sinks: int
    problems: tuple[str, ...] = ()

    @property
    def arrived(self) -> bool:
        """Whether each sink has it, of which there is at least one."""
        return self.sinks > 0 and not self.problems

    def describe(self) -> str:
        """Return in words what became of it."""
        if not self.sinks:
            return f"alert `{self.alert.title}`: this machine has no sink of `alerts` to send it to"
        if self.problems:
            return f"alert `{self.alert.title}` did not arrive: {', '.join(self.problems)}"
        return f"alert sent: {self.alert.title}"


@dataclass(frozen=True)
class PendingAlert:
    """An alert and the names of the sinks that it has not reached; None before the first attempt.

    The machine that makes the first attempt knows which sinks there are.
    """

    alert: Alert
    sinks: tuple[str, ...] | None = None


@dataclass(frozen=True)
class AlertState:
    """The decisions of the checks so far.

    ``opened`` maps the keys of problems that last to the time of their alert, in Unix seconds.
    ``budget_announced`` is when the newest attempt began whose stop at the budget was announced.
    """

    opened: Mapping[str, float] = field(default_factory=dict)
    budget_announced: float = -1.0
    outbox: tuple[PendingAlert, ...] = ()

    def decide(self, alerts: Sequence[Alert], opened: Mapping[str, float]) -> AlertState:
        """Return the state after a check that decided on ``alerts``."""
        outbox = (*self.outbox, *map(PendingAlert, alerts))
        return replace(self, opened=dict(opened), outbox=outbox)

    def to_json(self) -> bytes:
        return json.dumps({"version": FORMAT_VERSION, **asdict(self)}).encode()


def read_alerts(storage: Storage) -> AlertState:
    """Return what is stored; a damaged file counts as none.

    Raises:
        OSError: the storage cannot be read, or a file has another format.
    """
    document = read_document(storage, ALERTS_FILE)
    if document is None:
        return AlertState()
    if document.get("version") != FORMAT_VERSION:
        raise OSError(
            f"{storage.address(ALERTS_FILE)}: format {document.get('version', 1)!r}, this sm-train "
            f"reads {FORMAT_VERSION}; delete the file, and `sm-train watch` writes it again"
        )
    try:
        fields = checked_fields(document, _STATE_FIELDS)
    except (TypeError, ValueError):
        return AlertState()
    return AlertState(**fields)


def deliver(
    storage: Storage,
    sinks: Sequence[SinkFactory],
    before: AlertState,
    after: AlertState,
    now: float,
) -> list[Delivery]:
    """Store the decisions, send each alert to the sinks that lack it, and store who has it.

    A machine without sinks decides nothing for the others: it returns its alerts as undelivered.

    Raises:
        OSError: the storage cannot be read or written.
    """
    names = tuple(sink.name for sink in sinks)
    new = after.outbox[len(before.outbox) :]
    if not names:
        return [Delivery(pending.alert, 0) for pending in new]
    addressed = [
        pending if pending.sinks is not None else PendingAlert(pending.alert, names)
        for pending in after.outbox
        if now - pending.alert.time <= _KEPT_SECONDS
    ]
    decided = replace(after, outbox=tuple(addressed))
    if decided != before:
        write_file(storage, ALERTS_FILE, decided.to_json())
    deliveries, left = [], list[PendingAlert]()
    for pending in addressed:
        delivery, missing = _send(pending, sinks)
        if delivery.sinks:
            deliveries.append(delivery)
        if missing:
            left.append(PendingAlert(pending.alert, missing))
    delivered = replace(decided, outbox=tuple(left))
    if delivered != decided:
        write_file(storage, ALERTS_FILE, delivered.to_json())
    return deliveries


def send_now(alert: Alert, sinks: Sequence[SinkFactory]) -> Delivery:
    """Send an alert once to each sink, and store nothing."""
    return _send(PendingAlert(alert, tuple(sink.name for sink in sinks)), sinks)[0]


def _send(pending: PendingAlert, sinks: Sequence[SinkFactory]) -> tuple[Delivery, tuple[str, ...]]:
    """Send an alert once to the sinks that lack it; return which still lack it.

    A sink that refuses it for good does not get it again, and one that this machine does not have
    is left to others.
    """
    missing, problems, attempts = list(pending.sinks or ()), list[str](), 0
    for factory in sinks:
        if factory.name not in missing:
            continue
        attempts += 1
        try:
            factory.create().send(pending.alert)
        except UndeliveredError as error:
            problems.append(f"{factory.name}: {error}")
            if not error.final:
                continue
        missing.remove(factory.name)
    return Delivery(pending.alert, attempts, tuple(problems)), tuple(missing)


def _pending(value: Any) -> PendingAlert:
    """Return a stored alert.

    Raises:
        ValueError: it is damaged.
    """
    if not isinstance(value, dict) or not isinstance(value.get("sinks"), list):
        raise ValueError("it is no alert with sinks")
    alert = Alert(**checked_fields(value.get("alert"), _ALERT_FIELDS))
    return PendingAlert(alert, tuple(map(text, value["sinks"])))


def _outbox(value: Any) -> tuple[PendingAlert, ...]:
    if not isinstance(value, list):
        raise ValueError("it is no list")
    return tuple(map(_pending, value))


def _flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"{value!r} is neither true nor false")
    return value


def _last_attempt(value: Any) -> float:
    return -1.0 if value == -1 else timestamp(value)


_STATE_FIELDS = {
    "opened": mapping_of(timestamp),
    "budget_announced": _last_attempt,
    "outbox": _outbox,
}
_ALERT_FIELDS = {
    **dict.fromkeys(("key", "level", "title", "run", "stage", "symptom"), text),
    "time": timestamp,
    **dict.fromkeys(("worst", "last_checkpoint", "command", "console"), optional(text)),
    **dict.fromkeys(("silent_seconds", "burned_usd"), optional(timestamp)),
    "resolved": _flag,
    "suppressed": integer,
}
