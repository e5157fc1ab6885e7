"""Lists the shards of all channels that a stage mixes, as the reader of the run file needs them."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from sm_train.entrypoints.base.rng import Ints
from sm_train.entrypoints.base.sagemaker_paths import SageMakerPaths
from sm_train.entrypoints.data_loading.indexed_shards import named_shards, select_from
from sm_train.entrypoints.data_loading.sampler import SamplerState
from sm_train.entrypoints.data_loading.shard_catalog import (
    AllGather,
    DataRank,
    ListedShards,
    ShardCatalog,
    build_catalog,
    catalog_before_removals,
    digests_of_parts,
    mix_catalogs,
    names_of,
)
from sm_train.entrypoints.data_loading.webdataset_reader import (
    ShardStream,
    is_stream_state,
    list_stream,
    mix_streams,
)
from sm_train.entrypoints.job_interface.index_location import (
    find_index,
    index_channel,
    indexed_by,
    removal_addresses,
    removal_list,
    replaced_index,
)
from sm_train.entrypoints.job_interface.job_config import DataConfig
from sm_train.entrypoints.sample_metadata.row_filter import ConditionError
from sm_train.entrypoints.shards.removal_list import RemovalListError
from sm_train.entrypoints.shards.removed_samples import ShardNames, channel_removals, read_list_file
from sm_train.entrypoints.shards.shard_format import ShardError
from sm_train.entrypoints.shards.shard_index import ShardIndex


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


def as_of_checkpoint(
    shards: ShardCatalog | ShardStream,
    channels: Sequence[ShardChannel],
    data: DataConfig,
    state: bytes | None,
    all_gather: AllGather,
) -> ShardCatalog | ShardStream:
    """Return the shards with which a run continues the epoch of a checkpoint; a collective call.

    ``state`` is the reader's position in it. If samples were removed since, these are the shards of
    before, in which the removed samples lie nowhere: the epoch continues, and others take their
    places.
    """
    if state is None or not isinstance(shards, ShardCatalog) or is_stream_state(state):
        return shards
    wanted = digests_of_parts(SamplerState.from_bytes(state).digest)
    present = shards.parts or (shards,)
    if len(wanted) != len(present):
        return shards
    try:
        found = [
            catalog if catalog.digest == digest else _earlier(catalog, channel, digest)
            for catalog, channel, digest in zip(present, channels, wanted, strict=True)
        ]
    except (OSError, ShardError, ConditionError, RemovalListError):
        found = list(present)  # the epoch restarts, which is no reason to end the job
    # The ranks must read the same data.
    gathered = all_gather([catalog.digest for catalog in found])
    if any(digests != gathered[0] for digests in gathered):
        found = list(present)
    return mix_catalogs(found, data.sources)


def _earlier(catalog: ShardCatalog, channel: ShardChannel, digest: str) -> ShardCatalog:
    """Return the catalog with this digest, as of before removals; ``catalog`` if there was none."""
    if channel.index is None:
        return catalog
    removals = read_list_file(Path(removal_list(str(channel.index))))
    replaced = Path(replaced_index(str(channel.index)))
    if not removals.history or not replaced.exists():
        return catalog
    sources = [
        select_from(ShardIndex(path), channel.where, may_be_empty=True)
        for path in (channel.index, replaced)
    ]
    [listed], [listed_removals] = catalog.listed, catalog.removals
    for names in removals.earlier_names(names_of(catalog)):
        shards = named_shards(sources, names)
        if shards is None or shards.digest != digest:
            continue
        removed = int(shards.sizes.sum() - catalog.shard_sizes.sum())
        if 2 * removed > int(shards.sizes.sum()):
            return catalog  # too few are left to take the places of the others
        note = (
            f"{channel.name}: samples removed since the checkpoint: {removed:,} "
            f"({listed_removals.address or listed_removals.file}); the epoch continues, and others "
            "take their places"
        )
        return replace(
            catalog_before_removals(catalog, shards, removals.successors, channel.folder),
            listed=(replace(listed, digest=digest, names=shards.names, sizes=shards.sizes),),
            removals=(replace(listed_removals, names=shards.names),),
            resume_note=note,
        )
    return catalog


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
