"""Checks the run's buckets and prefixes, the shards in S3 and their index."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
from sm_train.entrypoints.job_interface.index_location import (
    RECORDS_FOLDER,
    STAGED_FOLDER,
    removal_list,
    stream_uri,
    streamed_shard,
)
from sm_train.entrypoints.sample_metadata.row_filter import ConditionError
from sm_train.entrypoints.shards.removal_list import RemovalListError, decode_list
from sm_train.entrypoints.shards.selection import require_columns, require_valid
from sm_train.entrypoints.shards.shard_format import ShardError
from sm_train.entrypoints.shards.shard_index import IndexHeader
from sm_train.entrypoints.storage.bucket_settings import bucket_key
from sm_train.entrypoints.storage.store import store_of
from sm_train.estimators.config.naming import ROLE_NOT_SET, staging_bucket
from sm_train.estimators.config.schema import RunConfig
from sm_train.toolkit.aws.bucket_policy import denies_unencrypted, may_be_same_key
from sm_train.toolkit.aws.s3 import bucket_region, split_uri
from sm_train.toolkit.base.extras import is_installed
from sm_train.toolkit.checks.finding import Check, Finding
from sm_train.toolkit.checks.local_data import INDEX_STALE, NO_SHARDS, index_differences
from sm_train.toolkit.checks.shards import Shards, color_findings, of_listing
from sm_train.toolkit.run_file.index_facts import read_stored_header
from sm_train.toolkit.shards.shard_listing import ShardListing, list_prefix

if TYPE_CHECKING:
    import boto3

MOST_OBJECTS = 200_000
"""Objects listed per prefix, in 200 calls: enough for a petabyte in shards of 5 GB."""


BUCKET_MISSING = Check("bucket-missing", ("error",))
BUCKET_REGION = Check("bucket-region", ("error",))
PREFIX_MISSING = Check("prefix-missing", ("error",))
SINGLE_OBJECT = Check("single-object", ("error",))
NOT_SHARDS = Check("not-shards", ("warning",))
TOO_MANY_OBJECTS = Check("too-many-objects", ("warning",))
INDEX_MISSING = Check("index-missing", ("error",))
CONDITION_INVALID = Check("condition-invalid", ("error",))
INDEX_UNREADABLE = Check("index-unreadable", ("error",))

STAGED_IMAGES = Check("staged-images", ("warning",))

UPLOAD_ENCRYPTION = Check("upload-encryption", ("error", "warning"))

Progress = Callable[[int], None]
"""Called with the number of objects listed so far."""


def bucket_findings(session: boto3.Session, region: str, uri: str, where: str) -> Iterator[Finding]:
    """Check that the bucket of ``uri`` exists, and in the job's region.

    Raises:
        ClientError: S3 rejects a request.
    """
    bucket, prefix = split_uri(uri)
    try:
        actual = bucket_region(session, bucket, prefix)
    except LookupError:
        yield BUCKET_MISSING.found(
            "error",
            where,
            f"bucket {bucket} does not exist",
            f"create it in {region}, or use another",
        )
        return
    if actual not in (None, region):
        yield BUCKET_REGION.found(
            "error",
            where,
            f"bucket {bucket} is in {actual}, but the job would run in {region}",
            "use a bucket in the job's region, or run there",
        )


def encryption_findings(
    config: RunConfig, session: boto3.Session, region: str
) -> Iterator[Finding]:
    """Check how the run's bucket treats the checkpoints that SageMaker uploads without a key.

    Raises:
        ClientError: S3 rejects a request.
    """
    bucket, store = staging_bucket(config, region), store_of(session)
    key = bucket_key(config.bucket_keys, bucket)
    if key is None:
        return
    partition = (config.role or ROLE_NOT_SET).split(":")[1]
    checkpoint = f"arn:{partition}:s3:::{bucket}/{config.name}/checkpoints/x"
    denial = denies_unencrypted(store.policy(bucket), checkpoint)
    if denial != "no":
        what = "denies" if denial == "yes" else "may deny"
        yield UPLOAD_ENCRYPTION.found(
            "error" if denial == "yes" else "warning",
            "output_kms_key",
            f"the policy of bucket {bucket} {what} the checkpoints that SageMaker uploads, which "
            "name no key",
            "let it allow a put without encryption headers, which the bucket's default encrypts",
        )
    algorithm, default = store.default_encryption(bucket)
    if algorithm not in _KMS or not may_be_same_key(key, default):
        yield UPLOAD_ENCRYPTION.found(
            "warning",
            "output_kms_key",
            f"bucket {bucket} encrypts the checkpoints that SageMaker uploads with {algorithm}"
            f"{f' and {default}' if default else ''}, not with {key}",
            f"set its default encryption to aws:kms with {key}",
        )


_KMS = ("aws:kms", "aws:kms:dsse")


def buckets(config: RunConfig, region: str) -> dict[str, tuple[str, str]]:
    """Return every bucket of the run → the first key of the run file that names it, and its URI."""
    uris = {"data.uri": config.data.uri, **_prefixes(config)}
    if knows_its_bucket(config):
        uris = {"bucket": f"s3://{staging_bucket(config, region)}/{config.name}/", **uris}
    named: dict[str, tuple[str, str]] = {}
    for where, uri in uris.items():
        named.setdefault(split_uri(uri)[0], (where, uri))
    return named


def knows_its_bucket(config: RunConfig) -> bool:
    """Return whether the bucket for code and checkpoints is set or follows from the role."""
    return config.bucket is not None or config.role is not None


def _prefixes(config: RunConfig) -> dict[str, str]:
    """Return the optional input prefixes that are set, by their key in the run file."""
    named = {"data.validation": config.data.validation, "model.components": config.model.components}
    return {where: uri for where, uri in named.items() if uri}


def prefix_findings(
    config: RunConfig, session: boto3.Session, unusable: set[str]
) -> Iterator[Finding]:
    """Check that the optional input prefixes are not empty, except in ``unusable`` buckets.

    Raises:
        ClientError: S3 rejects a request.
    """
    for where, uri in _prefixes(config).items():
        bucket, prefix = split_uri(uri)
        if bucket in unusable:
            continue
        if store_of(session).first(bucket, prefix) is None:
            yield PREFIX_MISSING.found(
                "error", where, f"{uri} is empty", "upload the objects, or correct the URI"
            )


def list_data(config: RunConfig, session: boto3.Session, progress: Progress) -> ShardListing:
    """List the objects under ``data.uri`` that SageMaker would distribute.

    Raises:
        ClientError: S3 rejects a request.
    """
    return list_prefix(store_of(session), config.data.uri, limit=MOST_OBJECTS, progress=progress)


def staged_findings(config: RunConfig, session: boto3.Session) -> Iterator[Finding]:
    """Check that no image waits next to the shards to be written to one.

    Raises:
        ClientError: S3 rejects a request.
    """
    bucket, staged = split_uri(stream_uri(config.data.uri, STAGED_FOLDER))
    page = next(store_of(session).pages(bucket, staged))
    count = len(page.objects)
    if count:
        more = "more than " if page.has_more else ""
        yield STAGED_IMAGES.found(
            "warning",
            "data.uri",
            f"images staged in s3://{bucket}/{staged} that are in no shard: {more}{count:,}",
            "run `sm-train stream STACK --flush`",
        )


def listing_findings(config: RunConfig, listing: ShardListing) -> Iterator[Finding]:
    """Check the prefix of the shards itself."""
    uri = config.data.uri
    if split_uri(uri)[1].rstrip("/") in listing.others:
        yield SINGLE_OBJECT.found(
            "error", "data.uri", f"{uri} is a single object", "set the prefix that contains it"
        )
    elif listing.others and config.reads_shards:
        yield NOT_SHARDS.found(
            "warning",
            "data.uri",
            f"{len(listing.others):,} objects under {uri} are not shards, such as "
            f"{listing.others[0]}; each is assigned to an instance instead of a shard",
            "move them away",
        )
    if not listing.shards and (config.reads_shards or not listing.others):
        yield NO_SHARDS.found(
            "error", "data.uri", f"{uri} has no .tar", "run sm-train pack, or correct the URI"
        )
    if listing.truncated:
        yield TOO_MANY_OBJECTS.found(
            "warning",
            "data.uri",
            f"{uri} has more than {MOST_OBJECTS:,} objects; the rest were not checked",
            "pack into larger shards",
        )


def index_findings(
    config: RunConfig,
    session: boto3.Session,
    listing: ShardListing,
    indexed: dict[str, int] | None,
) -> Iterator[Finding]:
    """Compare the shards with the index in S3, by its totals: this takes two or three small reads.

    ``indexed`` are the names and bytes in a local index, if there is one.

    Raises:
        ClientError: S3 rejects a request.
    """
    if indexed is not None and not listing.truncated:
        sizes = {shard.name: shard.bytes for shard in listing.shards}
        yield from index_differences(sizes, indexed, "data.uri")
    if config.index_uri is not None:
        is_known = indexed is not None  # the findings on colors are those of the local index
        yield from _index_in_s3(
            config, config.index_uri, session, listing, names_colors=not is_known
        )
    for name, uri in config.source_indexes.items():
        bucket, key = split_uri(uri)
        if not _exists(session, bucket, key):
            yield INDEX_MISSING.found(
                "error",
                f"channels.{name}.uri",
                f"{uri} does not exist",
                f"run `sm-train index {config.channels[name].uri}`, or set data.index: false",
            )


def _exists(session: boto3.Session, bucket: str, key: str) -> bool:
    first = store_of(session).first(bucket, key)
    return first is not None and first.key == key


def _index_in_s3(
    config: RunConfig,
    uri: str,
    session: boto3.Session,
    listing: ShardListing,
    *,
    names_colors: bool,
) -> Iterator[Finding]:
    fix = f"run `sm-train index {config.data.uri}`"
    try:
        header = read_stored_header(session, uri)
    except FileNotFoundError:
        yield INDEX_MISSING.found(
            "error", "data.index", f"{uri} does not exist", f"{fix}, or set index: false"
        )
        return
    except ShardError as error:
        yield INDEX_UNREADABLE.found("error", "data.index", str(error), fix)
        return
    yield from _condition(config, header)
    if names_colors:
        yield from color_findings(uri, header, config)
    total = sum(shard.bytes for shard in listing.shards)
    totals = (header.shards, header.bytes)
    try:
        is_stale = not listing.truncated and totals not in _totals(config, session, uri, listing)
    except RemovalListError as error:
        yield INDEX_UNREADABLE.found(
            "error", "data.index", str(error), "restore an earlier version"
        )
        return
    if is_stale:
        yield INDEX_STALE.found(
            "error",
            "data.index",
            f"{uri} lists {header.shards:,} shards with {header.bytes:,} bytes, but "
            f"{config.data.uri} has {len(listing.shards):,} with {total:,}",
            fix,
        )


def _totals(
    config: RunConfig, session: boto3.Session, index: str, listing: ShardListing
) -> Iterator[tuple[int, int]]:
    """Yield the numbers and bytes of shards that an index may have: without those that
    `sm-train remove` replaces, or without their successors, and without new ones of a streaming
    pack.
    """
    yield _total(listing, ())
    store = store_of(session)
    bucket, records = split_uri(stream_uri(config.data.uri, RECORDS_FOLDER))
    names = [stored.key.removeprefix(records) for stored in store.objects(bucket, records)]
    new = {streamed_shard(int(name)) for name in names if name.isdecimal()}
    bucket, key = split_uri(removal_list(index))
    stored = store.get_if_exists(bucket, key)
    rewrites = {} if stored is None else decode_list(stored.content, removal_list(index)).rewrites
    yield _total(listing, new)
    yield _total(listing, new | rewrites.keys())
    yield _total(listing, new | {*rewrites.values()})


def _total(listing: ShardListing, ignored: Collection[str]) -> tuple[int, int]:
    """Return the number and the bytes of the shards that are not ``ignored``."""
    sizes = [shard.bytes for shard in listing.shards if shard.name not in ignored]
    return len(sizes), sum(sizes)


def _condition(config: RunConfig, header: IndexHeader) -> Iterator[Finding]:
    """Check ``data.where`` against the columns of the index, as far as this machine can."""
    where = config.data.where
    if where is None:
        return
    try:
        if is_installed("duckdb"):
            require_valid(where, header.columns)
        else:
            require_columns(header.columns)
    except ConditionError as error:
        reason = str(error).removeprefix("data.where: ")
        fix = "correct it, or pack the columns that it names with --index-column"
        yield CONDITION_INVALID.found("error", "data.where", reason, fix)


def shards_in_s3(config: RunConfig, listing: ShardListing, local: Shards | None) -> Shards:
    """Return the listed shards, with the numbers of samples of ``local`` if those are the same."""
    listed = of_listing(listing.shards, "data.uri", config.data.uri)
    if local is not None and np.array_equal(local.bytes, listed.bytes):
        return replace(local, where="data.uri", location=config.data.uri, bytes=listed.bytes)
    return listed
