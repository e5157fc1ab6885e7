"""Measures each rank's busy time: the part of an optimizer step that it does not wait for others.

In synchronous training a whole step takes equally long on all ranks, because they wait for each
other in collectives. Only the time outside collectives shows which rank the others wait for:

- DDP: from the begin of the step to the first gradient bucket's all-reduce, and the optimizer.
- FSDP: from the begin of the step to the backward pass, without the waits for all-gathered weights,
  and the optimizer.

On a GPU the times are those of the compute stream, between CUDA events that are read when the GPU
has passed them: no step waits for them. On a CPU the same sections are timed by the host's clock.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any, Protocol

import torch
from sm_train.entrypoints.distributed.fsdp import exchanging_layers, sharded_modules
from torch import Tensor, nn

FIRST_BUCKET_BYTES = 2**20
"""Size of DDP's first gradient bucket (``torch.distributed._DEFAULT_FIRST_BUCKET_BYTES``)."""

_MAX_PENDING_STEPS = 64


Publish = Callable[[int, int], None]
"""Takes a step's busy time, and how much of it this process waited for a CPU core, in ns."""


class _Marks(Protocol):
    """Points in time, in pairs: where a busy section begins and ends."""

    def mark(self) -> None: ...

    def end_step(self, publish: Publish) -> None: ...


class _HostMarks:
    """Times of the host's clock, and of the kernel's clock of waits for a CPU core.

    Other programs on a node slow down one rank now, another one later. That is no property of the
    rank, and can be distinguished from a rank that is slow or stopped: the kernel counts the time
    for which a thread is ready to run, but no core is free. Only the creating thread may mark.
    """

    def __init__(self) -> None:
        self._marks: list[tuple[int, int]] = []
        self._schedstat: int | None = None
        with suppress(OSError):
            path = f"/proc/self/task/{threading.get_native_id()}/schedstat"
            self._schedstat = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def mark(self) -> None:
        waited = 0
        if self._schedstat is not None:
            # "<time on a core> <time waiting for one> <time slices>" (sched-stats.rst)
            waited = int(os.pread(self._schedstat, 64, 0).split()[1])
        self._marks.append((time.monotonic_ns(), waited))

    def end_step(self, publish: Publish) -> None:
        begins, ends = self._marks[::2], self._marks[1::2]
        self._marks = []
        pairs = list(zip(begins, ends, strict=True))
        busy = sum(end[0] - begin[0] for begin, end in pairs)
        publish(busy, sum(end[1] - begin[1] for begin, end in pairs))


class _CudaMarks:
    """Events on the current stream, reused once they are read."""

    def __init__(self) -> None:
        self._events: list[torch.cuda.Event] = []
        self._free: list[torch.cuda.Event] = []
        self._pending: deque[list[torch.cuda.Event]] = deque()

    def mark(self) -> None:
        event = self._free.pop() if self._free else torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        self._events.append(event)

    def end_step(self, publish: Publish) -> None:
        self._pending.append(self._events)
        self._events = []
        # Every event but the first is later on the same stream, so the last one decides.
        while self._pending and self._pending[0][-1].query():  # type: ignore[no-untyped-call]
            events = self._pending.popleft()
            pairs = zip(events[::2], events[1::2], strict=True)
            milliseconds = sum(begin.elapsed_time(end) for begin, end in pairs)
            self._free += events
            publish(round(milliseconds * 1e6), 0)
        while len(self._pending) > _MAX_PENDING_STEPS:
            self._free += self._pending.popleft()


class BusyTimer:
    """Times the busy sections of each step and calls ``publish`` with their sum.

    Outside of a step, hooks that call it have no effect: evaluations use the same model.
    """

    def __init__(self, publish: Publish, device: torch.device) -> None:
        self._publish = publish
        self._marks: _Marks = _CudaMarks() if device.type == "cuda" else _HostMarks()
        self._in_step = self._is_busy = self._in_backward = False

    def begin_step(self) -> None:
        """Begin an optimizer step, which is busy at first."""
        self._in_step = True
        self.resume()

    def resume(self) -> None:
        """Begin a busy section: no collective of this step's last backward pass is left."""
        self._in_backward = False
        self.end_wait()

    def begin_wait(self) -> None:
        """End a busy section: a collective comes next."""
        if self._in_step and self._is_busy:
            self._marks.mark()
            self._is_busy = False

    def end_wait(self) -> None:
        """Begin a busy section after a collective, unless it belongs to a backward pass."""
        if self._in_step and not self._is_busy and not self._in_backward:
            self._marks.mark()
            self._is_busy = True

    def begin_collectives(self) -> None:
        """End the busy section for the rest of the backward pass.

        There, gradients are summed while others are computed, and activation checkpointing runs
        forward passes again.
        """
        self.begin_wait()
        self._in_backward = True

    def end_step(self) -> None:
        """End the step; publishes the steps that the device has completed."""
        self.begin_wait()
        self._in_step = False
        self._marks.end_step(self._publish)


def attach(timer: BusyTimer, model: nn.Module, module: nn.Module, *, compiled: bool) -> None:
    """Let the forward passes of ``model`` report their waits to ``timer``.

    ``model`` is ``module``, wrapped by DDP or sharded. The blocks of a ``compiled`` model take no
    hooks without breaking their graphs: there, the whole forward pass counts as a wait.
    """
    sharded = sharded_modules(module)

    def begin_wait(*_: Any) -> None:
        timer.begin_wait()

    def end_wait(*_: Any) -> None:
        timer.end_wait()

    if not sharded:
        # DDP broadcasts buffers before the module's own forward pass.
        model.register_forward_pre_hook(begin_wait, prepend=True)
        module.register_forward_pre_hook(end_wait)
        return
    roots = [child for child in module.children() if child in sharded]
    for root in roots if compiled else sharded:
        # FSDP's own hook in between waits for the weights.
        root.register_forward_pre_hook(begin_wait, prepend=True)
        if not compiled:
            root.register_forward_pre_hook(end_wait)
    for layer in [] if compiled else exchanging_layers(module):
        layer.register_forward_pre_hook(begin_wait)
        layer.register_forward_hook(end_wait)


def end_of_first_bucket(order: Sequence[Tensor]) -> Tensor:
    """Return the parameter whose gradient completes DDP's first bucket.

    ``order`` are the parameters in the order in which the backward pass completes their gradients.
    """
    total = 0
    for parameter in order:
        total += parameter.numel() * parameter.element_size()
        if total >= FIRST_BUCKET_BYTES:
            break
    return parameter


class GradientOrder:
    """Records the order in which a backward pass completes gradients."""

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        self.parameters: list[Tensor] = []
        self._handles = [
            parameter.register_post_accumulate_grad_hook(self.parameters.append)  # type: ignore[no-untyped-call]
            for parameter in parameters
        ]

    def stop(self) -> None:
        """Stop recording."""
        for handle in self._handles:
            handle.remove()
