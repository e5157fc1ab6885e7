"""Loads a rank's batches: read and decoded ahead of the trainer.

One process runs next to the trainer. Its reader gets raw samples. ``decode_workers``
other processes decode them, so an image that crashes its decoder costs one sample
(:mod:`~sm_train.entrypoints.images.decoder_pool`). Their number changes how soon a batch is ready,
never what is in it.

Batches stay in shared memory (:mod:`~sm_train.entrypoints.images.buffer_pool`). The trainer limits
how many are made ahead through a semaphore, and raises the limit when it has to wait.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import count
from multiprocessing import forkserver, resource_tracker
from multiprocessing.queues import SimpleQueue
from multiprocessing.synchronize import Semaphore
from typing import Any
from weakref import WeakValueDictionary

import torch
from sm_train.entrypoints.base.signals import (
    block_signals,
    exit_at_sigterm_of_parent,
    exit_with_parent,
)
from sm_train.entrypoints.data_loading.batches import (
    BadSampleTracker,
    Batch,
    BatchPipeline,
    Reader,
    Tokenize,
)
from sm_train.entrypoints.data_loading.indexed_reader import IndexedReader
from sm_train.entrypoints.data_loading.precomputed_latents import PrecomputedLatents
from sm_train.entrypoints.data_loading.sample_ranges import aspect_shapes
from sm_train.entrypoints.data_loading.sampler import EpochSize
from sm_train.entrypoints.data_loading.shard_catalog import DataRank, ShardCatalog
from sm_train.entrypoints.data_loading.webdataset_reader import (
    ShardStream,
    WebDatasetReader,
    is_stream_state,
)
from sm_train.entrypoints.images.buffer_pool import (
    BufferHandle,
    LocalBufferPool,
    SharedBufferClient,
    SharedBufferPool,
)
from sm_train.entrypoints.images.decoder_pool import DecoderPool
from sm_train.entrypoints.images.image_decoder import DecodeSpec
from sm_train.entrypoints.job_interface.job_config import ColorPolicy, DataConfig
from sm_train.entrypoints.sample_metadata.color_counts import latents_problem, recorded_color
from sm_train.entrypoints.sample_metadata.sample_rng import SampleRng
from sm_train.entrypoints.shards.removed_samples import RemovalNotice, RemovedSamples
from sm_train.entrypoints.shards.shard_format import DataError
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

READ_THREADS = 16
"""Ranges that a rank reads at the same time, to hide the first-byte latency of requests.

With 30 ms for each request of 128 KB, a thread reads 4 MB/s, which is some 20 images/s.
"""

FIRST_DEPTH, MAX_DEPTH = 2, 16
"""Batches made ahead: at the start, and at most once the trainer has waited for some."""

_PREFETCH_BYTES = 2**30
"""Bound on the memory of the batches made ahead."""

_WAIT_SECONDS = 0.002
"""Longer waits for a batch raise the prefetch depth; shorter ones are the hand-over itself."""

_OWN_DECODE_THREADS = 2
"""Threads that decode in the trainer's process, which waits meanwhile: PyTorch scales one image
while libjpeg-turbo decodes the next."""

BadSampleReport = Callable[[str, dict[str, int], int], None]
"""Takes a message about bad samples, their number by reason, and the number of all samples."""

Warn = Callable[[str, str], None]
"""Takes the code of an event and a message."""

_EMPTY = torch.empty(0)
_link_ids = count()


@dataclass(frozen=True)
class _Failure:
    """The error that ended the loader's process, for the trainer to raise."""

    error: DataError


@dataclass(frozen=True)
class _SharedBatch:
    """A batch on its way to the trainer, without its tensors, which stay in shared memory."""

    batch: Batch
    handle: BufferHandle
    link_id: int

    def open(self) -> Batch:
        """Return the batch with its tensors; called in the trainer's process."""
        return self.batch.with_tensors(*_clients[self.link_id].open(self.handle))

    def pin_memory(self) -> Batch:
        """Called by the DataLoader, in a thread of the trainer's process."""
        return self.open().pin_memory()


_clients: WeakValueDictionary[int, SharedBufferClient] = WeakValueDictionary()
"""The trainer's ends of its loaders' buffers by link id.

A global, because the DataLoader's pinning thread has nothing but the batch to find them by.
"""


@dataclass(frozen=True)
class _Link:
    """What connects the trainer with the loader's process.

    ``credit`` is the number of batches that the loader may still make ahead. ``returned`` carries
    the ids of buffers that may be filled again.
    """

    link_id: int
    credit: Semaphore
    returned: SimpleQueue[int]


class _BatchStream(IterableDataset[Batch | _SharedBatch | _Failure]):
    """The DataLoader's data set: the pipeline's batches, already batched.

    With a ``link`` it runs in the loader's process and decodes in ``decode_workers`` processes;
    without one it runs in the trainer's process and decodes each batch when it is requested, in
    two threads.
    """

    def __init__(self, pipeline: BatchPipeline, decode_workers: int, link: _Link | None) -> None:
        super().__init__()
        self._pipeline, self._decode_workers, self._link = pipeline, decode_workers, link

    def start_decoders(self) -> None:
        """Decode in ``decode_workers`` processes; called before this process has any thread."""
        pool = DecoderPool(self._decode_workers)
        self._pipeline = replace(self._pipeline, decoders=pool)

    def __iter__(self) -> Iterator[Batch | _SharedBatch | _Failure]:
        failure: DataError | None = None
        with ThreadPoolExecutor(READ_THREADS) as readers:
            try:
                if self._link is None:
                    yield from self._local_batches(readers)
                else:
                    yield from self._shared_batches(self._link, readers)
            except DataError as error:
                failure = error
        if failure is not None:
            yield _Failure(failure)

    def _local_batches(self, readers: Executor) -> Iterator[Batch]:
        pool = LocalBufferPool(self._pipeline.batch_bytes)
        with ThreadPoolExecutor(_OWN_DECODE_THREADS) as decoders:
            yield from self._pipeline.batches(
                decoders.submit, readers.submit, pool.allocate, ahead=0
            )

    def _shared_batches(self, link: _Link, readers: Executor) -> Iterator[_SharedBatch]:
        pool = SharedBufferPool(link.returned, self._pipeline.batch_bytes)
        with ThreadPoolExecutor(self._decode_workers) as decoders:
            batches = self._pipeline.batches(
                decoders.submit, readers.submit, pool.allocate, ahead=1
            )
            while True:
                link.credit.acquire()
                batch = next(batches)
                handle = pool.handle(batch.tensors)
                yield _SharedBatch(batch.with_tensors(_EMPTY), handle, link.link_id)


def _start_process(_: int) -> None:
    """Start the decoders of the loader's process, and let it end when the trainer dies.

    PyTorch's own watchdog checks the parent process, which here is the fork server: that lives as
    long as its children do.
    """
    worker = get_worker_info()
    assert worker is not None
    assert isinstance(worker.dataset, _BatchStream)
    worker.dataset.start_decoders()
    # multiprocessing sends it to the processes that are left when a program ends.
    exit_at_sigterm_of_parent()
    exit_with_parent()


def start_fork_server() -> None:
    """Start the process that forks the loader's process, which imports what that one needs.

    Its imports take seconds of CPU time, and run while the trainer builds the model. Where it does
    not find the bundle's modules, the loader's process imports them.
    """
    torch.multiprocessing.set_forkserver_preload(["torch.utils.data", __name__])
    resource_tracker.ensure_running()  # unblocks signals when it starts
    # Slurm sends SIGTERM to all processes, of which the trainer handles it.
    with block_signals(signal.SIGTERM):
        forkserver.ensure_running()


def open_loader(
    shards: ShardCatalog | ShardStream,
    rank: DataRank,
    config: DataConfig,
    *,
    resolution: int,
    batch_size: int,
    seed: int,
    decode_workers: int,
    gradient_accumulation_steps: int | None = None,
    state: bytes | None = None,
    rng: SampleRng | None = None,
    tokenize: Tokenize | None = None,
    pin_memory: bool = False,
    report: BadSampleReport | None = None,
    warn: Warn | None = None,
) -> Loader:
    """Plan the reading of ``shards`` and return the loader; nothing is read yet.

    ``batch_size`` is of this rank. With ``gradient_accumulation_steps`` the order is global if
    all nodes see all shards: the same samples form the batch of an optimizer step whatever the
    number of ranks; else ``order_note`` of the reader says why not. Without ``decode_workers`` (0)
    everything runs in this process. ``state`` is what :meth:`Loader.state_bytes` returned.
    ``report`` is called with bad samples: at the first, and whenever their number has doubled.
    ``warn`` is called at the beginning of an epoch if samples are removed, or if that is unknown.

    Raises:
        DataError: the configuration does not fit the shards, or ``state`` is of another reader.
    """
    precomputed = PrecomputedLatents.from_options(shards.options, resolution)
    if precomputed is not None and (config.flip or config.caption or config.extras):
        key = "flip" if config.flip else "caption" if config.caption else "extras"
        raise DataError(
            f"data.{key}: the shards hold latents of {resolution} px, of the image as it is "
            "and of one caption; pack the shards without latents, or leave the key out"
        )
    if precomputed is not None:
        _require_color(shards.options["latents"], config.color, resolution)
    bucketed = config.aspect_buckets and precomputed is None
    shapes = aspect_shapes(resolution) if bucketed else ()
    if state is not None and isinstance(shards, ShardCatalog) and is_stream_state(state):
        raise DataError(
            "data.reader: the checkpoint was written with `webdataset`; set it again, or give the "
            "run another name"
        )
    reader: Reader
    if isinstance(shards, ShardStream):
        reader = WebDatasetReader(
            shards, rank, config, batch_size=batch_size, seed=seed, state=state
        )
    else:
        reader = IndexedReader(
            shards,
            rank,
            batch_size=batch_size,
            shapes=shapes,
            seed=seed,
            gradient_accumulation_steps=gradient_accumulation_steps,
            state=state,
        )
    decode_specs = tuple(
        DecodeSpec(
            height,
            width,
            config.crop,
            seed,
            config.decode,
            config.color,
        )
        for height, width in shapes or ((resolution, resolution),)
    )
    pipeline = BatchPipeline(
        reader,
        config,
        batch_size,
        decode_specs,
        rng or SampleRng(seed),
        precomputed,
        tokenize,
        removed=RemovedSamples(shards.removals),
    )
    if decode_workers:
        start_fork_server()
    affordable = _PREFETCH_BYTES // (batch_size * resolution * resolution * 3)
    max_depth = max(FIRST_DEPTH, min(MAX_DEPTH, affordable))
    bad_samples = BadSampleTracker(config.max_bad_fraction)
    is_first_rank = rank.node_rank == rank.local_rank == 0
    return Loader(
        pipeline,
        decode_workers,
        max_depth,
        bad_samples,
        report,
        warn if is_first_rank else None,
        pin_memory=pin_memory,
    )


class Loader:
    """Yields a rank's batches without end, starting where the reader's state left off.

    ``position`` is that of the last batch yielded. ``prefetch_depth`` is the number of batches
    made ahead, which grows up to ``max_depth``. ``bad_samples`` counts the samples of the yielded
    batches that could not be used. ``removals`` are the newest notices of channels with removed
    samples.

    Raises:
        DataError: while it iterates, if more samples are bad than ``data.max_bad_fraction`` allows.
    """

    def __init__(
        self,
        pipeline: BatchPipeline,
        decode_workers: int,
        max_depth: int,
        bad_samples: BadSampleTracker,
        report: BadSampleReport | None,
        warn: Warn | None,
        *,
        pin_memory: bool,
    ) -> None:
        self.bad_samples, self._report, self._warn = bad_samples, report, warn
        self._pipeline, self._decode_workers = pipeline, decode_workers
        self.removals: dict[str, RemovalNotice] = {}
        self._max_depth, self._pin_memory = max_depth, pin_memory
        self.reader = pipeline.reader
        self.precomputed = pipeline.precomputed
        self.position = self.reader.position
        self.prefetch_depth = FIRST_DEPTH

    def __iter__(self) -> Iterator[Batch]:
        if not self._decode_workers:
            yield from self._received(iter(self._data_loader(None)), None)
            return
        context = torch.multiprocessing.get_context("forkserver")
        link = _Link(next(_link_ids), context.Semaphore(self.prefetch_depth), context.SimpleQueue())
        client = _clients[link.link_id] = SharedBufferClient(link.returned)
        # Kept until this function has ended: when it is freed, it waits for the loader's process,
        # which may be waiting for credit.
        batches = iter(self._data_loader(link))
        try:
            yield from self._received(batches, (link, client))
        finally:
            for _ in range(MAX_DEPTH):
                link.credit.release()

    def _data_loader(self, link: _Link | None) -> DataLoader[Batch | _SharedBatch | _Failure]:
        return DataLoader(
            _BatchStream(self._pipeline, self._decode_workers, link),
            batch_size=None,
            num_workers=1 if link else 0,
            # The DataLoader may request as many as it likes; the credit decides.
            prefetch_factor=MAX_DEPTH if link else None,
            pin_memory=self._pin_memory,
            # Forked children of a process with running threads can deadlock; spawned ones end
            # like a program, which aborts if one of their threads is still inside PyTorch.
            multiprocessing_context="forkserver" if link else None,
            worker_init_fn=_start_process if link else None,
            # An iterator draws a number; from the default generator, a resumed loop with dropout
            # would not continue bit for bit.
            generator=torch.Generator(),
        )

    def _received(
        self,
        batches: Iterator[Batch | _SharedBatch | _Failure],
        process: tuple[_Link, SharedBufferClient] | None,
    ) -> Iterator[Batch]:
        """Yield the batches as they arrive; raise the prefetch depth if one had to be waited for.

        Raises:
            DataError: the loader's process ended with it.
        """
        is_first = True
        while True:
            if process is not None:
                process[1].release_unused()
            started = time.perf_counter()
            batch = next(batches)
            if isinstance(batch, _Failure):
                raise batch.error
            if process is not None:
                credit = process[0].credit
                credit.release()  # the loader may make another one in its place
                # The first batch always has to be waited for.
                if not is_first and time.perf_counter() - started > _WAIT_SECONDS:
                    self._increase_prefetch(credit)
            if isinstance(batch, _SharedBatch):  # not opened yet, because it was not pinned
                batch = batch.open()
            is_first = False
            for notice in batch.removals:
                self.removals[notice.channel] = notice
                if self._warn is not None:
                    self._warn(notice.code, notice.message)
            self.bad_samples.add(batch)
            if self.bad_samples.report_is_due:
                self.report_bad_samples()
            self.position = batch.position
            yield batch

    def report_bad_samples(self) -> None:
        """Report the bad samples since the last report, if there are any."""
        if self._report is not None and (found := self.bad_samples.report()) is not None:
            message, reasons = found
            self._report(message, reasons, self.bad_samples.num_seen)

    def _increase_prefetch(self, credit: Semaphore) -> None:
        if self.prefetch_depth < self._max_depth:
            self.prefetch_depth += 1
            credit.release()

    @property
    def epoch(self) -> int:
        """The current epoch, from 0."""
        return self.position.epoch

    def removed_samples(self) -> dict[str, int | None]:
        """Return how many removed samples the present epoch skips of each channel.

        None if its list could not be read. A channel that has no place for a list is missing.
        """
        found: dict[str, int | None] = {
            channel.channel: 0 for channel in self._pipeline.removed.channels
        }
        for notice in self.removals.values():
            found[notice.channel] = None if notice.problem is not None else notice.samples
        return found

    def epoch_size(self) -> EpochSize:
        """Return the size of the current epoch."""
        return self.reader.epoch_size(self.position.epoch)

    def state_bytes(self) -> bytes:
        """Return the run's position in its data for a checkpoint; equal on all ranks."""
        return self.reader.state_at(self.position)


def _require_color(latents: Mapping[str, Any], policy: ColorPolicy, resolution: int) -> None:
    problem = latents_problem(recorded_color(latents), policy, resolution)
    if problem is not None:
        raise DataError(f"data.icc_profile: {'; '.join(problem)}")
