"""Work that reads the weights while the next step's gradients are computed from them."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import torch


class BackgroundWork:
    """Does work in the order in which it is given, beside the training on ``device``.

    On a CPU a thread does it. On a GPU it is kernels and copies that are only put into the
    training's own queue, which the host does at once. Whoever changes weights, or reads what the
    work makes, must :meth:`join` first. ``waited`` are the seconds that this took in all.
    """

    def __init__(self, device: torch.device) -> None:
        self._thread = ThreadPoolExecutor(1, "beside") if device.type == "cpu" else None
        self._running: list[Future[None]] = []
        self.waited = 0.0

    def run(self, work: Callable[[], None]) -> Future[None]:
        """Begin with ``work`` when what was given before is done; the result is when it is done."""
        if self._thread is None:
            work()
            done: Future[None] = Future()
            done.set_result(None)
            return done
        self._running.append(self._thread.submit(work))
        return self._running[-1]

    def join(self) -> None:
        """Wait until all is done; raises what it raised."""
        if not self._running:
            return
        started = time.perf_counter()
        running, self._running = self._running, []
        for one in running:
            one.result()
        self.waited += time.perf_counter() - started
