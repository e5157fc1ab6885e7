"""Shards to batches: this instance's tars, split among its processes, in a known order.

Every instance lists what its data channel shows and splits that, and nothing else, among its own
processes and their loader workers: with ``ShardedByS3Key`` each instance already has a part of
its own, and a split by global rank would lose data in silence. Instances exchange nothing while
they read. A reader's order is a pure function of (seed, epoch, reader), and its position is two
integers, so a resumed run goes on with the very next sample.
"""

from __future__ import annotations

import io
import os
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing import parent_process
from multiprocessing.connection import wait
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import torch
from PIL import Image
from sm_train.entrypoints.settings import Data
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, get_worker_info
from webdataset.filters import _shuffle
from webdataset.tariterators import tarfile_samples

SHUFFLE_SAMPLES = 1000
"""Raw samples that a reader mixes; they are held in memory, undecoded."""


class DataError(RuntimeError):
    """The shards cannot be trained on; the message is one line."""


@dataclass(frozen=True)
class Position:
    """How far a reader has come: raw samples taken from its order of ``epoch``, bad ones too."""

    epoch: int = 0
    taken: int = 0


@dataclass(frozen=True)
class Bad:
    """A sample, or the rest of a shard, that was skipped."""

    shard: str
    key: str
    reason: str


@dataclass(frozen=True)
class Batch:
    """``pixels`` is uint8 (B, 3, H, W); ``position`` is its reader's, after this batch."""

    pixels: Tensor
    captions: list[str]
    reader: int
    position: Position
    bad: tuple[Bad, ...]

    def pin_memory(self) -> Batch:
        return Batch(self.pixels.pin_memory(), self.captions, self.reader, self.position, self.bad)


@dataclass(frozen=True)
class Share:
    """What one reader reads: whole shards, or every ``stride``-th sample of all of them."""

    shards: tuple[Path, ...]
    offset: int = 0
    stride: int = 1


def find_shards(channel: Path) -> tuple[Path, ...]:
    """The tars that this instance sees, in a fixed order."""
    return tuple(sorted(channel.rglob("*.tar")))


def share(shards: tuple[Path, ...], reader: int, readers: int, *, seed: int, epoch: int) -> Share:
    """The part of ``reader`` among the instance's ``readers``, in this epoch's order.

    With at least as many shards as readers each reads its own; with fewer, all read all shards
    and each takes its own samples, so that none is lost and none is seen twice.
    """
    order = list(shards)
    random.Random(f"{seed}/{epoch}").shuffle(order)
    if len(order) >= readers:
        return Share(tuple(order[reader::readers]))
    return Share(tuple(order), offset=reader, stride=readers)


def to_pixels(content: bytes, resolution: int) -> Tensor:
    """Decode an image, cut its middle square, scale it: uint8 (3, resolution, resolution)."""
    with Image.open(io.BytesIO(content)) as image:
        rgb = image.convert("RGB")
    side = min(rgb.size)
    left, top = (rgb.width - side) // 2, (rgb.height - side) // 2
    square = rgb.resize(
        (resolution, resolution),
        Image.Resampling.BICUBIC,
        box=(left, top, left + side, top + side),
    )
    return torch.from_numpy(np.asarray(square).copy()).permute(2, 0, 1)


class ShardReader(IterableDataset[Batch]):
    """An endless stream of one process's batches; each loader worker is a reader of its own."""

    def __init__(
        self,
        shards: tuple[Path, ...],
        data: Data,
        *,
        resolution: int,
        batch_size: int,
        seed: int,
        local_rank: int,
        local_processes: int,
        workers: int,
        positions: dict[int, Position],
        next_reader: int,
    ) -> None:
        super().__init__()
        self._shards, self._data = shards, data
        self._resolution, self._batch_size, self._seed = resolution, batch_size, seed
        self._local_rank, self._local_processes = local_rank, local_processes
        self._readers = max(1, workers)
        self._positions, self._next_reader = positions, next_reader

    def __iter__(self) -> Iterator[Batch]:
        info = get_worker_info()
        # The loader asks its workers in turn, from the first: after a resume the first is the
        # reader whose batch comes next.
        reader = ((info.id if info else 0) + self._next_reader) % self._readers
        return self._batches(reader, self._positions.get(reader, Position()))

    def _batches(self, reader: int, position: Position) -> Iterator[Batch]:
        images: list[Tensor] = []
        captions: list[str] = []
        bad: list[Bad] = []
        while True:
            before = len(images)
            for sample in self._raw(reader, position, bad.append):
                position = Position(position.epoch, position.taken + 1)
                try:
                    image, caption = self._decode(sample)
                except Exception as error:
                    # Decoders raise more than they document: Pillow a SyntaxError for some PNGs.
                    bad.append(_bad(sample, error))
                    continue
                images.append(image)
                captions.append(caption)
                if len(images) == self._batch_size:
                    yield Batch(torch.stack(images), captions, reader, position, tuple(bad))
                    images, captions = [], []
                    # The same list: the reader of the tars goes on adding to it.
                    bad.clear()
                    before = -1
            if len(images) == before:
                names = ", ".join(path.name for path in self._shards[:3])
                raise DataError(f"no sample that can be used in a whole pass over {names} …")
            position = Position(position.epoch + 1)

    def _raw(
        self, reader: int, position: Position, report: Callable[[Bad], None]
    ) -> Iterator[dict[str, Any]]:
        """The undecoded samples of one epoch from ``position`` on, shuffled."""
        global_reader = self._local_rank * self._readers + reader
        mine = share(
            self._shards,
            global_reader,
            self._local_processes * self._readers,
            seed=self._seed,
            epoch=position.epoch,
        )

        def handler(error: Exception) -> bool:
            shard = next((str(part) for part in error.args if str(part).endswith(".tar")), "?")
            report(Bad(Path(shard).name, "", f"{type(error).__name__}: {error.args[0]}"))
            return True

        urls = ({"url": str(path)} for path in mine.shards)
        samples = tarfile_samples(urls, handler=handler)
        own = (
            sample for number, sample in enumerate(samples)
            if number % mine.stride == mine.offset % mine.stride
        )  # fmt: skip
        rng = random.Random(f"{self._seed}/{position.epoch}/{global_reader}")
        shuffled = _shuffle(own, SHUFFLE_SAMPLES, initial=SHUFFLE_SAMPLES, rng=rng)
        for number, sample in enumerate(shuffled):
            if number >= position.taken:
                yield sample

    def _decode(self, sample: dict[str, Any]) -> tuple[Tensor, str]:
        keys = self._data.image_key.split(";")
        content = next((sample[key] for key in keys if key in sample), None)
        if content is None:
            raise ValueError(f"no image ({self._data.image_key})")
        if self._data.caption_key not in sample:
            raise ValueError(f"no caption ({self._data.caption_key})")
        caption = sample[self._data.caption_key].decode("utf-8")
        return to_pixels(content, self._resolution), caption


def _bad(sample: dict[str, Any], error: Exception) -> Bad:
    shard = Path(str(sample.get("__url__", "?"))).name
    return Bad(shard, str(sample.get("__key__", "?")), f"{type(error).__name__}: {error}")


def _end_with_trainer(_: int) -> None:
    """Let this loader worker end when the trainer dies.

    PyTorch's own watch asks for the parent process, which here is the fork server, and that lives
    as long as its workers do.
    """
    trainer = parent_process()
    assert trainer is not None

    def watch(sentinel: int) -> None:
        wait([sentinel])
        os._exit(1)

    Thread(target=watch, args=(trainer.sentinel,), daemon=True).start()


class Loader:
    """A process's batches, and the positions to go on from."""

    def __init__(
        self,
        shards: tuple[Path, ...],
        data: Data,
        *,
        resolution: int,
        batch_size: int,
        seed: int,
        local_rank: int,
        local_processes: int,
        workers: int,
        state: dict[str, Any] | None = None,
        pin_memory: bool = False,
    ) -> None:
        self._readers = max(1, workers)
        self._positions: dict[int, Position] = {}
        self._next = 0
        if state is not None:
            self._restore(state)
        reader = ShardReader(
            shards,
            data,
            resolution=resolution,
            batch_size=batch_size,
            seed=seed,
            local_rank=local_rank,
            local_processes=local_processes,
            workers=workers,
            positions=dict(self._positions),
            next_reader=self._next,
        )
        self._loader: DataLoader[Batch] = DataLoader(
            reader,
            batch_size=None,
            num_workers=workers,
            pin_memory=pin_memory,
            # Forked workers of a process with running threads can deadlock; spawned ones end like
            # a program, which aborts when a thread of theirs is still inside PyTorch.
            multiprocessing_context="forkserver" if workers else None,
            worker_init_fn=_end_with_trainer if workers else None,
            persistent_workers=False,
        )

    def __iter__(self) -> Iterator[Batch]:
        for batch in self._loader:
            self._positions[batch.reader] = batch.position
            self._next = (batch.reader + 1) % self._readers
            yield batch

    @property
    def epoch(self) -> int:
        """The epoch of the reader that is furthest behind."""
        epochs = [position.epoch for position in self._positions.values()]
        return min(epochs, default=0)

    def state(self) -> dict[str, Any]:
        """The position: a few integers."""
        return {
            "readers": self._readers,
            "next": self._next,
            "positions": {
                str(reader): [position.epoch, position.taken]
                for reader, position in self._positions.items()
            },
        }

    def _restore(self, state: dict[str, Any]) -> None:
        positions = {int(key): Position(*value) for key, value in state["positions"].items()}
        if state["readers"] == self._readers:
            self._positions, self._next = positions, int(state["next"])
            return
        # Another number of readers splits the data anew: go on from the last epoch's start.
        epoch = min((position.epoch for position in positions.values()), default=0)
        self._positions = {reader: Position(epoch) for reader in range(self._readers)}


class BadSamples:
    """Counts what was skipped and decides when it is too much."""

    SHARE, AT_LEAST = 0.01, 10

    def __init__(self) -> None:
        self.bad = 0
        self.good = 0
        self._shards: set[str] = set()

    def add(self, batch: Batch) -> None:
        """Count a batch.

        Raises:
            DataError: more than 1 % (and more than 10) of the samples were bad.
        """
        self.good += len(batch.captions)
        self.bad += len(batch.bad)
        self._shards.update(bad.shard for bad in batch.bad)
        if self.bad > self.AT_LEAST and self.bad > self.SHARE * (self.good + self.bad):
            names = ", ".join(sorted(self._shards)[:5])
            raise DataError(
                f"{self.bad} of {self.good + self.bad} samples cannot be used, in {names}; "
                "pack these shards again"
            )
