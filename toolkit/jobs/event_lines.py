"""Parses event lines from a log file, a local run's folder or any lines of text."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec
from sm_train.entrypoints.common.events import PREFIX
from sm_train.toolkit.jobs.event_types import is_event

LOG_NAME = "events.log"
"""The file in a local run's folder with the output of all its processes."""

Event = dict[str, Any]

UNREADABLE = (ValueError, RecursionError)
"""The errors that msgspec raises for text that is not JSON."""


def parse_event(line: str) -> Event | None:
    """Return the event in ``line``; None for any other line.

    A launcher or CloudWatch may put text before the event, and a killed process may truncate it:
    a line without a complete event of a known kind holds none.
    """
    start = line.find(PREFIX + "{")
    if start < 0:
        return None
    try:
        event = msgspec.json.decode(line[start + len(PREFIX) :])
    except UNREADABLE:
        return None
    return event if is_event(event) else None


def parse_events(lines: Iterable[str]) -> Iterator[Event]:
    """Yield the events among ``lines`` in order."""
    return (event for line in lines if (event := parse_event(line)) is not None)


def read_events(path: Path) -> Iterator[Event]:
    """Yield the events in a log file, or in a local run's folder.

    Raises:
        FileNotFoundError: there is no such file, or the folder has no log.
    """
    log = path / LOG_NAME if path.is_dir() else path
    with log.open(encoding="utf-8", errors="replace") as lines:
        yield from parse_events(lines)
