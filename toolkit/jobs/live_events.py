"""Reads a job's newest event lines without reading weeks of log."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from sm_train.cost.timeline import mean_speed
from sm_train.entrypoints.uploads.lag import StorageLag, storage_lag
from sm_train.toolkit.aws.cloudwatch_logs import LogEntry, newest_line, search
from sm_train.toolkit.jobs.event_lines import parse_event
from sm_train.toolkit.jobs.live_state import LiveState, fold_events, saved_checkpoints
from sm_train.toolkit.jobs.run_job import RunJob

if TYPE_CHECKING:
    import boto3

_WINDOW_SECONDS = 1800.0
"""How far before its newest line a job's events are read: several logging intervals."""

EVENT_PATTERN = '"SMT "'
"""CloudWatch's filter for event lines."""


@dataclass(frozen=True)
class Progress:
    """Progress of one job, in Unix seconds by its own clock; None if it has not logged it yet.

    ``last_activity`` is when any of its processes last took a step, saved, evaluated or started.
    """

    step: int | None = None
    steps_per_second: float | None = None
    """Since its last start, by :func:`~sm_train.cost.timeline.mean_speed`."""
    data_wait_share: float | None = None
    loss: float | None = None
    last_activity: float | None = None
    ended: str | None = None
    """Why training ended, once it has."""
    is_first_interval: bool = False
    """Whether the speed is that of the first interval, which compiles and fills caches."""

    @property
    def measured_speed(self) -> float | None:
        """Steps per second; None while only the first interval is known."""
        return None if self.is_first_interval else self.steps_per_second


def read_live(session: boto3.Session, job: RunJob) -> LiveState:
    """Return the state of the job's newest events.

    Raises:
        UserError: AWS returns an error.
    """
    newest = newest_line(session, job.name, region=job.region)
    if newest is None:
        return LiveState()
    since = newest - _WINDOW_SECONDS
    entries = search(session, f"{job.name}/", region=job.region, pattern=EVENT_PATTERN, since=since)
    return live_of(entries)


def live_of(entries: Iterable[LogEntry]) -> LiveState:
    """Return the state of the events among ``entries``."""
    parsed = ((entry.node, parse_event(entry.message)) for entry in entries)
    return fold_events((node, event) for node, event in parsed if event is not None)


def failed_saves(live: LiveState) -> str | None:
    """Return how many checkpoints a job could not write since the newest complete one; None if
    none.
    """
    newest = live.newest.get("checkpoint")
    since = float("-inf") if newest is None else newest.time
    failed = [
        notice.event
        for notice in live.notices
        if notice.event.get("code") == "checkpoint-failed" and notice.time > since
    ]
    if not failed:
        return None
    what = "a checkpoint" if len(failed) == 1 else f"{len(failed)} checkpoints"
    complete = "" if newest is None else f" since that of step {newest.event['step']:,}"
    return f"{what} could not be written{complete}: {failed[-1]['message']}"


def lag_of(live: LiveState, stored: int | None, every_steps: int, now: float) -> StorageLag | None:
    """Return how far storage is behind the checkpoints that the job saved; None if it is not.

    ``stored`` is the newest stored step, ``every_steps`` the run file's interval.
    """
    lag = storage_lag(saved_checkpoints(live), stored, now, every_steps)
    if lag is None:
        return None
    unstored = [
        now - heartbeat.time + float(seconds)
        for heartbeat in live.heartbeats.values()
        if (seconds := heartbeat.event.get("unstored_seconds")) is not None
    ]
    return replace(lag, seconds=max(lag.seconds, *unstored, 0.0))


@dataclass(frozen=True)
class ShownSpeed:
    """Steps per second of a job, without its first interval."""

    job: RunJob
    steps_per_second: float


def shown_speed(
    jobs: Sequence[RunJob], progress: Progress, read: Callable[[RunJob], LiveState]
) -> ShownSpeed | None:
    """Return the newest speed that the jobs of a stage have shown; None if none has.

    ``progress`` is that of the newest of ``jobs``, and ``read`` reads the events of an earlier one:
    a job that has just started has shown none.
    """
    if not jobs:
        return None
    if progress.measured_speed:
        return ShownSpeed(jobs[-1], progress.measured_speed)
    for job in reversed(jobs[:-1][-_EARLIER_JOBS:]):
        if speed := progress_of(read(job)).measured_speed:
            return ShownSpeed(job, speed)
    return None


_EARLIER_JOBS = 2
"""How many are read at most: jobs that fail early show no speed."""


def progress_of(live: LiveState) -> Progress:
    """Summarize the job's state."""
    step = speed = loss = ended = step_event = None
    if "step" in live.newest:
        event = step_event = live.newest["step"].event
        step, loss, speed = int(event["step"]), event["loss"], mean_speed([event])
    elif live.heartbeats:
        # A hanging job may have logged no step within the window, but its heartbeats continue.
        step = max(int(heartbeat.event["step"]) for heartbeat in live.heartbeats.values())
    if "end" in live.newest:
        event = live.newest["end"].event
        ended, step = str(event["reason"]), max(step or 0, int(event["step"]))
    return Progress(
        step,
        None if speed is None else speed.steps_per_second,
        None if speed is None else speed.data_wait_share,
        loss,
        live.last_activity,
        ended,
        step_event is not None and step_event.get("timed_seconds") == 0,
    )
