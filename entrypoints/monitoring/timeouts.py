"""For a process that must never hang: calls and output that may."""

from __future__ import annotations

import queue
import sys
import threading
import time
from collections.abc import Callable
from typing import TextIO, TypeVar

T = TypeVar("T")


def call_with_timeout(seconds: float, call: Callable[[], T], otherwise: T) -> T:
    """What ``call`` returns, or ``otherwise`` where it raises or takes longer.

    A call that hangs keeps its thread; what hangs a job may hang its disk and its driver, too.
    """
    found: list[T] = []

    def run() -> None:
        found.append(call())

    thread = threading.Thread(target=_quietly(run), daemon=True)
    thread.start()
    thread.join(seconds)
    return found[0] if found else otherwise


def _quietly(call: Callable[[], None]) -> Callable[[], None]:
    def run() -> None:
        try:
            call()
        except Exception as error:
            print(f"warning: {type(error).__name__}: {error}", file=sys.stderr)

    return run


class NonBlockingStdout:
    """Standard output for events, written by a thread: who reads it may have stopped to."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._waiting: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self._run, name="voice", daemon=True).start()

    def write(self, text: str) -> int:
        self._waiting.put(text)
        return len(text)

    def flush(self) -> None:
        """Nothing: the thread flushes."""

    def finish(self, seconds: float) -> None:
        """Wait so long until everything is out."""
        deadline = time.monotonic() + seconds
        while self._waiting.unfinished_tasks and time.monotonic() < deadline:
            time.sleep(0.01)

    def _run(self) -> None:
        while True:
            text = self._waiting.get()
            try:
                self._stream.write(text)
                self._stream.flush()
            except OSError:  # nobody reads any more
                pass
            finally:
                self._waiting.task_done()
