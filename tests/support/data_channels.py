"""Channels of shards as instances see them, and loaders that meet without a network."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sm_train.entrypoints.common.index_location import index_path
from sm_train.entrypoints.common.job_config import DataConfig
from sm_train.entrypoints.data.batches import Batch
from sm_train.entrypoints.data.loader import Loader
from sm_train.entrypoints.data.shard_catalog import DataRank, ShardCatalog, build_catalog
from sm_train.entrypoints.data.shard_format import find_shards
from sm_train.entrypoints.data.shard_index import write_index
from sm_train.entrypoints.packing.describe_shard import describe_shard

DATA = DataConfig(
    image_key="jpg;png",
    caption_key="txt",
    crop="center",
    interpolation="bicubic",
    aspect_buckets=False,
    max_bad_fraction=0.01,
)


class Meeting:
    """Exchanges objects between threads that stand for processes."""

    def __init__(self, parties: int) -> None:
        self._said: list[Any] = [None] * parties
        self._barrier = threading.Barrier(parties, timeout=30)

    def exchange(self, place: int, said: Any) -> list[Any]:
        self._said[place] = said
        self._barrier.wait()
        everyones = list(self._said)
        self._barrier.wait()
        return everyones


@dataclass
class Cluster:
    """Instances that each see the shards of one folder; all run ``processes``."""

    channels: Sequence[Path]
    processes: int
    notes: Path
    index: Path | None = None

    def surveys(self) -> list[tuple[DataRank, ShardCatalog]]:
        """Every process's place and catalogue; the first error of any is raised."""
        hosts = tuple(f"algo-{number + 1}" for number in range(len(self.channels)))
        seats = [
            DataRank(hosts, instance, process, self.processes)
            for instance in range(len(hosts))
            for process in range(self.processes)
        ]
        meeting = Meeting(len(seats))
        found: list[ShardCatalog | BaseException] = [ValueError()] * len(seats)

        def look(place: int) -> None:
            seat = seats[place]
            try:
                found[place] = build_catalog(
                    self.channels[seat.node_rank],
                    self.index,
                    seat,
                    lambda said: meeting.exchange(place, said),
                    self.notes / str(seat.node_rank),
                )
            except BaseException as error:
                found[place] = error

        threads = [threading.Thread(target=look, args=(place,)) for place in range(len(seats))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        catalogues = []
        for one in found:
            if isinstance(one, BaseException):
                raise one
            catalogues.append(one)
        return list(zip(seats, catalogues, strict=True))

    def loaders(self, **changes: Any) -> list[Loader]:
        options: dict[str, Any] = {
            "data": DATA,
            "resolution": 8,
            "batch_size": 2,
            "seed": 0,
            "decode_workers": 0,
        } | changes
        data = options.pop("data")
        return [Loader(catalogue, seat, data, **options) for seat, catalogue in self.surveys()]


def deal(shards: Sequence[Path], instances: int, folder: Path) -> list[Path]:
    """A channel for each instance, as ShardedByS3Key deals objects: round and round."""
    channels = [folder / f"algo-{number + 1}" for number in range(instances)]
    for number, shard in enumerate(shards):
        channel = channels[number % instances]
        channel.mkdir(parents=True, exist_ok=True)
        (channel / shard.name).symlink_to(shard)
    return channels


def index(folder: Path) -> Path:
    """Make the index of a folder of shards, beside it."""
    path = index_path(folder)
    write_index(
        path, (describe_shard(tar, name).shard for name, tar in find_shards(folder).items())
    )
    return path


def first(loader: Loader, batches: int) -> list[Batch]:
    stream = iter(loader)
    return [next(stream) for _ in range(batches)]


def epoch_of(loader: Loader, batches: int | None = None) -> list[Batch]:
    """What is left of the epoch under way, or the first ``batches`` of it."""
    left = loader.epoch_size().steps - loader.position.step
    return first(loader, left if batches is None else min(left, batches))


def seen(batches: Sequence[Batch]) -> Counter[str]:
    return Counter(caption for batch in batches for caption in batch.captions)
