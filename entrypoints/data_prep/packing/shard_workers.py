"""Builds shards in worker processes, on CPUs or with one process for each GPU."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Sequence
from functools import partial
from itertools import islice

from sm_train.entrypoints.data_prep.packing.plan import ShardPlan
from sm_train.entrypoints.data_prep.packing.shard_builder import InputReader, build_shard
from sm_train.entrypoints.data_prep.work.worker_pool import (
    ProgressCallback,
    WorkerPlan,
    WorkProgress,
    process_count,
    run_tasks,
    thread_count,
    visible_gpus,
)
from sm_train.entrypoints.images.decoder_pool import Decoders
from sm_train.entrypoints.shards.shard_index import RejectedInput
from sm_train.entrypoints.storage.aws_session import is_aborted_upload
from sm_train.entrypoints.storage.storage import S3Prefix, Storage
from sm_train.entrypoints.storage.store import S3Access

ShardTask = tuple[ShardPlan, dict[int, RejectedInput]]
"""A shard to build, and its inputs to leave out by number."""


def build_in_parallel(
    shards: Iterable[ShardTask], work: WorkerPlan, plans: Sequence[ShardPlan]
) -> Generator[WorkProgress]:
    """Build ``shards``, which are some of ``plans``; yield the progress now and then.

    Raises:
        OSError: the destination cannot be written, or the disk is full.
        WorkerKilledError: a worker process was killed.
    """
    gpus = visible_gpus() if plans and plans[0].options.latents is not None else []
    processes, threads = split_cores(plans, work, max_processes=len(gpus) or work.workers)
    task = partial(_build_shard, work.destination, work.access, threads)
    yield from run_tasks(task, shards, processes, work.decoders(processes), gpus)


def split_cores(
    plans: Sequence[ShardPlan], work: WorkerPlan, *, max_processes: int
) -> tuple[int, int]:
    """Return the number of processes and the number of threads in each."""
    processes = process_count(work, len(plans), max_processes)
    uses_s3 = isinstance(work.destination, S3Prefix) or any(
        item.address.startswith("s3://") for plan in plans[:1] for item in islice(plan.inputs, 1)
    )
    return processes, thread_count(work, processes, uses_s3=uses_s3)


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
