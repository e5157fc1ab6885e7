"""Reads the event lines of a job, from a file, a local run's folder or any lines of text."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec
from sm_train.entrypoints.common.events import FIELDS, PREFIX

LOG_NAME = "events.log"
"""The file in a local run's folder that holds everything its processes said."""

Event = dict[str, Any]

UNREADABLE = (ValueError, RecursionError)
"""What msgspec raises of text that is no JSON."""


def parse_event(line: str) -> Event | None:
    """The event in ``line``; None for any other line.

    A launcher or CloudWatch may put text before the event, and a killed process may cut it
    short: a line without a whole, known event is none.
    """
    start = line.find(PREFIX + "{")
    if start < 0:
        return None
    try:
        event = msgspec.json.decode(line[start + len(PREFIX) :])
    except UNREADABLE:
        return None
    kind = event.get("kind")
    known = FIELDS.get(kind) if isinstance(kind, str) else None
    return event if known is not None and known <= event.keys() else None


def parse_events(lines: Iterable[str]) -> Iterator[Event]:
    """The events among ``lines``, in order."""
    return (event for line in lines if (event := parse_event(line)) is not None)


def read_events(path: Path) -> Iterator[Event]:
    """The events in a log file, or in a local run's folder.

    Raises:
        FileNotFoundError: there is no such file, or the folder has no log.
    """
    log = path / LOG_NAME if path.is_dir() else path
    with log.open(encoding="utf-8", errors="replace") as lines:
        yield from parse_events(lines)
