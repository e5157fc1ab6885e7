"""What a rank reads, and in which order: catalog, sampler, batches."""

ENTRANCES = (
    "batches",
    "indexed_shards",
    "loader",
    "sample_ranges",
    "sampler",
    "shard_catalog",
    "shard_channels",
    "webdataset_reader",
)
"""Modules through which other wings enter."""
