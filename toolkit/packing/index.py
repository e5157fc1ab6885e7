"""Makes the index of shards that came without one: a folder's, or an S3 prefix's."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from sm_train.entrypoints.common.index_location import (
    INDEX_NAME,
    SHARDS_FOLDER,
    index_path,
    index_uri,
)
from sm_train.entrypoints.data.shard_format import ShardError
from sm_train.entrypoints.data.shard_index import (
    IndexHeader,
    RejectedInput,
    ShardIndex,
    write_index,
)
from sm_train.entrypoints.packing.describe_shard import ShardDescription, describe_shard
from sm_train.toolkit.aws.session import open_session, split_uri, translate_aws_errors
from sm_train.toolkit.errors import UserError
from sm_train.toolkit.packing.shard_listing import ListedShard, list_folder, list_prefix

Progress = Callable[[int, int], None]
"""Bytes of shards that are described, and of all."""


@dataclass(frozen=True)
class Indexed:
    """The index at ``place``; ``was_there`` where it needed no change."""

    place: str
    header: IndexHeader
    rejected: tuple[RejectedInput, ...]
    was_there: bool


def index_folder(folder: Path, workers: int, progress: Progress) -> Indexed:
    """Describe every tar below ``folder`` and write the index beside it.

    Raises:
        UserError: there is no such folder, or no tar in it.
        OSError: something cannot be read or written.
    """
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder of shards")
    if (folder / SHARDS_FOLDER).is_dir():  # the packed folder itself
        folder /= SHARDS_FOLDER
    listed = list_folder(folder)
    place = index_path(folder)
    if (done := _up_to_date(place, listed)) is not None:
        return Indexed(str(place), done.header, tuple(done.rejected()), was_there=True)
    describe = partial(_describe_in_folder, folder)
    with tempfile.TemporaryDirectory(dir=place.parent, prefix=f".{INDEX_NAME}.") as private:
        path = Path(private) / INDEX_NAME
        written = _write(path, str(folder), listed, describe, workers, progress)
        path.replace(place)
    return Indexed(str(place), *written, was_there=False)


def index_prefix(
    uri: str, *, profile: str | None, region: str, workers: int, progress: Progress
) -> Indexed:
    """The same for shards in S3: each is fetched into a temporary file, described and dropped.

    Raises:
        UserError: no tar below ``uri``, or AWS rejects something.
    """
    bucket, prefix = split_uri(uri.rstrip("/") + "/")
    place = index_uri(uri)
    if place is None:
        raise UserError(f"{uri}: a whole bucket leaves no place for the index beside the shards")
    key = split_uri(place)[1]
    s3 = open_session(profile, region).client("s3")
    with translate_aws_errors(uri), tempfile.TemporaryDirectory() as folder:
        listed = list_prefix(s3, f"s3://{bucket}/{prefix}").shards
        path = Path(folder) / INDEX_NAME
        if _fetched(s3, bucket, key, path) and (done := _up_to_date(path, listed)) is not None:
            return Indexed(place, done.header, tuple(done.rejected()), was_there=True)
        describe = partial(_describe_in_s3, profile, region, bucket, prefix)
        written = _write(path, uri, listed, describe, workers, progress)
        s3.upload_file(str(path), bucket, key)
    return Indexed(place, *written, was_there=False)


def _up_to_date(path: Path, listed: Sequence[ListedShard]) -> ShardIndex | None:
    try:
        index = ShardIndex(path)
        known = dict(zip(index.names, index.bytes.tolist(), strict=True))
    except (OSError, ShardError):
        return None
    sized = all(index.image_sizes(number) is not None for number in range(min(1, len(index))))
    return index if sized and known == {one.name: one.bytes for one in listed} else None


def _write(
    path: Path,
    where: str,
    listed: Sequence[ListedShard],
    describe: Callable[[str], ShardDescription],
    workers: int,
    progress: Progress,
) -> tuple[IndexHeader, tuple[RejectedInput, ...]]:
    if not listed:
        raise UserError(f"{where}: holds no .tar; `sm-train pack` makes shards")
    rejected: list[RejectedInput] = []
    total, done = sum(one.bytes for one in listed), 0

    def described() -> Iterator[Any]:
        nonlocal done
        with ProcessPoolExecutor(
            min(workers, len(listed)), mp_context=get_context("spawn")
        ) as pool:
            for found in pool.map(describe, [one.name for one in listed]):
                rejected.extend(found.rejected)
                done += found.shard.bytes
                progress(done, total)
                yield found.shard

    # The all_rejected are known when the last shard is.
    write_index(path, described(), _later(rejected))
    return ShardIndex(path).header, tuple(rejected)


def _later(rejected: list[RejectedInput]) -> Iterator[RejectedInput]:
    yield from rejected


def _describe_in_folder(folder: Path, name: str) -> ShardDescription:
    return describe_shard(folder / name, name)


def _describe_in_s3(
    profile: str | None, region: str, bucket: str, prefix: str, name: str
) -> ShardDescription:
    s3 = open_session(profile, region).client("s3")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "shard.tar"
        s3.download_file(bucket, prefix + name, str(path))
        return describe_shard(path, name)


def _fetched(s3: Any, bucket: str, key: str, path: Path) -> bool:
    from botocore.exceptions import ClientError

    try:
        s3.download_file(bucket, key, str(path))
    except ClientError as error:
        if error.response["Error"].get("Code") in ("404", "NoSuchKey"):
            return False
        raise
    return True
