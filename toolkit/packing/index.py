"""Creates the index of shards that have none, in a local folder or below an S3 prefix."""

from __future__ import annotations

import hashlib
import json
import stat
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sm_train.entrypoints.common.index_location import (
    INDEX_NAME,
    SHARDS_FOLDER,
    index_path,
    index_uri,
)
from sm_train.entrypoints.common.job_config import CaptionSource
from sm_train.entrypoints.data.shard_format import Shard, ShardError
from sm_train.entrypoints.data.shard_index import (
    IndexHeader,
    RejectedInput,
    ShardIndex,
    write_index,
)
from sm_train.entrypoints.object_store.s3_errors import is_missing
from sm_train.entrypoints.object_store.store import ObjectStore, S3Access, store_of
from sm_train.entrypoints.packing.describe_shard import DAMAGED, ShardDescription, describe_shard
from sm_train.entrypoints.packing.unusable_samples import (
    COMPRESSED,
    IMAGE_AND_TEXT,
    SampleFiles,
    Unusable,
    UnusableSamples,
    merge_unusable,
)
from sm_train.entrypoints.shared_work.storage import open_storage
from sm_train.entrypoints.shared_work.work_stages import PLAN_NAME
from sm_train.toolkit.aws.aws_errors import translate_aws_errors
from sm_train.toolkit.aws.s3 import split_uri
from sm_train.toolkit.aws.session import open_session
from sm_train.toolkit.errors import UserError
from sm_train.toolkit.packing.shard_listing import (
    COMPRESSED_SUFFIXES,
    ListedShard,
    list_compressed,
    list_folder,
    list_prefix,
)
from sm_train.toolkit.packing.shard_set import ShardSet
from sm_train.toolkit.run_file import load

if TYPE_CHECKING:
    pass

Progress = Callable[[int, int], None]
"""Progress callback ``(bytes_described, bytes_total)``."""


@dataclass(frozen=True)
class IndexResult:
    """The index at ``location``; ``up_to_date`` if it existed and needed no change.

    ``unusable`` are samples that cannot be trained on.
    """

    location: str
    header: IndexHeader
    damage: tuple[RejectedInput, ...]
    unusable: Unusable
    up_to_date: bool


@dataclass(frozen=True)
class SampleCheck:
    """Which samples can be trained on: those with ``files``.

    ``find_missing`` is false if a function of the user makes files of a sample.
    """

    files: SampleFiles = IMAGE_AND_TEXT
    find_missing: bool = True

    def options(self) -> dict[str, Any]:
        """Return what an index depends on, as JSON values."""
        return {
            "image": list(self.files.image),
            "caption": [asdict(source) for source in self.files.caption],
            "find_missing": self.find_missing,
        }


def sample_check(run: Path | None) -> SampleCheck:
    """Return the check for what the run file ``run`` trains on; default: images and ``.txt``.

    Raises:
        UserError: the run file is invalid.
    """
    if run is None:
        return SampleCheck()
    data = load(run).data
    caption = tuple(data.caption_sources()) or (CaptionSource(data.caption_key, None, 1.0),)
    files = SampleFiles(tuple(data.image_key.split(";")), caption)
    return SampleCheck(files, find_missing=data.transform is None)


def index_folder(folder: Path, check: SampleCheck, workers: int, progress: Progress) -> IndexResult:
    """Describe every tar below ``folder`` and write the index next to the folder.

    Raises:
        UserError: the folder does not exist, or has no tar; or the index is no file.
        OSError: something cannot be read or written.
    """
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder of shards")
    if (folder / SHARDS_FOLDER).is_dir():  # the folder that contains the shards folder
        folder /= SHARDS_FOLDER
    listed, compressed = list_folder(folder), list_compressed(folder)
    location = index_path(folder)
    if location.exists() and not location.is_file():
        raise UserError(f"{location}: is no file; remove it")
    _require_settled(str(location.parent), folder.resolve().name, S3Access())
    contents = _Contents(str(folder), folder.resolve().name, listed, compressed, check)
    if (current := _load_if_current(location, contents, str(location))) is not None:
        return _up_to_date(str(location), current)
    describe = partial(_describe_in_folder, folder, check)
    final = location.resolve()  # a link is followed
    with tempfile.TemporaryDirectory(dir=final.parent, prefix=f".{INDEX_NAME}.") as temporary:
        path = Path(temporary) / INDEX_NAME
        result = _write(path, contents, describe, workers, progress)
        if final.exists():
            path.chmod(stat.S_IMODE(final.stat().st_mode))
        path.replace(final)
    return IndexResult(str(location), *result, up_to_date=False)


def index_prefix(
    uri: str,
    check: SampleCheck,
    *,
    profile: str | None,
    region: str,
    workers: int,
    progress: Progress,
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
    store = store_of(open_session(profile, region))
    with translate_aws_errors(uri), tempfile.TemporaryDirectory() as folder:
        name = prefix.rstrip("/").rpartition("/")[2]
        _require_settled(location.rpartition("/")[0], name, S3Access(profile, region))
        listing = list_prefix(store, f"s3://{bucket}/{prefix}")
        compressed = [
            key.removeprefix(prefix) for key in listing.others if key.endswith(COMPRESSED_SUFFIXES)
        ]
        contents = _Contents(uri, name, listing.shards, compressed, check)
        path = Path(folder) / INDEX_NAME
        if _download_if_exists(store, bucket, key, path):
            current = _load_if_current(path, contents, location)
            if current is not None:
                return _up_to_date(location, current)
        describe = partial(_describe_in_s3, profile, region, bucket, prefix, check)
        result = _write(path, contents, describe, workers, progress)
        store.upload(path, bucket, key)
    return IndexResult(location, *result, up_to_date=False)


def _require_settled(address: str, shards: str, access: S3Access) -> None:
    """Require that no shard in the folder ``shards`` of ``address`` is to be written or deleted.

    The index of a finished pack has more than ours.

    Raises:
        UserError: `sm-train pack` or `remove` writes to it, or was interrupted.
    """
    destination = open_storage(address, access)
    if destination.size(PLAN_NAME) is not None:
        raise UserError(
            f"{address}: contains an unfinished pack; finish it with `sm-train pack`, or remove "
            f"{destination.address(PLAN_NAME)} to index the shards that it wrote"
        )
    if ShardSet(destination, shards, access).read_list().rewrites:
        raise UserError(
            f"{address}: samples are being removed from it; finish that with `sm-train remove`"
        )


@dataclass(frozen=True)
class _Contents:
    """What ``source`` contains, and which of its samples can be trained on.

    ``prefix`` is the last part of ``source``, which the index names.
    """

    source: str
    prefix: str
    listed: Sequence[ListedShard]
    compressed: Sequence[str]
    check: SampleCheck

    def options(self) -> dict[str, Any]:
        """Return what the index stores of it, without the unusable samples."""
        versions = json.dumps([(shard.name, shard.version) for shard in self.listed]).encode()
        return {
            "samples": self.check.options(),
            "compressed": list(self.compressed),
            "versions": hashlib.sha256(versions).hexdigest(),
        }


def _load_if_current(path: Path, contents: _Contents, location: str) -> ShardIndex | None:
    """Return the index at ``path``, stored at ``location``, if it lists exactly these shards and
    the image sizes.

    Raises:
        UserError: it is the index of other shards.
    """
    try:
        index = ShardIndex(path)
        indexed = dict(zip(index.names, index.bytes.tolist(), strict=True))
    except (OSError, ShardError):
        return None
    if index.header.prefix != contents.prefix:
        raise UserError(
            f"{location}: is the index of other shards, of {index.header.prefix}/; move it or "
            f"rename {contents.prefix}/"
        )
    has_sizes = len(index) == 0 or index.image_sizes(0) is not None
    # Shards of `sm-train pack` have all files, and their index more than this one would.
    is_packed = index.header.inputs is not None
    is_checked = is_packed or contents.options().items() <= index.header.options.items()
    is_complete = indexed == {shard.name: shard.bytes for shard in contents.listed}
    return index if has_sizes and is_checked and is_complete else None


def _up_to_date(location: str, index: ShardIndex) -> IndexResult:
    stored = index.header.options.get("unusable", {})
    unusable = {reason: UnusableSamples(**samples) for reason, samples in stored.items()}
    # A pack also lists the images that it rejected.
    damage = tuple(item for item in index.rejected() if item.reason == DAMAGED)
    return IndexResult(location, index.header, damage, unusable, up_to_date=True)


def _write(
    path: Path,
    contents: _Contents,
    describe: Callable[[str], ShardDescription],
    workers: int,
    progress: Progress,
) -> tuple[IndexHeader, tuple[RejectedInput, ...], Unusable]:
    """Describe the shards in parallel and write their index.

    Return its header, the damage and the unusable samples.
    """
    listed, compressed = contents.listed, contents.compressed
    if not listed:
        if compressed:
            raise UserError(
                f"{contents.source}: {compressed[0]} is compressed, as are all of its "
                f"{len(compressed):,} shards; decompress them, as with gunzip"
            )
        raise UserError(f"{contents.source}: no .tar in it; create shards with `sm-train pack`")
    damage: list[RejectedInput] = []
    unusable: Unusable = {}
    if compressed:
        merge_unusable(
            unusable, {COMPRESSED: UnusableSamples(len(compressed), list(compressed[:3]))}
        )
    options = contents.options()
    total, done = sum(shard.bytes for shard in listed), 0

    def described_shards() -> Iterator[Shard]:
        nonlocal done
        with ProcessPoolExecutor(
            min(workers, len(listed)), mp_context=get_context("spawn")
        ) as pool:
            for description in pool.map(describe, [shard.name for shard in listed]):
                damage.extend(description.rejected)
                merge_unusable(unusable, description.unusable)
                done += description.shard.bytes
                progress(done, total)
                yield description.shard
        options["unusable"] = {reason: asdict(samples) for reason, samples in unusable.items()}

    # write_index reads `damage` and `options` after the shards, when they are complete.
    write_index(path, described_shards(), damage, options=options, prefix=contents.prefix)
    return ShardIndex(path).header, tuple(damage), unusable


def _describe_in_folder(folder: Path, check: SampleCheck, name: str) -> ShardDescription:
    return describe_shard(folder / name, name, check.files, find_missing=check.find_missing)


def _describe_in_s3(
    profile: str | None, region: str, bucket: str, prefix: str, check: SampleCheck, name: str
) -> ShardDescription:
    store = store_of(open_session(profile, region))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "shard.tar"
        store.download(bucket, prefix + name, path)
        return describe_shard(path, name, check.files, find_missing=check.find_missing)


def _download_if_exists(store: ObjectStore, bucket: str, key: str, path: Path) -> bool:
    from botocore.exceptions import ClientError

    try:
        store.download(bucket, key, path)
    except ClientError as error:
        if is_missing(error):
            return False
        raise
    return True
