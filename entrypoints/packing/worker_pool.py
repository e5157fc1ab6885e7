"""Runs tasks in worker processes with threads, and reports their combined progress."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from functools import partial
from itertools import islice
from multiprocessing import resource_tracker
from typing import Any, TypeVar

from sm_train.entrypoints.common.parent_death import exit_with_parent
from sm_train.entrypoints.common.signals import block_signals, record_signals
from sm_train.entrypoints.data.shard_index import RejectedInput
from sm_train.entrypoints.images.decoder_pool import DecoderPool, Decoders, InProcessDecoders
from sm_train.entrypoints.object_store.s3_errors import is_aborted_upload
from sm_train.entrypoints.object_store.store import S3Access
from sm_train.entrypoints.packing.plan import ShardPlan
from sm_train.entrypoints.packing.shard_builder import (
    InputReader,
    ProgressCallback,
    StoppedError,
    build_shard,
)
from sm_train.entrypoints.packing.storage import S3Prefix, Storage

S3_THREADS = 16
"""Minimum number of threads in a process that reads from or writes to S3, to hide its latency."""

_POLL_SECONDS = 0.2
"""Interval between two progress reports."""

_TERMINAL_SIGNALS = (signal.SIGINT, signal.SIGHUP)
"""What a terminal sends to the whole process group, and only the parent handles."""

_Item = TypeVar("_Item")

Task = Callable[[_Item, ProgressCallback, Decoders], None]
"""What a worker process does with an item."""


class WorkerKilledError(RuntimeError):
    """A worker process was killed, perhaps because it ran out of memory."""


@dataclass(frozen=True)
class WorkerPlan:
    """Where shards are written, and the number of workers that build them."""

    destination: Storage
    access: S3Access
    workers: int

    def decoders(self, processes: int) -> int:
        """Return the number of decoders of each of ``processes`` worker processes."""
        return max(1, self.workers // processes)


@dataclass(frozen=True)
class PackProgress:
    """Progress in inputs; ``bytes`` is the size of the accepted samples in the shards.

    ``label`` names the pass over the inputs: with deduplication there are two.
    """

    done: int
    total: int
    bytes: int
    rejected: int
    label: str = "packing"


ShardTask = tuple[ShardPlan, dict[int, RejectedInput]]
"""A shard to build, and its inputs to leave out by number."""


def build_in_parallel(
    shards: Iterable[ShardTask], work: WorkerPlan, plans: Sequence[ShardPlan]
) -> Generator[PackProgress]:
    """Build ``shards``, which are some of ``plans``; yield the progress now and then.

    Raises:
        OSError: the destination cannot be written, or the disk is full.
        WorkerKilledError: a worker process was killed.
    """
    gpus = _visible_gpus() if plans and plans[0].options.latents is not None else []
    processes, threads = split_cores(plans, work, max_processes=len(gpus) or work.workers)
    task = partial(_build_shard, work.destination, work.access, threads)
    yield from run_tasks(task, shards, processes, work.decoders(processes), gpus)


def split_cores(
    plans: Sequence[ShardPlan], work: WorkerPlan, *, max_processes: int
) -> tuple[int, int]:
    """Return the number of processes and the number of threads in each."""
    processes = max(1, min(work.workers, len(plans), max_processes))
    threads = work.workers // processes
    if isinstance(work.destination, S3Prefix) or any(
        item.address.startswith("s3://") for plan in plans[:1] for item in islice(plan.inputs, 1)
    ):
        threads = max(threads, S3_THREADS)
    return processes, threads


def _visible_gpus() -> list[str]:
    """Return the GPUs that this process may use, as CUDA_VISIBLE_DEVICES names them."""
    import torch

    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    count = torch.cuda.device_count()
    return (visible.split(",") if visible else list(map(str, range(count))))[:count]


def _build_shard(
    destination: Storage,
    access: S3Access,
    threads: int,
    item: ShardTask,
    on_progress: ProgressCallback,
    decoders: Decoders,
) -> None:
    plan, dropped = item
    reader = InputReader(access, decoders)
    try:
        build_shard(plan, destination, reader, threads, on_progress, dropped)
    except Exception as error:
        # Another node took the shard over from this one, which was paused.
        if not is_aborted_upload(error):
            raise


def run_tasks(
    task: Task[_Item],
    items: Iterable[_Item],
    processes: int,
    decoders: int,
    gpus: Sequence[str] = (),
) -> Generator[PackProgress]:
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
        with block_signals(*_TERMINAL_SIGNALS):
            resource_tracker.ensure_running()  # unblocks the signals once it has started
        with block_signals(*_TERMINAL_SIGNALS):
            # Shared: done inputs, written bytes, rejected inputs.
            counters = context.Array("q", 3)
            stop, num_started = context.Event(), context.Value("i", 0)
            pool = ProcessPoolExecutor(
                processes,
                context,
                _init_worker,
                (counters, stop, num_started, decoders, gpus),
            )
            pending: set[Future[None]] = {pool.submit(_run_task, task, item) for item in queued}
        try:
            while True:
                # One item more than there are processes, so that none waits for the next.
                queued = list(islice(remaining, processes + 1 - len(pending)))
                with block_signals(*_TERMINAL_SIGNALS):
                    pending.update(pool.submit(_run_task, task, item) for item in queued)
                if not pending:
                    break
                finished, pending = wait(pending, _POLL_SECONDS, FIRST_COMPLETED)
                for future in finished:
                    future.result()
                raise_recorded()
                done, written, rejected = counters[:]
                yield PackProgress(done, done, written, rejected)
        except BrokenProcessPool:
            raise WorkerKilledError from None
        finally:
            stop.set()
            pool.shutdown(cancel_futures=True)


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


def _run_task(task: Task[_Item], item: _Item) -> None:
    task(item, _report_progress, _decoders)


def _report_progress(done: int, written: int, rejected: int) -> None:
    if _stop.is_set():
        raise StoppedError
    with _counters.get_lock():
        for index, amount in enumerate((done, written, rejected)):
            _counters[index] += amount
