"""Divides a node's output into segments, which are stored while it grows."""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass

from sm_train.entrypoints.job_interface.events import PREFIX

SEGMENT_BYTES = 2**20
"""Size from which on a segment is closed: what is stored again at most with each heartbeat."""

MAX_WAITING = 32
"""Closed segments that wait for the storage. What a job prints meanwhile is not stored."""

_EVENT = (PREFIX + "{").encode()


@dataclass(frozen=True)
class Segment:
    """The lines of a segment so far; ``closed`` if no more are added."""

    number: int
    content: bytes
    closed: bool


class LogSegments:
    """Collects output in memory; :meth:`changed` and :meth:`stored` hand it to the storage.

    Any thread may call any method.
    """

    def __init__(
        self, *, segment_bytes: int = SEGMENT_BYTES, max_waiting: int = MAX_WAITING
    ) -> None:
        self._segment_bytes, self._max_waiting = segment_bytes, max_waiting
        self._lock = threading.Lock()
        self._closed: deque[Segment] = deque()
        self._number, self._content, self._stored_bytes = 0, bytearray(), 0
        self._dropped = 0

    def add(self, output: bytes) -> None:
        """Append output. It is dropped, and counted, while too much waits for the storage."""
        with self._lock:
            if len(self._closed) >= self._max_waiting:
                self._dropped += len(output)
                return
            if self._dropped:
                note = f"\nsm-train start: {self._dropped} bytes of output were not stored\n"
                self._content += note.encode()
                self._dropped = 0
            self._content += output
            if len(self._content) >= self._segment_bytes:
                self._close()

    def _close(self) -> None:
        """Close the segment after its last whole line."""
        end = self._content.rfind(b"\n") + 1 or len(self._content)
        self._closed.append(Segment(self._number, bytes(self._content[:end]), closed=True))
        del self._content[:end]
        self._number += 1
        self._stored_bytes = 0

    def changed(self) -> list[Segment]:
        """Return the segments that are not stored as they are now, in order."""
        with self._lock:
            found = list(self._closed)
            if len(self._content) > self._stored_bytes:
                found.append(Segment(self._number, bytes(self._content), closed=False))
            return found

    def stored(self, segment: Segment) -> None:
        """Note that ``segment`` has been stored."""
        with self._lock:
            if segment.closed:
                if self._closed and self._closed[0].number == segment.number:
                    self._closed.popleft()
            elif segment.number == self._number:
                self._stored_bytes = len(segment.content)


def events_only(content: bytes) -> bytes:
    """Return the event lines among a segment's lines."""
    return b"".join(line for line in content.splitlines(keepends=True) if _EVENT in line)
