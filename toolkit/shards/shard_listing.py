"""Lists the shards of a data set in a local folder or below an S3 prefix."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from sm_train.entrypoints.shards.shard_format import SUFFIX, ListedShard, find_shards
from sm_train.entrypoints.storage.store import ObjectStore
from sm_train.toolkit.aws.s3 import split_uri

COMPRESSED_SUFFIXES = (".tar.gz", ".tgz")
"""Names of compressed shards, in which no sample can be found by its offset."""


@dataclass(frozen=True)
class ShardListing:
    """The objects below a prefix: ``shards``, and ``others`` that are not shards.

    ``truncated`` if the listing ended at its limit.
    """

    shards: tuple[ListedShard, ...]
    others: tuple[str, ...]
    truncated: bool


def list_folder(folder: Path) -> list[ListedShard]:
    """Return every shard in a folder, sorted by name."""
    found = [(name, path.stat()) for name, path in sorted(find_shards(folder).items())]
    return [ListedShard(name, status.st_size, str(status.st_mtime_ns)) for name, status in found]


def list_compressed(folder: Path) -> list[str]:
    """Return the names of the compressed shards in a folder, sorted."""
    return sorted(
        path.relative_to(folder).as_posix()
        for suffix in COMPRESSED_SUFFIXES
        for path in folder.rglob(f"*{suffix}")
    )


def list_prefix(
    store: ObjectStore,
    uri: str,
    *,
    limit: int | None = None,
    progress: Callable[[int], None] = lambda count: None,
) -> ShardListing:
    """List what a data channel of the folder ``uri``, with its slash, would contain, in one request
    for each 1,000 objects.

    If the prefix is the key of an object, and no folder, that object is listed. The listing ends at
    the first page that reaches ``limit`` objects. ``progress`` is called with the number of objects
    so far.

    Raises:
        ClientError: S3 rejects a request.
    """
    bucket, prefix = split_uri(uri)
    shards: list[ListedShard] = []
    others: list[str] = []
    count, truncated = 0, False
    for page in store.pages(bucket, prefix):
        for stored in page.objects:
            key = stored.key
            if key.endswith(SUFFIX):
                shards.append(ListedShard(key.removeprefix(prefix), stored.bytes, stored.etag))
            elif stored.bytes or not key.endswith("/"):  # not a folder marker of the S3 console
                others.append(key)
        count += len(page.objects)
        progress(count)
        if limit is not None and count >= limit:
            truncated = page.has_more
            break
    if not count and prefix:
        # S3 lists keys in order, so an object named exactly like the prefix comes first.
        key = prefix.rstrip("/")
        first = store.first(bucket, key)
        others += [first.key] if first is not None and first.key == key else []
    return ShardListing(
        tuple(sorted(shards, key=lambda shard: shard.name)), tuple(others), truncated
    )
