"""Lists shards in a folder or S3."""

ENTRANCES = ("shard_listing",)
"""Modules through which other wings enter."""
