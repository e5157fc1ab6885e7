"""The shards of a data set as they are listed: in a folder, or below an S3 prefix."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sm_train.entrypoints.data.shard_format import SUFFIX, find_shards
from sm_train.toolkit.aws.session import split_uri

PAGE_OBJECTS = 1000
"""S3 lists no more at a time (API reference, ListObjectsV2)."""


@dataclass(frozen=True)
class ListedShard:
    """A shard: its path below the data set's folder or prefix, and its bytes."""

    name: str
    bytes: int


@dataclass(frozen=True)
class ShardListing:
    """What is below a prefix; ``others`` are objects that are no shards of it.

    ``cut`` tells that there is more than was listed.
    """

    shards: tuple[ListedShard, ...]
    others: tuple[str, ...]
    cut: bool


def list_folder(folder: Path) -> list[ListedShard]:
    """Every shard in a folder, by name."""
    return [
        ListedShard(name, path.stat().st_size) for name, path in sorted(find_shards(folder).items())
    ]


def list_prefix(
    s3: Any,
    uri: str,
    *,
    most: int | None = None,
    progress: Callable[[int], None] = lambda count: None,
) -> ShardListing:
    """What a channel of ``uri`` would show, in one call for each 1,000 objects.

    Like SageMaker's, the prefix is no folder: without a slash at its end ``…/shards`` is the
    beginning of ``…/shards-old/0.tar`` too. No more than about ``most`` objects are listed;
    ``progress`` is told how many there are so far.

    Raises:
        ClientError: S3 rejects.
    """
    bucket, prefix = split_uri(uri)
    folder = f"{prefix.rstrip('/')}/" if prefix else ""
    shards: list[ListedShard] = []
    others: list[str] = []
    count, cut = 0, False
    for page in s3.get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=prefix):
        for one in page.get("Contents", []):
            key = one["Key"]
            if key.startswith(folder) and key.endswith(SUFFIX):
                shards.append(ListedShard(key.removeprefix(folder), one["Size"]))
            elif one["Size"] or not key.endswith("/"):  # not the console's mark of a folder
                others.append(key)
        count += page.get("KeyCount", 0)
        progress(count)
        if most is not None and count >= most:
            cut = page.get("IsTruncated", False)
            break
    return ShardListing(tuple(sorted(shards, key=lambda one: one.name)), tuple(others), cut)
