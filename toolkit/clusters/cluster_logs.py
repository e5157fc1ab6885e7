"""Reads the logs that the nodes of a cluster stored, once or continuously."""

from __future__ import annotations

import heapq
import time
from collections.abc import Iterator
from dataclasses import dataclass

from sm_train.entrypoints.job_records.attempts import CLOCK_SECONDS
from sm_train.entrypoints.job_records.node_record import StoredNode
from sm_train.entrypoints.shared_work.storage import Storage
from sm_train.toolkit.clusters.cluster_job import ClusterJob
from sm_train.toolkit.clusters.cluster_run import ClusterRun, readable
from sm_train.toolkit.jobs.event_lines import Event, parse_event, parse_events
from sm_train.toolkit.jobs.live_state import LiveState, fold_events

_LIVE_SEGMENTS = 2
"""Newest segments of a node's log whose events show its state."""

_POLL_SECONDS = 10.0


@dataclass(frozen=True)
class ClusterLogLine:
    """A line of a node's log. ``time`` is that of the last event up to it, Unix seconds."""

    time: float
    node: str
    message: str


def read_segments(run: ClusterRun, start: StoredNode, newest: int | None = None) -> Iterator[bytes]:
    """Yield the log of a node in segments: all, or the ``newest``.

    Raises:
        UserError: the place cannot be read.
    """
    storage = run.storage(start.record.stage)
    for name in start.segments[-(newest or 0) :]:
        with readable(run.root):
            content = storage.read(name)
        yield content


def rank_0_events(run: ClusterRun, job: ClusterJob) -> Iterator[Event]:
    """Yield the events of an attempt's rank 0.

    Raises:
        UserError: the place cannot be read.
    """
    for start in job.starts:
        for segment in read_segments(run, start):
            yield from (event for event in _events(segment) if event["rank"] == 0)


def _events(segment: bytes) -> Iterator[Event]:
    return parse_events(segment.decode("utf-8", "replace").splitlines())


def read_live(run: ClusterRun, job: ClusterJob) -> LiveState:
    """Return the state of the newest events of an attempt.

    Raises:
        UserError: the place cannot be read.
    """
    return fold_events(
        (start.record.node, _by_own_clock(event, start))
        for start in job.starts
        for segment in read_segments(run, start, _LIVE_SEGMENTS)
        for event in _events(segment)
    )


def _by_own_clock(event: Event, start: StoredNode) -> Event:
    """Return an event with its time by the reader's clock, if the node's is known to be wrong."""
    if abs(start.clock_offset) <= CLOCK_SECONDS:
        return event
    return {**event, "time": float(event["time"]) - start.clock_offset}


class LogReader:
    """Yields the lines of an attempt, each once, however often it is polled.

    Lines of several nodes are in order of time; ``node`` selects one, ``since`` is in Unix seconds.
    """

    def __init__(self, run: ClusterRun, *, node: int | None, since: float) -> None:
        self._run, self._since = run, since
        self._node = None if node is None else f"algo-{node}"
        self._read: dict[str, _Position] = {}

    def poll(self, job: ClusterJob) -> Iterator[ClusterLogLine]:
        """Yield the lines that have been stored since the last poll.

        Raises:
            UserError: the place cannot be read.
        """
        storage = self._run.storage(job.stage)
        streams = [
            self._new_lines(storage, start, has_ended=not job.live)
            for start in job.starts
            if self._node in (None, start.record.node)
        ]
        for line in heapq.merge(*streams, key=lambda line: line.time):
            if line.time >= self._since:
                yield line

    def _new_lines(
        self, storage: Storage, start: StoredNode, *, has_ended: bool
    ) -> Iterator[ClusterLogLine]:
        """Yield a node's new lines. A line is whole in one segment, except at the log's end."""
        at = self._read.setdefault(start.record.folder, _Position(start.record.started))
        for name in start.segments:
            if name < at.segment:
                continue
            if name != at.segment:
                at.segment, at.lines = name, 0
            with readable(self._run.root):
                content = storage.read(name)
            lines = content.split(b"\n")
            if not (has_ended and lines[-1]):
                del lines[-1]
            for raw in lines[at.lines :]:
                line = raw.decode("utf-8", "replace")
                if (event := parse_event(line)) is not None:
                    at.time = max(at.time, float(event["time"]))
                at.lines += 1
                yield ClusterLogLine(at.time, start.record.node, line)


@dataclass
class _Position:
    """What has been read of a node's log: the newest segment, its lines, and the time of them."""

    time: float
    segment: str = ""
    lines: int = 0


def follow_lines(
    run: ClusterRun, job: ClusterJob, *, node: int | None, since: float
) -> Iterator[ClusterLogLine]:
    """Yield the lines of an attempt until it has ended, also those that are stored meanwhile.

    Raises:
        UserError: the place cannot be read.
    """
    reader = LogReader(run, node=node, since=since)
    while True:
        yield from reader.poll(job)
        if not job.live:
            return
        time.sleep(_POLL_SECONDS)
        run = run.refreshed()
        job = next(
            (other for other in run.jobs(job.stage, time.time()) if other.name == job.name), job
        )
