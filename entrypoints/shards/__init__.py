"""Shards and their index: format, reader, writer, selection and removed samples."""

ENTRANCES = (
    "removal_list",
    "removed_samples",
    "selection",
    "shard_format",
    "shard_index",
    "shard_verification",
    "shard_writer",
    "tar_reader",
)
"""Modules through which other wings enter."""
