"""Reads the logs that the nodes of a cluster stored, once or continuously."""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from sm_train.entrypoints.clusters.attempts import CLOCK_SECONDS
from sm_train.entrypoints.clusters.node_record import StoredNode
from sm_train.toolkit.clusters.node_records.cluster_job import ClusterJob
from sm_train.toolkit.platforms.placed_run import JobLogLine, LogOptions
from sm_train.toolkit.records.job_logs import Event, LogStream, parse_event, parse_events
from sm_train.toolkit.records.live_state import LiveState, fold_events

ReadSegment = Callable[[str], bytes]
"""Reads a segment of a log by its name in the checkpoint folder of its stage."""

_LIVE_SEGMENTS = 2
"""Newest segments of a node's log whose events show its state."""

_POLL_SECONDS = 10.0


def read_live(read: ReadSegment, starts: Sequence[StoredNode]) -> LiveState:
    """Return the state of the newest events of an attempt's ``starts``."""
    return fold_events(
        (start.record.node, _by_own_clock(event, start))
        for start in starts
        for name in start.segments[-_LIVE_SEGMENTS:]
        for event in parse_events(read(name).decode("utf-8", "replace").splitlines())
    )


def _by_own_clock(event: Event, start: StoredNode) -> Event:
    """Return an event with its time by the reader's clock, if the node's is known to be wrong."""
    if abs(start.clock_offset) <= CLOCK_SECONDS:
        return event
    return {**event, "time": float(event["time"]) - start.clock_offset}


def log_streams(read: ReadSegment, root: str, starts: Sequence[StoredNode]) -> list[LogStream]:
    """Return the log of each node of an attempt."""
    return [
        LogStream(
            f"{root}/{start.record.stage}/{start.record.folder}",
            partial(map, read, start.segments),
            start.record.node,
            start.record.seen,
        )
        for start in starts
    ]


def platform_streams(job: ClusterJob) -> list[LogStream]:
    """Return what the records say of the attempt's end, as a line of the platform."""
    if not job.failure_reason:
        return []
    ended = job.ended or job.created
    line = f"{ended.isoformat(timespec='milliseconds')} {job.platform.name}: {job.failure_reason}\n"
    return [LogStream("job-records", lambda: [line.encode()], None, ended.timestamp())]


class LogReader:
    """Yields the lines of an attempt, each once, however often it is polled.

    Lines of several nodes are in order of time, which is that of the last event up to them.
    """

    def __init__(self, read: ReadSegment, options: LogOptions) -> None:
        self._read, self._since = read, options.since
        self._node = None if options.node is None else f"algo-{options.node}"
        self._positions: dict[str, _Position] = {}

    def poll(self, job: ClusterJob) -> Iterator[JobLogLine]:
        """Yield the lines that have been stored since the last poll."""
        streams = [
            self._new_lines(start, has_ended=not job.live)
            for start in job.starts
            if self._node in (None, start.record.node)
        ]
        for at, line in heapq.merge(*streams, key=lambda timed: timed[0]):
            if at >= self._since:
                yield line

    def _new_lines(
        self, start: StoredNode, *, has_ended: bool
    ) -> Iterator[tuple[float, JobLogLine]]:
        """Yield a node's new lines. A line is whole in one segment, except at the log's end."""
        at = self._positions.setdefault(start.record.folder, _Position(start.record.started))
        for name in start.segments:
            if name < at.segment:
                continue
            if name != at.segment:
                at.segment, at.lines = name, 0
            lines = self._read(name).split(b"\n")
            if not (has_ended and lines[-1]):
                del lines[-1]
            for raw in lines[at.lines :]:
                line = raw.decode("utf-8", "replace")
                if (event := parse_event(line)) is not None:
                    at.time = max(at.time, float(event["time"]))
                at.lines += 1
                yield at.time, JobLogLine(at.time, start.record.node, line)


@dataclass
class _Position:
    """What has been read of a node's log: the newest segment, its lines, and the time of them."""

    time: float
    segment: str = ""
    lines: int = 0


def log_lines(
    read: ReadSegment,
    job: ClusterJob,
    refreshed: Callable[[], ClusterJob],
    options: LogOptions,
) -> Iterator[JobLogLine]:
    """Yield the lines of an attempt; to follow it, until it has ended.

    ``refreshed`` returns the attempt as it is now.
    """
    reader = LogReader(read, options)
    while True:
        yield from reader.poll(job)
        if not (options.follow and job.live):
            return
        time.sleep(_POLL_SECONDS)
        job = refreshed()
