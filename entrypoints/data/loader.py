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
from sm_train.entrypoints.common.job_config import Data
from sm_train.entrypoints.common.parent_death import end_with_parent
from sm_train.entrypoints.common.sample_rng import Draws
from sm_train.entrypoints.data.aspect_buckets import aspect_shapes
from sm_train.entrypoints.data.batches import Batch, Source, Tokenize
from sm_train.entrypoints.data.buffer_pool import Borrower, Lender, Loan, OwnMemory
from sm_train.entrypoints.data.epoch import Balance
from sm_train.entrypoints.data.image_decoder import Target
from sm_train.entrypoints.data.partition import World
from sm_train.entrypoints.data.precomputed_latents import Precomputed
from sm_train.entrypoints.data.sampler import Course, Position, Record
from sm_train.entrypoints.data.shard_catalog import Catalogue, DataError, Seat
from sm_train.entrypoints.data.shard_reader import Shelf, at_once
from torch.utils.data import DataLoader, IterableDataset

CHUNK_BYTES = 8 * 2**20
"""Read at once: the size of request at which S3 is quickest (8-16 MB by AWS's guide, "Performance
Design Patterns for Amazon S3")."""

WINDOW_BYTES = 256 * 2**20
"""Mixed at a time by each process; another window is read meanwhile."""

READERS = 4
"""Chunks that a process reads at the same time, to hide a request's first-byte latency."""

FIRST_DEPTH, MOST_DEPTH = 2, 16
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
class _Lent:
    """A batch on its way to the trainer: without its tensors, which stay where they are."""

    batch: Batch
    loan: Loan
    link: int

    def open(self) -> Batch:
        return self.batch.with_tensors(*_links[self.link].open(self.loan))

    def pin_memory(self) -> Batch:
        """Called by the DataLoader, in a thread of the trainer."""
        return self.open().pin_memory()


_links: WeakValueDictionary[int, Borrower] = WeakValueDictionary()
"""The trainer's sides of its loaders' processes."""


@dataclass(frozen=True)
class _Link:
    """What leads from the trainer to the loader's process.

    ``credit`` holds that one back to as many batches as the trainer lets.
    """

    number: int
    credit: Semaphore
    returned: SimpleQueue[int]


class _Stream(IterableDataset[Batch | _Lent | _Failed]):
    """The source; decodes by ``threads`` in a process of its own if there is a ``link`` to it."""

    def __init__(self, source: Source, threads: int, link: _Link | None) -> None:
        super().__init__()
        self._source, self._threads, self._link = source, threads, link

    def __iter__(self) -> Iterator[Batch | _Lent | _Failed]:
        with ThreadPoolExecutor(READERS) as readers:
            try:
                if self._link is None:
                    memory = OwnMemory(self._source.batch_bytes)
                    yield from self._source.batches(at_once, readers.submit, memory.lend, ahead=0)
                else:
                    yield from self._lent(self._link, readers)
            except DataError as error:
                yield _Failed(error)

    def _lent(self, link: _Link, readers: Executor) -> Iterator[_Lent]:
        lender = Lender(link.returned, self._source.batch_bytes)
        with ThreadPoolExecutor(self._threads) as decoders:
            batches = self._source.batches(decoders.submit, readers.submit, lender.lend, ahead=1)
            while True:
                link.credit.acquire()
                batch = next(batches)
                yield _Lent(batch.with_tensors(_NOTHING), lender.loan(batch.tensors), link.number)


def _end_with_trainer(_: int) -> None:
    """PyTorch's own watch asks for the parent process, which here is the fork server.

    That lives as long as its children do.
    """
    end_with_parent()


class Loader:
    """A process's batches from where ``record`` left off, and the record to go on from.

    ``note`` says what a person should know of a record that was written by another world;
    ``depth`` is how many batches are made ahead.
    """

    def __init__(
        self,
        catalogue: Catalogue,
        seat: Seat,
        data: Data,
        *,
        resolution: int,
        batch_size: int,
        seed: int,
        workers: int,
        record: bytes | None = None,
        draws: Draws | None = None,
        tokenize: Tokenize | None = None,
        pin_memory: bool = False,
    ) -> None:
        mean = max(1.0, catalogue.bytes / max(1, int(catalogue.samples.sum())))
        self.precomputed = Precomputed.of(catalogue.options, resolution)
        bucketed = data.aspect_buckets and self.precomputed is None
        shapes = aspect_shapes(resolution) if bucketed else ()
        world = World(
            catalogue.owner,
            len(seat.hosts),
            seat.processes,
            batch_size,
            window=max(1, round(WINDOW_BYTES / mean)),
            shapes=shapes,
        )
        chunk = max(1, round(CHUNK_BYTES / mean))
        self.note: str | None = None
        start = Record(catalogue.digest, seed, chunk, Position(), world)
        if record is not None:
            written = Record.from_bytes(record)
            start, self.note = written.go_on(catalogue.digest, seed, chunk, world)
        self.course = Course(
            catalogue.samples, start, seat.instance, seat.process, catalogue.shapes
        )
        self.position = start.position
        targets = tuple(
            Target(height, width, data.crop, data.interpolation, seed)
            for height, width in shapes or ((resolution, resolution),)
        )
        shelf = Shelf(catalogue.paths, catalogue.ranges)
        self._source = Source(
            self.course,
            shelf,
            data,
            batch_size,
            targets,
            draws or Draws(seed),
            self.precomputed,
            tokenize,
        )
        self._workers, self._pin_memory = workers, pin_memory
        self.depth = FIRST_DEPTH
        most = _DEPTH_BYTES // (batch_size * resolution * resolution * 3)
        self._most = max(FIRST_DEPTH, min(MOST_DEPTH, most))

    def __iter__(self) -> Iterator[Batch]:
        if not self._workers:
            yield from self._watched(iter(self._data_loader(None)), None)
            return
        context = torch.multiprocessing.get_context("forkserver")
        link = _Link(next(_numbers), context.Semaphore(self.depth), context.SimpleQueue())
        borrower = _links[link.number] = Borrower(link.returned)
        try:
            yield from self._watched(iter(self._data_loader(link)), (link, borrower))
        finally:
            # Its process may be waiting to go on, and would be waited for when it ends.
            for _ in range(MOST_DEPTH):
                link.credit.release()

    def _data_loader(self, link: _Link | None) -> DataLoader[Batch | _Lent | _Failed]:
        return DataLoader(
            _Stream(self._source, self._workers, link),
            batch_size=None,
            num_workers=1 if link else 0,
            prefetch_factor=MOST_DEPTH if link else None,
            pin_memory=self._pin_memory,
            # Forked children of a process with running threads can deadlock; spawned ones end
            # like a program, which aborts when a thread of theirs is still inside PyTorch.
            multiprocessing_context="forkserver" if link else None,
            worker_init_fn=_end_with_trainer if link else None,
        )

    def _watched(
        self,
        batches: Iterator[Batch | _Lent | _Failed],
        process: tuple[_Link, Borrower] | None,
    ) -> Iterator[Batch]:
        """Hand batches over, and let more be made ahead where they are waited for."""
        first = True
        while True:
            if process is not None:
                process[1].give_back()
            started = time.perf_counter()
            batch = next(batches)
            if isinstance(batch, _Failed):
                raise batch.error
            if process is not None:
                credit = process[0].credit
                credit.release()
                # The first batch is always waited for.
                if not first and time.perf_counter() - started > _WAITED:
                    self._deepen(credit)
            if isinstance(batch, _Lent):
                batch = batch.open()
            first = False
            self.position = batch.position
            yield batch

    def _deepen(self, credit: Semaphore) -> None:
        if self.depth < self._most:
            self.depth += 1
            credit.release()

    def names(self, origins: Iterable[tuple[int, int]]) -> list[str]:
        """Samples by shard and key; reads them again."""
        return [self._source.name(*origin) for origin in origins]

    @property
    def epoch(self) -> int:
        return self.position.epoch

    def balance(self) -> Balance:
        """How the epoch under way comes out."""
        return self.course.balance(self.position.epoch)

    def record(self) -> bytes:
        """The run's place in its data, for a checkpoint: the same for all processes."""
        return self.course.after(self.position).to_bytes()
