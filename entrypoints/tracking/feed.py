"""Passes the events of rank 0 to the trackers' processes.

:meth:`TrackerFeed.send` puts a line into a bounded queue and returns at once. A thread writes it to
the process's standard input. If the tracker is slower than the events, new ones are dropped and
counted.
"""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from sm_train.entrypoints.job_interface.events import EventLog
from sm_train.entrypoints.job_interface.job_config import JobConfig, TrackerName
from sm_train.entrypoints.monitoring.heartbeat import heartbeat_folder, node_event_file

FINISH_TIMEOUT = 30.0
"""Seconds that the end of the job waits for all trackers together."""

_QUEUE_LENGTH = 1000
_KINDS = frozenset({"start", "step", "eval", "end"})


class TrackerFeed:
    """The queue, the thread and the process of one tracker."""

    def __init__(
        self, name: TrackerName, document: Path, stage: str, events: EventLog, node_event: Path
    ) -> None:
        """Start the process; ``node_event`` is the file of the node's last ``node`` event."""
        self.name, self._events = name, events
        self._lines: queue.Queue[str | None] = queue.Queue(_QUEUE_LENGTH)
        self._dropped = 0
        bundle = str(Path(__file__).resolve().parents[3])
        paths = [bundle, *filter(None, [os.environ.get("PYTHONPATH")])]
        command = [sys.executable, "-m", "sm_train.entrypoints.tracking.tracker_process"]
        command += ["--document", str(document), "--stage", stage, "--tracker", name]
        command += ["--node-event", str(node_event), "--parent", str(os.getpid())]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
            text=True,
            # Signals for the training's process group do not reach it; it ends with its input.
            start_new_session=True,
        )
        self._thread = threading.Thread(target=self._write, name=f"tracker-{name}", daemon=True)
        self._thread.start()

    def send(self, line: str) -> None:
        """Queue an event line; never blocks and never raises."""
        try:
            self._lines.put_nowait(line)
        except queue.Full:
            self._dropped += 1

    def _write(self) -> None:
        assert self._process.stdin is not None
        # A broken pipe is a process that has died: :meth:`finish` reports it.
        with contextlib.suppress(OSError), self._process.stdin as stream:
            while (line := self._lines.get()) is not None:
                stream.write(f"{line}\n")
                stream.flush()

    def end(self) -> None:
        """Close the process's input after the queued events, if there is room in the queue."""
        with contextlib.suppress(queue.Full):
            self._lines.put_nowait(None)

    def finish(self, deadline: float) -> None:
        """Wait for the process until ``deadline`` (monotonic), then kill it."""
        try:
            code = self._process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            # The client's own processes are in its session.
            with contextlib.suppress(OSError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._warn(f"did not finish in {FINISH_TIMEOUT:.0f} s and was ended")
        else:
            if code:
                self._warn(f"its process ended with code {code}")
        if self._dropped:
            self._warn(f"{self._dropped} events were dropped: it was too slow")

    def _warn(self, reason: str) -> None:
        message = f"tracker {self.name}: {reason}; `sm-train review --export` has all events"
        self._events.warn("tracker-incomplete", message, tracker=self.name)


class TrackerFeeds:
    """The feeds of all trackers of the run file."""

    def __init__(self, feeds: list[TrackerFeed]) -> None:
        self._feeds = feeds

    def send(self, kind: str, line: str) -> None:
        """Pass an event of the training on: a subscriber of :class:`EventLog`."""
        if kind in _KINDS:
            for feed in self._feeds:
                feed.send(line)

    def finish(self) -> None:
        """Let the trackers send what they have; waits :data:`FINISH_TIMEOUT` at most."""
        deadline = time.monotonic() + FINISH_TIMEOUT
        for feed in self._feeds:
            feed.end()
        for feed in self._feeds:
            feed.finish(deadline)


@contextlib.contextmanager
def tracker_feeds(config: JobConfig, document: Path) -> Iterator[TrackerFeeds]:
    """Start the trackers on rank 0, and let them finish when the block ends."""
    events = EventLog(node=0, rank=0)
    node_event = node_event_file(heartbeat_folder())
    feeds: list[TrackerFeed] = []
    names = (
        [tracker.name for tracker in config.trackers] if os.environ.get("RANK", "0") == "0" else []
    )
    for name in names:
        try:
            feeds.append(TrackerFeed(name, document, config.stage.name, events, node_event))
        except OSError as error:
            message = f"tracker {name}: no process: {error}; training continues"
            events.warn("tracker-failed", message, tracker=name)
    everything = TrackerFeeds(feeds)
    try:
        yield everything
    finally:
        everything.finish()
