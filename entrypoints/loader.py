"""A process's batches: read and decoded ahead in a process of its own, exact from any position on.

Beside the trainer runs one process that reads windows of raw samples and decodes them with
``workers`` threads: libjpeg-turbo, PyTorch's scaling and file reads all leave Python's lock. How
many threads there are changes how soon a batch is there, never what is in it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from multiprocessing import parent_process
from multiprocessing.connection import wait
from multiprocessing.synchronize import Semaphore
from threading import Thread

import torch
from sm_train.entrypoints.batches import Batch, Source
from sm_train.entrypoints.buckets import aspect_shapes
from sm_train.entrypoints.catalogue import Catalogue, DataError, Seat
from sm_train.entrypoints.course import Course, Position, Record
from sm_train.entrypoints.decode import Target
from sm_train.entrypoints.epochs import Balance
from sm_train.entrypoints.precomputed import Precomputed
from sm_train.entrypoints.reading import Shelf, at_once
from sm_train.entrypoints.settings import Data
from sm_train.entrypoints.sharding import World
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


@dataclass(frozen=True)
class _Failed:
    """What ended the loader's process, for the trainer to raise."""

    error: DataError


class _Stream(IterableDataset[Batch | _Failed]):
    """The source in a process of its own, held back to as many batches as the trainer lets."""

    def __init__(self, source: Source, threads: int, credit: Semaphore | None) -> None:
        super().__init__()
        self._source, self._threads, self._credit = source, threads, credit

    def __iter__(self) -> Iterator[Batch | _Failed]:
        with ExitStack() as stack:
            decode = read = at_once
            if self._threads:
                decode = stack.enter_context(ThreadPoolExecutor(self._threads)).submit
                read = stack.enter_context(ThreadPoolExecutor(READERS)).submit
            batches = self._source.batches(decode, read, ahead=1 if self._threads else 0)
            while True:
                if self._credit is not None:
                    self._credit.acquire()
                try:
                    yield next(batches)
                except DataError as error:
                    yield _Failed(error)
                    return


def _end_with_trainer(_: int) -> None:
    """Let the loader's process end when the trainer dies.

    PyTorch's own watch asks for the parent process, which here is the fork server, and that lives
    as long as its children do.
    """
    trainer = parent_process()
    assert trainer is not None

    def watch(sentinel: int) -> None:
        wait([sentinel])
        os._exit(1)

    Thread(target=watch, args=(trainer.sentinel,), daemon=True).start()


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
        pin_memory: bool = False,
    ) -> None:
        mean = max(1.0, catalogue.bytes / max(1, int(catalogue.samples.sum())))
        self.precomputed = Precomputed.of(catalogue.options, resolution)
        bucketed = data.aspect_buckets and self.precomputed is None
        shapes = aspect_shapes(resolution) if bucketed else ()
        world = World(
            catalogue.owner, len(seat.hosts), seat.processes, batch_size,
            window=max(1, round(WINDOW_BYTES / mean)), shapes=shapes,
        )  # fmt: skip
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
        self._source = Source(self.course, shelf, data, targets, self.precomputed)
        self._workers, self._pin_memory = workers, pin_memory
        self.depth = FIRST_DEPTH
        most = _DEPTH_BYTES // (batch_size * resolution * resolution * 3)
        self._most = max(FIRST_DEPTH, min(MOST_DEPTH, most))

    def __iter__(self) -> Iterator[Batch]:
        context = torch.multiprocessing.get_context("forkserver")
        credit = context.Semaphore(self.depth) if self._workers else None
        loader: DataLoader[Batch | _Failed] = DataLoader(
            _Stream(self._source, self._workers, credit),
            batch_size=None,
            num_workers=min(1, self._workers),
            prefetch_factor=MOST_DEPTH if self._workers else None,
            pin_memory=self._pin_memory,
            # Forked children of a process with running threads can deadlock; spawned ones end
            # like a program, which aborts when a thread of theirs is still inside PyTorch.
            multiprocessing_context=context if self._workers else None,
            worker_init_fn=_end_with_trainer if self._workers else None,
        )
        try:
            yield from self._watched(iter(loader), credit)
        finally:
            if credit is not None:
                # Its process may be waiting to go on, and would be waited for when it ends.
                for _ in range(MOST_DEPTH):
                    credit.release()

    def _watched(
        self, batches: Iterator[Batch | _Failed], credit: Semaphore | None
    ) -> Iterator[Batch]:
        """Hand batches over, and let more be made ahead where they are waited for."""
        first = True
        while True:
            started = time.perf_counter()
            batch = next(batches)
            if isinstance(batch, _Failed):
                raise batch.error
            if credit is not None:
                credit.release()
                # The first batch is always waited for.
                if not first and time.perf_counter() - started > _WAITED:
                    self._deepen(credit)
            first = False
            self.position = batch.position
            yield batch

    def _deepen(self, credit: Semaphore) -> None:
        if self.depth < self._most:
            self.depth += 1
            credit.release()

    @property
    def epoch(self) -> int:
        return self.position.epoch

    def balance(self) -> Balance:
        """How the epoch under way comes out."""
        return self.course.balance(self.position.epoch)

    def record(self) -> bytes:
        """The run's place in its data, for a checkpoint: the same for all processes."""
        return self.course.after(self.position).to_bytes()
