"""What a job has said lately: its newest event lines, without reading weeks of log."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from sm_train.toolkit.aws.cloudwatch_logs import Entry, newest_line, search
from sm_train.toolkit.jobs.events import parse_event
from sm_train.toolkit.jobs.live_state import LiveState, fold_events

_WINDOW_SECONDS = 1800.0
"""How far before its newest line a job's last words are looked for: several logging intervals."""

EVENT_PATTERN = '"SMT "'
"""CloudWatch's filter for event lines."""


@dataclass(frozen=True)
class Progress:
    """Of one job, by its own clock in Unix seconds; None where it has not said that yet.

    ``sign`` is when any of its processes last took a step, saved, evaluated or started.
    """

    step: int | None = None
    steps_per_second: float | None = None
    loss: float | None = None
    sign: float | None = None
    ended: str | None = None
    """Why training ended, once it has."""


def read_live(session: Any, job: str) -> LiveState:
    """Read the job's newest lines.

    Raises:
        UserError: AWS refuses.
    """
    newest = newest_line(session, job)
    if newest is None:
        return LiveState()
    since = newest - _WINDOW_SECONDS
    return live_of(search(session, f"{job}/", pattern=EVENT_PATTERN, since=since))


def live_of(entries: Iterable[Entry]) -> LiveState:
    """What the event lines among ``entries`` come to."""
    parsed = ((entry.host, parse_event(entry.message)) for entry in entries)
    return fold_events((host, event) for host, event in parsed if event is not None)


def last_words(live: LiveState) -> Progress:
    """The job's state in few words."""
    step = speed = loss = ended = None
    if "step" in live.newest:
        event = live.newest["step"].event
        step = int(event["step"])
        speed, loss = event["steps_per_second"], event["loss"]
    elif live.beats:
        # Training may hang for longer than its words are looked for.
        step = max(int(beat.event["step"]) for beat in live.beats.values())
    if "end" in live.newest:
        event = live.newest["end"].event
        ended, step = str(event["reason"]), max(step or 0, int(event["step"]))
    return Progress(step, speed, loss, live.sign, ended)
