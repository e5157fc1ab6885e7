"""Calls and output that cannot block their caller, for a process that must never hang."""

from __future__ import annotations

import queue
import sys
import threading
import time
from collections.abc import Callable
from typing import TextIO, TypeVar

T = TypeVar("T")


def call_with_timeout(seconds: float, call: Callable[[], T], default: T) -> T:
    """Return what ``call`` returns, or ``default`` if it raises or takes longer.

    A call that hangs keeps its thread: what hangs a job may hang its disk and its driver, too.
    """
    results: list[T] = []

    def run() -> None:
        try:
            results.append(call())
        except Exception as error:
            print(f"warning: {type(error).__name__}: {error}", file=sys.stderr)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    return results[0] if results else default


class NonBlockingStdout:
    """Writes events to stdout from a thread, so that a reader that stopped reading the pipe cannot
    block the caller.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._pending: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self._run, name="stdout", daemon=True).start()

    def write(self, text: str) -> int:
        """Queue ``text``; returns its length, as a text stream does."""
        self._pending.put(text)
        return len(text)

    def flush(self) -> None:
        """Do nothing: the thread flushes."""

    def finish(self, seconds: float) -> None:
        """Wait until everything is written, but at most ``seconds``."""
        deadline = time.monotonic() + seconds
        while self._pending.unfinished_tasks and time.monotonic() < deadline:
            time.sleep(0.01)

    def _run(self) -> None:
        while True:
            text = self._pending.get()
            try:
                self._stream.write(text)
                self._stream.flush()
            except OSError:  # the reader has closed the pipe
                pass
            finally:
                self._pending.task_done()
