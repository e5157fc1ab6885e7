"""Creates the index of shards that have none, in a local folder or below an S3 prefix."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING

from sm_train.entrypoints.common.index_location import (
    INDEX_NAME,
    SHARDS_FOLDER,
    index_path,
    index_uri,
)
from sm_train.entrypoints.data.shard_format import Shard, ShardError
from sm_train.entrypoints.data.shard_index import (
    IndexHeader,
    RejectedInput,
    ShardIndex,
    write_index,
)
from sm_train.entrypoints.packing.describe_shard import ShardDescription, describe_shard
from sm_train.toolkit.aws.errors import translate_aws_errors
from sm_train.toolkit.aws.s3 import split_uri
from sm_train.toolkit.aws.session import open_session
from sm_train.toolkit.errors import UserError
from sm_train.toolkit.packing.shard_listing import ListedShard, list_folder, list_prefix

if TYPE_CHECKING:
    from types_boto3_s3 import S3Client

Progress = Callable[[int, int], None]
"""Progress callback ``(bytes_described, bytes_total)``."""


@dataclass(frozen=True)
class IndexResult:
    """The index at ``location``; ``up_to_date`` if it existed and needed no change."""

    location: str
    header: IndexHeader
    damage: tuple[RejectedInput, ...]
    up_to_date: bool


def index_folder(folder: Path, workers: int, progress: Progress) -> IndexResult:
    """Describe every tar below ``folder`` and write the index next to the folder.

    Raises:
        UserError: the folder does not exist, or has no tar.
        OSError: something cannot be read or written.
    """
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder of shards")
    if (folder / SHARDS_FOLDER).is_dir():  # the folder that contains the shards folder
        folder /= SHARDS_FOLDER
    listed = list_folder(folder)
    location = index_path(folder)
    if (current := _load_if_current(location, listed)) is not None:
        return _up_to_date(str(location), current)
    describe = partial(_describe_in_folder, folder)
    with tempfile.TemporaryDirectory(dir=location.parent, prefix=f".{INDEX_NAME}.") as temporary:
        path = Path(temporary) / INDEX_NAME
        result = _write(path, str(folder), listed, describe, workers, progress)
        path.replace(location)
    return IndexResult(str(location), *result, up_to_date=False)


def index_prefix(
    uri: str, *, profile: str | None, region: str, workers: int, progress: Progress
) -> IndexResult:
    """Index shards in S3; each is downloaded to a temporary file, described and deleted.

    Raises:
        UserError: no tar is below ``uri``, or AWS rejects a request.
    """
    location = index_uri(uri)
    if location is None:
        raise UserError(f"{uri}: the index is written next to the shards; move them to a prefix")
    bucket, prefix = split_uri(uri.rstrip("/") + "/")
    _, key = split_uri(location)
    s3 = open_session(profile, region).client("s3")
    with translate_aws_errors(uri), tempfile.TemporaryDirectory() as folder:
        listed = list_prefix(s3, f"s3://{bucket}/{prefix}").shards
        path = Path(folder) / INDEX_NAME
        if _download_if_exists(s3, bucket, key, path):
            current = _load_if_current(path, listed)
            if current is not None:
                return _up_to_date(location, current)
        describe = partial(_describe_in_s3, profile, region, bucket, prefix)
        result = _write(path, uri, listed, describe, workers, progress)
        s3.upload_file(str(path), bucket, key)
    return IndexResult(location, *result, up_to_date=False)


def _load_if_current(path: Path, listed: Sequence[ListedShard]) -> ShardIndex | None:
    """Return the index at ``path`` if it lists exactly these shards and the image sizes."""
    try:
        index = ShardIndex(path)
        indexed = dict(zip(index.names, index.bytes.tolist(), strict=True))
    except (OSError, ShardError):
        return None
    has_sizes = len(index) == 0 or index.image_sizes(0) is not None
    return index if has_sizes and indexed == {shard.name: shard.bytes for shard in listed} else None


def _up_to_date(location: str, index: ShardIndex) -> IndexResult:
    return IndexResult(location, index.header, tuple(index.rejected()), up_to_date=True)


def _write(
    path: Path,
    source: str,
    listed: Sequence[ListedShard],
    describe: Callable[[str], ShardDescription],
    workers: int,
    progress: Progress,
) -> tuple[IndexHeader, tuple[RejectedInput, ...]]:
    """Describe the shards in parallel and write their index; return its header and the damage."""
    if not listed:
        raise UserError(f"{source}: no .tar in it; create shards with `sm-train pack`")
    damage: list[RejectedInput] = []
    total, done = sum(shard.bytes for shard in listed), 0

    def described_shards() -> Iterator[Shard]:
        nonlocal done
        with ProcessPoolExecutor(
            min(workers, len(listed)), mp_context=get_context("spawn")
        ) as pool:
            for description in pool.map(describe, [shard.name for shard in listed]):
                damage.extend(description.rejected)
                done += description.shard.bytes
                progress(done, total)
                yield description.shard

    # write_index iterates `damage` after the shards, when the list is complete.
    write_index(path, described_shards(), damage)
    return ShardIndex(path).header, tuple(damage)


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


def _download_if_exists(s3: S3Client, bucket: str, key: str, path: Path) -> bool:
    from botocore.exceptions import ClientError

    try:
        s3.download_file(bucket, key, str(path))
    except ClientError as error:
        if error.response["Error"].get("Code") in ("404", "NoSuchKey"):
            return False
        raise
    return True
