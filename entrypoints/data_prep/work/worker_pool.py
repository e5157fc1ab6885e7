"""Runs tasks in worker processes with threads, and reports their combined progress."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from multiprocessing import resource_tracker
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from sm_train.entrypoints.base.signals import (
    block_signals,
    exit_with_parent,
    forward_to_parent,
    record_signals,
)
from sm_train.entrypoints.images.decoder_pool import DecoderPool, Decoders, InProcessDecoders
from sm_train.entrypoints.storage.storage import Storage
from sm_train.entrypoints.storage.store import S3Access

S3_THREADS = 16
"""Minimum number of threads in a process that reads from or writes to S3, to hide its latency."""

_POLL_SECONDS = 0.2
"""Interval between two progress reports."""

_ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""What ends a program: only the parent handles them, also if a worker process gets one."""

_DRIVERS = (Path("/dev/nvidiactl"), Path("/dev/dxg"))
"""Devices of NVIDIA's driver on Linux, and in Windows' subsystem for Linux."""

_Item = TypeVar("_Item")

ProgressCallback = Callable[[int, int, int], None]
"""Progress callback ``(inputs_done, bytes_written, inputs_rejected)``, all since the last call."""

Task = Callable[[_Item, ProgressCallback, Decoders], None]
"""What a worker process does with an item."""


class StoppedError(Exception):
    """The parent process stopped this worker."""


class WorkerKilledError(RuntimeError):
    """A worker process has ended; the message says how, as the system reports it."""


@dataclass(frozen=True)
class WorkerPlan:
    """Where results are written, and the number of workers that compute them."""

    destination: Storage
    access: S3Access
    workers: int

    def decoders(self, processes: int) -> int:
        """Return the number of decoders of each of ``processes`` worker processes."""
        return max(1, self.workers // processes)


@dataclass(frozen=True)
class WorkProgress:
    """Progress in inputs; ``bytes`` is the size of the results.

    ``label`` names the pass over the inputs, of which there may be several, ``unit`` the inputs.
    """

    done: int
    total: int
    bytes: int
    rejected: int
    label: str = "packing"
    unit: str = "images"


def process_count(work: WorkerPlan, num_items: int, max_processes: int) -> int:
    """Return the number of processes for items, of which one process does one at a time."""
    return max(1, min(work.workers, num_items, max_processes))


def thread_count(work: WorkerPlan, processes: int, *, uses_s3: bool) -> int:
    """Return the number of threads in each of ``processes`` processes."""
    threads = max(1, work.workers // processes)
    return max(threads, S3_THREADS) if uses_s3 else threads


def visible_gpus() -> list[str]:
    """Return the GPUs that this process may use, as CUDA_VISIBLE_DEVICES names them.

    Without PyTorch there are none, nor without a driver: importing PyTorch takes seconds.
    """
    if not any(device.exists() for device in _DRIVERS):
        return []
    try:
        import torch
    except ImportError:
        return []
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    count = torch.cuda.device_count()
    return (visible.split(",") if visible else list(map(str, range(count))))[:count]


def run_tasks(
    task: Task[_Item],
    items: Iterable[_Item],
    processes: int,
    decoders: int,
    gpus: Sequence[str] = (),
) -> Generator[WorkProgress]:
    """Call ``task`` with each item in ``processes`` processes; yield their combined progress.

    Each process has ``decoders`` decoder processes of its own, so that an image that crashes its
    decoder costs only itself. With ``gpus``, each process sees one of them. An error in one process
    stops all of them; a task that is stopped must leave no partial result. Items are taken when a
    process needs one.
    """
    remaining = iter(items)
    queued = list(islice(remaining, processes))
    if not queued:
        return
    context = multiprocessing.get_context("spawn")  # a fork would copy locks that threads hold
    # A signal that ends this process while a child starts would make the child print a traceback.
    with record_signals() as raise_recorded:
        with block_signals(*_ENDING_SIGNALS):
            resource_tracker.ensure_running()  # unblocks the signals once it has started
        with block_signals(*_ENDING_SIGNALS):
            # Shared: done inputs, written bytes, rejected inputs.
            counters = context.Array("q", 3)
            stop, num_started = context.Event(), context.Value("i", 0)
            pool = ProcessPoolExecutor(
                processes,
                context,
                _init_worker,
                (counters, stop, num_started, decoders, gpus),
            )
            with _hidden_main_module():  # all processes start with the first task
                pending: set[Future[None]] = {pool.submit(_run_task, task, item) for item in queued}
            processes_by_id = dict(pool._processes)
        try:
            while True:
                # One item more than there are processes, so that none waits for the next.
                queued = list(islice(remaining, processes + 1 - len(pending)))
                with block_signals(*_ENDING_SIGNALS):
                    pending.update(pool.submit(_run_task, task, item) for item in queued)
                if not pending:
                    break
                finished, pending = wait(pending, _POLL_SECONDS, FIRST_COMPLETED)
                for future in finished:
                    future.result()
                raise_recorded()
                done, written, rejected = counters[:]
                yield WorkProgress(done, done, written, rejected)
        except BrokenProcessPool:
            raise WorkerKilledError(_how_ended(processes_by_id.values())) from None
        finally:
            stop.set()
            pool.shutdown(cancel_futures=True)


@contextmanager
def _hidden_main_module() -> Iterator[None]:
    """Start processes without the program's main module inside the context.

    A spawned process imports it otherwise, and a script without a main guard would do its work
    again in each of them. Tasks are functions of this package.
    """
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


def _how_ended(processes: Iterable[BaseProcess]) -> str:
    """Return how the worker process ended that broke the pool."""
    codes = []
    for process in processes:
        process.join(_POLL_SECONDS)
        codes.append(process.exitcode)
    # The pool then sends SIGTERM to the others.
    own = [code for code in codes if code not in (None, 0, -signal.SIGTERM)]
    if not own:
        return "a worker process ended without a result"
    [code, *_] = own
    if code is not None and code < 0:
        name = signal.Signals(-code).name
        hint = "; if memory ran out, try fewer --workers" if -code == signal.SIGKILL else ""
        return f"{name} ended a worker process{hint}"
    return f"a worker process ended with exit code {code}"


# What _init_worker received. A pool passes such objects only when it starts a process.
_counters: Any = None
_stop: Any = None
_decoders: Decoders = InProcessDecoders()


def _init_worker(
    counters: Any, stop: Any, num_started: Any, decoders: int, gpus: Sequence[str]
) -> None:
    global _counters, _stop, _decoders
    _counters, _stop = counters, stop
    _decoders = DecoderPool(decoders)  # before the first thread
    if gpus:
        with num_started.get_lock():
            worker = num_started.value
            num_started.value += 1
        # CUDA is not initialized yet, so this process sees only this GPU.
        os.environ["CUDA_VISIBLE_DEVICES"] = gpus[worker % len(gpus)]
    exit_with_parent()
    forward_to_parent(_ENDING_SIGNALS)


def _run_task(task: Task[_Item], item: _Item) -> None:
    task(item, _report_progress, _decoders)


def _report_progress(done: int, written: int, rejected: int) -> None:
    if _stop.is_set():
        raise StoppedError
    with _counters.get_lock():
        for index, amount in enumerate((done, written, rejected)):
            _counters[index] += amount
