"""A sign of life from every rank, from a thread apart from the training step."""

from __future__ import annotations

import faulthandler
import sys
import threading
import time
from collections.abc import Callable

from sm_train.entrypoints.events import Events


class Heartbeat:
    """Writes a heartbeat every ``interval`` seconds, and every stack when no step comes.

    A collective that hangs releases the GIL, so the thread speaks on while the step does not.
    """

    def __init__(
        self,
        events: Events,
        *,
        interval: float,
        stall_after: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._events = events
        self._interval, self._stall_after = interval, stall_after
        self._clock = clock
        self._step = 0
        self._last = clock()
        self._stalled = False
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)

    def __enter__(self) -> Heartbeat:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def beat(self, step: int) -> None:
        """Say that ``step`` is done."""
        self._step, self._last, self._stalled = step, self._clock(), False

    def _run(self) -> None:
        while not self._ended.wait(self._interval):
            self.say()

    def say(self) -> None:
        """Write one heartbeat and, once for each stall, all stacks and a warning."""
        silent = self._clock() - self._last
        self._events.write(
            "heartbeat",
            f"alive at step {self._step}",
            step=self._step,
            seconds_since_step=round(silent, 1),
        )
        if silent < self._stall_after or self._stalled:
            return
        self._stalled = True
        faulthandler.dump_traceback(file=sys.stderr, all_threads=True)
        self._events.write(
            "warning",
            f"no step for {silent:.0f} s: the stacks of all threads are above",
            code="stall",
            message=f"no step for {silent:.0f} s after step {self._step}",
        )
