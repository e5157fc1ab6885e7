"""Stores a node's heartbeat and output while its job runs, and receives requests to stop."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

from sm_train.entrypoints.clusters.log_segments import LogSegments, events_only
from sm_train.entrypoints.clusters.node_record import (
    HEARTBEAT_SECONDS,
    RUN_FILE,
    NodeRecord,
    NodeState,
    StopRequest,
    read_stop_request,
    segment_name,
)
from sm_train.entrypoints.storage.storage import Storage, write_file

FIRST_SEGMENTS, NEWEST_SEGMENTS = 4, 64
"""Segments of a node's log that keep all of their lines: those with the start of NCCL and of the
training, and those with its end. Of the others the event lines are kept."""

_LAST_STORE_SECONDS = 20.0
"""Time to store the end of the log. Kubernetes kills a pod 120 s after SIGTERM, of which the last
checkpoint may take 90 (clusters/checkpoint_sync.py)."""

_READ_BYTES = 2**16
_DRAIN_SECONDS = 2.0


class NodeRecorder:
    """Stores ``record`` every ``interval`` seconds in a thread, with the output of the node.

    ``storage`` is the stage's checkpoint folder. ``on_stop`` is called once, with a request to stop
    that was stored after the node's start. Storage that fails is reported to ``warn`` once, until
    it works again: training does not depend on it.
    """

    def __init__(
        self,
        storage: Storage,
        record: NodeRecord,
        *,
        on_stop: Callable[[StopRequest], None],
        warn: Callable[[str], None],
        interval: float = HEARTBEAT_SECONDS,
        segments: LogSegments | None = None,
        newest_segments: int = NEWEST_SEGMENTS,
    ) -> None:
        self._storage, self._record = storage, record
        self._began = time.monotonic()
        self._on_stop, self._warn, self._interval = on_stop, warn, interval
        self._segments = LogSegments() if segments is None else segments
        self._newest_segments = newest_segments
        self._reduced = FIRST_SEGMENTS
        """Number of the first segment, of those after the first ones, that has all lines."""
        self._run_file: bytes | None = None
        self._stopped, self._has_failed = False, False
        self._lock = threading.Lock()
        self._ending, self._due = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    @property
    def record(self) -> NodeRecord:
        return self._record

    def start(self, run_file: bytes | None = None) -> None:
        """Begin; ``run_file`` is stored for those who have only the storage."""
        self._run_file = run_file
        self._thread.start()

    def add(self, output: bytes) -> None:
        """Add output of the node."""
        self._segments.add(output)

    def set_state(self, state: NodeState) -> None:
        """Change the state, and store it soon."""
        with self._lock:
            self._record = replace(self._record, state=state)
        self._due.set()

    def finish(self, exit_code: int) -> None:
        """Store the end of the log, then that the node has ended, within bounded time."""
        self._ending.set()
        self._due.set()
        self._thread.join(_LAST_STORE_SECONDS)
        if self._thread.is_alive():
            return
        with self._lock:
            self._record = replace(self._record, state="ended", exit_code=exit_code)
        last = threading.Thread(target=self._attempt, daemon=True)
        last.start()
        last.join(_LAST_STORE_SECONDS)

    def _run(self) -> None:
        while not self._ending.is_set():
            self._due.clear()
            self._attempt()
            self._due.wait(self._interval)

    def _attempt(self) -> None:
        try:
            self._store()
        except Exception as error:  # whatever the store's client raises: training continues
            if not self._has_failed:
                place = self._storage.address(self._record.folder)
                self._warn(f"records are not stored at {place}: {type(error).__name__}: {error}")
            self._has_failed = True
        else:
            self._has_failed = False

    def _store(self) -> None:
        """Store what has changed. The record comes last: with a state, its lines are stored."""
        for segment in self._segments.changed():
            name = segment_name(self._record.folder, segment.number)
            write_file(self._storage, name, segment.content)
            self._segments.stored(segment)
            self._reduce(segment.number)
        if self._run_file is not None:
            write_file(self._storage, RUN_FILE, self._run_file)
            self._run_file = None
        with self._lock:
            ran = time.monotonic() - self._began
            self._record = record = replace(self._record, seen=time.time(), ran=ran)
        write_file(self._storage, record.file, record.to_json())
        self._receive_stop()

    def _reduce(self, newest: int) -> None:
        """Keep only the event lines of segments that are neither first nor among the newest."""
        while self._reduced + self._newest_segments <= newest:
            name = segment_name(self._record.folder, self._reduced)
            with contextlib.suppress(FileNotFoundError):
                write_file(self._storage, name, events_only(self._storage.read(name)))
            self._reduced += 1

    def _receive_stop(self) -> None:
        if self._stopped or self._record.state == "ended":
            return
        request, record = read_stop_request(self._storage), self._record
        started = time.time() - record.ran
        if request is not None and request.applies_to(started, record.job_id):
            self._stopped = True
            with self._lock:
                self._record = replace(self._record, stopped_by=request.by)
            self._on_stop(request)


@contextlib.contextmanager
def recorded_output(add: Callable[[bytes], None]) -> Iterator[None]:
    """Also pass what this process and those that it starts print to ``add``.

    Both streams become one pipe, from which a thread copies to the original standard output. A
    process that outlives the context keeps the pipe open, and what it prints later is lost.
    """
    read_end, write_end = os.pipe()
    original = {number: os.dup(number) for number in (1, 2)}
    copying = threading.Thread(target=_copy, args=(read_end, original[1], add), daemon=True)
    copying.start()
    for number in original:
        os.dup2(write_end, number)
    os.close(write_end)
    try:
        yield
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        for number, descriptor in original.items():
            os.dup2(descriptor, number)
        copying.join(_DRAIN_SECONDS)


def _copy(source: int, target: int, add: Callable[[bytes], None]) -> None:
    while output := os.read(source, _READ_BYTES):
        add(output)
        with contextlib.suppress(OSError):  # nobody reads the container's log any more
            remaining = memoryview(output)
            while remaining:
                remaining = remaining[os.write(target, remaining) :]
