"""Work that reads the weights in the background while the next gradients are computed."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import torch

_LOW_PRIORITY = 10
"""Niceness of a thread that must not slow the training down: a tenth of its share of a full CPU."""


def lower_priority() -> None:
    """Give the calling thread less CPU time than the others, where the system allows it."""
    with contextlib.suppress(OSError, AttributeError):
        # Linux has a niceness for each thread, by its id.
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LOW_PRIORITY)


class BackgroundWork:
    """Runs work in order, overlapped with the training on ``device``.

    On a CPU a thread runs it. On a GPU the work is kernels and copies that are only enqueued on
    the training's own stream, which returns at once. Call :meth:`join` before changing weights or
    reading what the work produces. ``blocked_seconds`` is the total time spent in :meth:`join`.
    """

    def __init__(self, device: torch.device) -> None:
        self._thread = ThreadPoolExecutor(1, "background") if device.type == "cpu" else None
        self._running: list[Future[None]] = []
        self.blocked_seconds = 0.0

    def run(self, work: Callable[[], None]) -> Future[None]:
        """Run ``work`` after all earlier work; return a future that completes with it."""
        if self._thread is None:
            # On a GPU the stream keeps the order: later kernels cannot change what these read.
            work()
            done: Future[None] = Future()
            done.set_result(None)
            return done
        self._running.append(self._thread.submit(work))
        return self._running[-1]

    def join(self) -> None:
        """Wait until all work is done; re-raise its first exception."""
        if not self._running:
            return
        started = time.perf_counter()
        running, self._running = self._running, []
        for future in running:
            future.result()
        self.blocked_seconds += time.perf_counter() - started
