"""Lists the shards of all channels that a stage mixes, as the reader of the run file needs them."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from sm_train.entrypoints.common.index_location import (
    find_index,
    index_channel,
    indexed_by,
    removal_addresses,
)
from sm_train.entrypoints.common.job_config import DataConfig
from sm_train.entrypoints.common.rng import Ints
from sm_train.entrypoints.common.sagemaker_paths import SageMakerPaths
from sm_train.entrypoints.data.shard_catalog import (
    AllGather,
    DataRank,
    ListedShards,
    ShardCatalog,
    build_catalog,
    mix_catalogs,
)
from sm_train.entrypoints.data.webdataset_reader import ShardStream, list_stream, mix_streams
from sm_train.entrypoints.removal.removed_samples import ShardNames, channel_removals


@dataclass(frozen=True)
class ShardChannel:
    """A channel of shards: its folder, its index and the condition of the samples to read.

    ``scans`` is where scans are written without an index. ``removals`` is the path or address of
    the list of removed samples, which may not exist.
    """

    name: str
    folder: Path
    index: Path | None
    where: str | None
    scans: Path
    removals: str | None = None


def job_channels(data: DataConfig, paths: SageMakerPaths) -> list[ShardChannel]:
    """Return the channels that a job trains on."""
    names = [source.channel for source in data.sources] or ["train"]
    return [
        job_channel(name, paths, where) for name, where in zip(names, data.conditions, strict=True)
    ]


def job_channel(name: str, paths: SageMakerPaths, where: str | None = None) -> ShardChannel:
    """Return one of a job's channels."""
    return ShardChannel(
        name,
        paths.channel(name),
        find_index(paths.channel(index_channel(name))),
        where,
        paths.base / "walk" / name,
        removal_addresses(os.environ).get(name),
    )


CatalogCheck = Callable[[ShardChannel, ShardCatalog], ShardCatalog]
"""Reports what was found in a channel, and returns the catalog to use."""


def list_channels(
    channels: Sequence[ShardChannel],
    data: DataConfig,
    rank: DataRank,
    all_gather: AllGather,
    check: CatalogCheck = lambda _channel, catalog: catalog,
) -> ShardCatalog | ShardStream:
    """List the shards of ``channels`` on all ranks, a collective call; several are a mixture.

    Raises:
        DataError: a node sees no shard or no sample, an index is damaged or does not match the
            shards, or a condition is invalid. Raised on all ranks if on any.
    """
    if data.reader == "webdataset":
        streams = []
        for channel in channels:
            index, where = channel.index, channel.where
            stream = list_stream(channel.folder, rank, all_gather, index, where)
            names = stream.all_names
            removals = channel_removals(channel.name, names, index, channel.removals)
            listed = _listed(channel, stream, names, None)
            streams.append(replace(stream, removals=removals, listed=(listed,)))
        return mix_streams(streams, data.sources)
    catalogs = [check(channel, list_channel(channel, rank, all_gather)) for channel in channels]
    return mix_catalogs(catalogs, data.sources)


def list_channel(channel: ShardChannel, rank: DataRank, all_gather: AllGather) -> ShardCatalog:
    """Build the catalog of one channel; see :func:`list_channels`."""
    index, where = channel.index, channel.where
    catalog = build_catalog(channel.folder, index, rank, all_gather, channel.scans, where)
    removals = channel_removals(channel.name, catalog.names, index, channel.removals)
    listed = _listed(channel, catalog, catalog.names, catalog.shard_sizes)
    return replace(catalog, removals=removals, listed=(listed,))


def _listed(
    channel: ShardChannel,
    found: ShardCatalog | ShardStream,
    names: ShardNames,
    sizes: Ints | None,
) -> ListedShards:
    # The index lies next to the list. Its path in the job is that of a downloaded copy.
    address = channel.removals and indexed_by(channel.removals)
    index = address or (None if channel.index is None else str(channel.index))
    covers, where = found.digest_covers, channel.where
    return ListedShards(channel.name, index, found.digest, covers, names, sizes, where)
