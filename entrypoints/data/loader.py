"""A process's batches: read and decoded ahead in a process of its own, exact from any position on.

Beside the trainer runs one process that reads windows of raw samples and decodes them with
``workers`` threads: libjpeg-turbo, PyTorch's scaling and file reads all leave Python's lock. How
many threads there are changes how soon a batch is there, never what is in it.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import count
from multiprocessing.queues import SimpleQueue
from multiprocessing.synchronize import Semaphore
from weakref import WeakValueDictionary

import torch
from sm_train.entrypoints.common.job_config import DataConfig
from sm_train.entrypoints.common.parent_death import exit_with_parent
from sm_train.entrypoints.common.sample_rng import SampleRng
from sm_train.entrypoints.data.aspect_buckets import aspect_shapes
from sm_train.entrypoints.data.batches import Batch, BatchPipeline, Tokenize
from sm_train.entrypoints.data.buffer_pool import (
    BufferHandle,
    LocalBufferPool,
    SharedBufferClient,
    SharedBufferPool,
)
from sm_train.entrypoints.data.epoch import EpochSize
from sm_train.entrypoints.data.image_decoder import DecodeSpec
from sm_train.entrypoints.data.partition import DataTopology
from sm_train.entrypoints.data.precomputed_latents import PrecomputedLatents
from sm_train.entrypoints.data.sampler import DataPosition, Sampler, SamplerState
from sm_train.entrypoints.data.shard_catalog import DataError, DataRank, ShardCatalog
from sm_train.entrypoints.data.shard_reader import ShardReader, run_inline
from torch.utils.data import DataLoader, IterableDataset

READ_BYTES = 8 * 2**20
"""Read at once: the size of request at which S3 is quickest (8-16 MB by AWS's guide, "Performance
Design Patterns for Amazon S3")."""

SHUFFLE_BLOCK_BYTES = 256 * 2**20
"""Mixed at a time by each process; another window is read meanwhile."""

READ_THREADS = 4
"""Chunks that a process reads at the same time, to hide a request's first-byte latency."""

FIRST_DEPTH, MAX_DEPTH = 2, 16
"""Batches made ahead: at the start, and when the trainer was seen to wait for them."""

_DEPTH_BYTES = 2**30
_WAITED = 0.002  # seconds: less is the hand-over itself
_NOTHING = torch.empty(0)
_numbers = count()


@dataclass(frozen=True)
class _Failed:
    """What ended the loader's process, for the trainer to raise."""

    error: DataError


@dataclass(frozen=True)
class _SharedBatch:
    """A batch on its way to the trainer: without its tensors, which stay where they are."""

    batch: Batch
    loan: BufferHandle
    link: int

    def open(self) -> Batch:
        return self.batch.with_tensors(*_links[self.link].open(self.loan))

    def pin_memory(self) -> Batch:
        """Called by the DataLoader, in a thread of the trainer."""
        return self.open().pin_memory()


_links: WeakValueDictionary[int, SharedBufferClient] = WeakValueDictionary()
"""The trainer's sides of its loaders' processes."""


@dataclass(frozen=True)
class _Link:
    """What leads from the trainer to the loader's process.

    ``credit`` holds that one back to as many batches as the trainer lets.
    """

    number: int
    credit: Semaphore
    returned: SimpleQueue[int]


class _BatchStream(IterableDataset[Batch | _SharedBatch | _Failed]):
    """The source; decodes by ``threads`` in a process of its own if there is a ``link`` to it."""

    def __init__(self, source: BatchPipeline, threads: int, link: _Link | None) -> None:
        super().__init__()
        self._source, self._threads, self._link = source, threads, link

    def __iter__(self) -> Iterator[Batch | _SharedBatch | _Failed]:
        with ThreadPoolExecutor(READ_THREADS) as readers:
            try:
                if self._link is None:
                    memory = LocalBufferPool(self._source.batch_bytes)
                    yield from self._source.batches(
                        run_inline, readers.submit, memory.allocate, ahead=0
                    )
                else:
                    yield from self._lent(self._link, readers)
            except DataError as error:
                yield _Failed(error)

    def _lent(self, link: _Link, readers: Executor) -> Iterator[_SharedBatch]:
        lender = SharedBufferPool(link.returned, self._source.batch_bytes)
        with ThreadPoolExecutor(self._threads) as decoders:
            batches = self._source.batches(
                decoders.submit, readers.submit, lender.allocate, ahead=1
            )
            while True:
                link.credit.acquire()
                batch = next(batches)
                yield _SharedBatch(
                    batch.with_tensors(_NOTHING), lender.handle(batch.tensors), link.number
                )


def _end_with_trainer(_: int) -> None:
    """PyTorch's own watch asks for the parent process, which here is the fork server.

    That lives as long as its children do.
    """
    exit_with_parent()


class Loader:
    """A process's batches from where ``record`` left off, and the record to go on from.

    ``note`` says what a person should know of a record that was written by another world;
    ``depth`` is how many batches are made ahead.
    """

    def __init__(
        self,
        catalog: ShardCatalog,
        rank: DataRank,
        data: DataConfig,
        *,
        resolution: int,
        batch_size: int,
        seed: int,
        decode_workers: int,
        state: bytes | None = None,
        rng: SampleRng | None = None,
        tokenize: Tokenize | None = None,
        pin_memory: bool = False,
    ) -> None:
        mean = max(1.0, catalog.total_bytes / max(1, int(catalog.shard_sizes.sum())))
        self.precomputed = PrecomputedLatents.from_options(catalog.options, resolution)
        bucketed = data.aspect_buckets and self.precomputed is None
        shapes = aspect_shapes(resolution) if bucketed else ()
        world = DataTopology(
            catalog.owner,
            len(rank.hosts),
            rank.local_world_size,
            batch_size,
            shuffle_block_size=max(1, round(SHUFFLE_BLOCK_BYTES / mean)),
            shapes=shapes,
        )
        chunk = max(1, round(READ_BYTES / mean))
        self.resume_warning: str | None = None
        start = SamplerState(catalog.digest, seed, chunk, DataPosition(), world)
        if state is not None:
            written = SamplerState.from_bytes(state)
            start, self.resume_warning = written.resume(catalog.digest, seed, chunk, world)
        self.sampler = Sampler(
            catalog.shard_sizes, start, rank.node_rank, rank.local_rank, catalog.shapes
        )
        self.position = start.position
        targets = tuple(
            DecodeSpec(height, width, data.crop, data.interpolation, seed)
            for height, width in shapes or ((resolution, resolution),)
        )
        shelf = ShardReader(catalog.paths, catalog.offsets)
        self._source = BatchPipeline(
            self.sampler,
            shelf,
            data,
            batch_size,
            targets,
            rng or SampleRng(seed),
            self.precomputed,
            tokenize,
        )
        self._workers, self._pin_memory = decode_workers, pin_memory
        self.prefetch_depth = FIRST_DEPTH
        most = _DEPTH_BYTES // (batch_size * resolution * resolution * 3)
        self._most = max(FIRST_DEPTH, min(MAX_DEPTH, most))

    def __iter__(self) -> Iterator[Batch]:
        if not self._workers:
            yield from self._watched(iter(self._data_loader(None)), None)
            return
        context = torch.multiprocessing.get_context("forkserver")
        link = _Link(next(_numbers), context.Semaphore(self.prefetch_depth), context.SimpleQueue())
        borrower = _links[link.number] = SharedBufferClient(link.returned)
        try:
            yield from self._watched(iter(self._data_loader(link)), (link, borrower))
        finally:
            # Its process may be waiting to go on, and would be waited for when it ends.
            for _ in range(MAX_DEPTH):
                link.credit.release()

    def _data_loader(self, link: _Link | None) -> DataLoader[Batch | _SharedBatch | _Failed]:
        return DataLoader(
            _BatchStream(self._source, self._workers, link),
            batch_size=None,
            num_workers=1 if link else 0,
            prefetch_factor=MAX_DEPTH if link else None,
            pin_memory=self._pin_memory,
            # Forked children of a process with running threads can deadlock; spawned ones end
            # like a program, which aborts when a thread of theirs is still inside PyTorch.
            multiprocessing_context="forkserver" if link else None,
            worker_init_fn=_end_with_trainer if link else None,
        )

    def _watched(
        self,
        batches: Iterator[Batch | _SharedBatch | _Failed],
        process: tuple[_Link, SharedBufferClient] | None,
    ) -> Iterator[Batch]:
        """Hand batches over, and let more be made ahead where they are waited for."""
        first = True
        while True:
            if process is not None:
                process[1].release_unused()
            started = time.perf_counter()
            batch = next(batches)
            if isinstance(batch, _Failed):
                raise batch.error
            if process is not None:
                credit = process[0].credit
                credit.release()
                # The first batch is always waited for.
                if not first and time.perf_counter() - started > _WAITED:
                    self._increase_prefetch(credit)
            if isinstance(batch, _SharedBatch):
                batch = batch.open()
            first = False
            self.position = batch.position
            yield batch

    def _increase_prefetch(self, credit: Semaphore) -> None:
        if self.prefetch_depth < self._most:
            self.prefetch_depth += 1
            credit.release()

    def sample_names(self, origins: Iterable[tuple[int, int]]) -> list[str]:
        """Samples by shard and key; reads them again."""
        return [self._source.sample_name(*origin) for origin in origins]

    @property
    def epoch(self) -> int:
        return self.position.epoch

    def epoch_size(self) -> EpochSize:
        """How the epoch under way comes out."""
        return self.sampler.epoch_size(self.position.epoch)

    def state_bytes(self) -> bytes:
        """The run's place in its data, for a checkpoint: the same for all processes."""
        return self.sampler.state_at(self.position).to_bytes()
