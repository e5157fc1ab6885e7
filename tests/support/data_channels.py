"""Builds data channels as the nodes of a job see them, and loaders that need no network."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from sm_train.entrypoints.data_loading.batches import Batch
from sm_train.entrypoints.data_loading.loader import Loader, open_loader
from sm_train.entrypoints.data_loading.shard_catalog import DataRank, ShardCatalog, build_catalog
from sm_train.entrypoints.data_prep.packing.describe_shard import describe_shard
from sm_train.entrypoints.job_interface.index_location import index_path
from sm_train.entrypoints.job_interface.job_config import DataConfig
from sm_train.entrypoints.shards.shard_format import find_shards
from sm_train.entrypoints.shards.shard_index import write_index

DATA_CONFIG = DataConfig(
    image_key="jpg;png",
    caption_key="txt",
    crop="center",
    decode="fast",
    icc_profile="srgb",
    hdr="reject",
    aspect_buckets=False,
    max_bad_fraction=0.01,
)


class ThreadGather:
    """An all-gather between threads, one for each rank."""

    def __init__(self, world_size: int) -> None:
        self._objects: list[Any] = [None] * world_size
        self._barrier = threading.Barrier(world_size, timeout=30)

    def all_gather(self, rank: int, obj: Any) -> list[Any]:
        """Contribute ``obj`` as ``rank`` and return the objects of all ranks."""
        self._objects[rank] = obj
        self._barrier.wait()
        gathered = list(self._objects)
        self._barrier.wait()  # nobody starts the next call before all have read this one
        return gathered


@dataclass
class Cluster:
    """Nodes that each see the shards of one folder and run ``local_world_size`` ranks."""

    channels: Sequence[Path]
    local_world_size: int
    scan_folder: Path
    index: Path | None = None
    where: str | None = None

    def build_catalogs(self) -> list[tuple[DataRank, ShardCatalog]]:
        """Return every rank and its catalog; raise the first error of any rank."""
        hosts = tuple(f"algo-{number + 1}" for number in range(len(self.channels)))
        ranks = [
            DataRank(hosts, node_rank, local_rank, self.local_world_size)
            for node_rank in range(len(hosts))
            for local_rank in range(self.local_world_size)
        ]
        gather = ThreadGather(len(ranks))
        results: list[ShardCatalog | BaseException] = [ValueError()] * len(ranks)

        def build(number: int, rank: DataRank) -> None:
            try:
                results[number] = build_catalog(
                    self.channels[rank.node_rank],
                    self.index,
                    rank,
                    partial(gather.all_gather, number),
                    self.scan_folder / str(rank.node_rank),
                    self.where,
                )
            except BaseException as error:
                results[number] = error

        threads = [threading.Thread(target=build, args=args) for args in enumerate(ranks)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        catalogs = []
        for result in results:
            if isinstance(result, BaseException):
                raise result
            catalogs.append(result)
        return list(zip(ranks, catalogs, strict=True))

    def loaders(self, config: DataConfig = DATA_CONFIG, **options: Any) -> list[Loader]:
        """Return the loader of every rank."""
        return self.open(self.build_catalogs(), config, **options)

    def open(
        self,
        catalogs: Sequence[tuple[DataRank, ShardCatalog]],
        config: DataConfig,
        **options: Any,
    ) -> list[Loader]:
        """Return the loader of every rank with its catalog."""
        defaults: dict[str, Any] = {
            "resolution": 8,
            "batch_size": 2,
            "seed": 0,
            "decode_workers": 0,
        }
        return [
            open_loader(catalog, rank, config, **(defaults | options)) for rank, catalog in catalogs
        ]


def distribute_shards(shards: Sequence[Path], num_nodes: int, folder: Path) -> list[Path]:
    """Return a channel for each node, with shards assigned round-robin as by ShardedByS3Key."""
    channels = [folder / f"algo-{number + 1}" for number in range(num_nodes)]
    for number, shard in enumerate(shards):
        channel = channels[number % num_nodes]
        channel.mkdir(parents=True, exist_ok=True)
        (channel / shard.name).symlink_to(shard)
    return channels


def write_folder_index(folder: Path) -> Path:
    """Write the index of a folder of shards, next to it."""
    path = index_path(folder)
    write_index(
        path,
        (describe_shard(tar, name).shard for name, tar in find_shards(folder).items()),
    )
    return path


def take_batches(loader: Loader, batches: int) -> list[Batch]:
    """Return the next ``batches`` batches."""
    stream = iter(loader)
    return [next(stream) for _ in range(batches)]


def rest_of_epoch(loader: Loader, limit: int | None = None) -> list[Batch]:
    """Return the batches left in the current epoch, at most ``limit``."""
    left = loader.epoch_size().steps - loader.position.step
    return take_batches(loader, left if limit is None else min(left, limit))


def caption_counts(batches: Sequence[Batch]) -> Counter[str]:
    """Return how often each caption is in ``batches``."""
    return Counter(caption for batch in batches for caption in batch.captions)
