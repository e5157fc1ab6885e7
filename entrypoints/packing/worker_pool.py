"""Processes that make shards, each with threads of its own, and how far they are together."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from sm_train.entrypoints.common.parent_death import exit_with_parent
from sm_train.entrypoints.common.signals import record_signals
from sm_train.entrypoints.data.shard_index import RejectedInput
from sm_train.entrypoints.packing.plan import ShardPlan
from sm_train.entrypoints.packing.shard_builder import ProgressCallback, StoppedError, build_shard
from sm_train.entrypoints.packing.storage import S3Access, S3Prefix, Storage

S3_THREADS = 16
"""Inputs that a process reads at the same time from or to S3, to hide its latency."""

_LOOK = 0.2  # seconds between two looks at how far they are


class WorkerKilledError(RuntimeError):
    """A process that packs was killed, perhaps for its memory."""


@dataclass(frozen=True)
class WorkerPlan:
    """Where shards are made, and by how many workers."""

    destination: Storage
    access: S3Access
    workers: int


@dataclass(frozen=True)
class PackProgress:
    """How far a run is; ``bytes`` counts the accepted samples as they stand in the shards."""

    done: int
    total: int
    bytes: int
    rejected: int


def run_workers(
    plans: Sequence[ShardPlan], work: WorkerPlan, dropped: Mapping[int, RejectedInput]
) -> Iterator[PackProgress]:
    """Make the shards of ``plans``; yields now and then how far that is.

    Raises:
        OSError: the destination cannot be written, or the disk is full.
        WorkerKilledError: a process was killed.
    """
    gpus = _gpus() if plans and plans[0].options.latents is not None else []
    processes, threads = split_cores(plans, work, at_most=len(gpus) or work.workers)
    task = partial(_make, work.destination, work.access, threads)
    yield from run(task, [(plan, _of_plan(plan, dropped)) for plan in plans], processes, gpus)


def split_cores(plans: Sequence[ShardPlan], work: WorkerPlan, *, at_most: int) -> tuple[int, int]:
    """Processes, ``at_most`` so many, and the threads of each."""
    processes = max(1, min(work.workers, len(plans), at_most))
    threads = work.workers // processes
    if isinstance(work.destination, S3Prefix) or any(
        one.address.startswith("s3://") for plan in plans[:1] for one in plan.inputs[:1]
    ):
        threads = max(threads, S3_THREADS)
    return processes, threads


def _gpus() -> list[str]:
    """The GPUs that this process may use, as CUDA_VISIBLE_DEVICES names them."""
    import torch

    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    count = torch.cuda.device_count()
    return (named.split(",") if named else list(map(str, range(count))))[:count]


def _of_plan(plan: ShardPlan, dropped: Mapping[int, RejectedInput]) -> dict[int, RejectedInput]:
    return {one.number: dropped[one.number] for one in plan.inputs if one.number in dropped}


def _make(
    destination: Storage,
    access: S3Access,
    threads: int,
    what: tuple[ShardPlan, dict[int, RejectedInput]],
    tell: ProgressCallback,
) -> None:
    plan, dropped = what
    build_shard(plan, destination, access, threads, tell, dropped)


def run(
    task: Callable[[Any, ProgressCallback], None],
    items: Sequence[Any],
    processes: int,
    gpus: Sequence[str] = (),
) -> Iterator[PackProgress]:
    """Call ``task`` with each item, in ``processes`` processes; yields how far they are.

    Each process sees one of the ``gpus``, if there are any. An error of one ends all; whatever they
    have not finished they leave as if it was never begun.
    """
    if not items:
        return
    context = multiprocessing.get_context("spawn")  # a fork would copy this one's threads' locks
    # A child that is being started when a signal ends this process would say so at length.
    with record_signals() as raise_noted:
        with _deaf_children():
            counters, stop, begun = context.Array("q", 3), context.Event(), context.Value("i", 0)
            pool = ProcessPoolExecutor(processes, context, _begin, (counters, stop, begun, gpus))
            pending: set[Future[None]] = {pool.submit(_run, task, item) for item in items}
        try:
            while pending:
                finished, pending = wait(pending, _LOOK, FIRST_EXCEPTION)
                for one in finished:
                    one.result()
                raise_noted()
                done, written, rejected = counters[:]
                yield PackProgress(done, done, written, rejected)
        except BrokenProcessPool:
            raise WorkerKilledError from None
        finally:
            stop.set()
            pool.shutdown(cancel_futures=True)


_counters: Any = None
_stop: Any = None


def _begin(counters: Any, stop: Any, begun: Any, gpus: Sequence[str]) -> None:
    global _counters, _stop
    _counters, _stop = counters, stop
    if gpus:
        with begun.get_lock():
            number = begun.value
            begun.value += 1
        # Before CUDA is begun: then this process knows of no other.
        os.environ["CUDA_VISIBLE_DEVICES"] = gpus[number % len(gpus)]
    exit_with_parent()


def _run(task: Callable[[Any, ProgressCallback], None], item: Any) -> None:
    task(item, _tell)


def _tell(done: int, written: int, rejected: int) -> None:
    if _stop.is_set():
        raise StoppedError
    with _counters.get_lock():
        for place, amount in enumerate((done, written, rejected)):
            _counters[place] += amount


@contextmanager
def _deaf_children() -> Iterator[None]:
    """Whatever process is started in here does not hear Ctrl-C and hang-up.

    A terminal sends both to the whole group, and only the parent shall answer.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGHUP})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
