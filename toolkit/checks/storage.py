"""The run's buckets and prefixes, the shards in S3 and their index."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from sm_train.entrypoints.data.shard_format import ShardError
from sm_train.entrypoints.data.shard_index import read_header
from sm_train.estimators.config.naming import staging_bucket
from sm_train.estimators.config.schema import RunConfig
from sm_train.toolkit.aws.s3 import S3File, bucket_region, split_uri
from sm_train.toolkit.checks.finding import Check, Finding
from sm_train.toolkit.checks.local_data import INDEX_STALE, NO_SHARDS, index_differences
from sm_train.toolkit.checks.shards import Shards, of_listing
from sm_train.toolkit.packing.shard_listing import ShardListing, list_prefix

MOST_OBJECTS = 200_000
"""So many are listed of a prefix: 200 calls. A petabyte in shards of 5 GB is as many."""

_CHANNEL_SOURCE = "SageMaker API reference, CreateTrainingJob (2026-11)"

BUCKET_MISSING = Check(
    "bucket-missing",
    ("error",),
    means="There is no such bucket.",
    impact="The request is refused, or the job fails before it trains.",
    fix="Look for a slip in the name, or make the bucket in the job's region.",
)
BUCKET_REGION = Check(
    "bucket-region",
    ("error",),
    means="A bucket of the run lies in another region than the job.",
    impact="SageMaker refuses it for a job's channels. Traffic between regions would be billed for "
    "every byte of every epoch.",
    fix="Use a bucket in the job's region (`aws s3 sync` copies), or run in the bucket's.",
    source=_CHANNEL_SOURCE,
)
PREFIX_MISSING = Check(
    "prefix-missing",
    ("error",),
    means="`data.validation` or `model.components` names a prefix without a single object.",
    impact="The job fails when machines have been waited for.",
    fix="Upload what is meant to be there, or mend the address.",
)
SINGLE_OBJECT = Check(
    "single-object",
    ("error",),
    means="`data.uri` is an object and not a prefix with shards below it.",
    impact="One instance is dealt all of it and the others nothing; the job stops at its start.",
    fix="Name the prefix above it, with a slash at its end.",
)
NOT_SHARDS = Check(
    "not-shards",
    ("warning",),
    means="Below `data.uri` there are objects that are no shards: other files, or, where the "
    "address has no slash at its end, whatever begins alike.",
    impact="ShardedByS3Key deals objects, whatever they are: an instance that is dealt one of "
    "these "
    "gets a shard less.",
    fix="Give the shards a prefix of their own, with a slash at the end of `data.uri`. The index "
    "lies above them.",
    source="SageMaker API reference, S3DataSource (2026-11)",
)
TOO_MANY_OBJECTS = Check(
    "too-many-objects",
    ("warning",),
    means=f"There are more than {MOST_OBJECTS:,} objects below `data.uri`; the rest were not "
    "looked at.",
    impact="FastFile lists all of them before training begins, on every instance.",
    fix="Pack into shards of 2 to 5 GB, and look whether the address is the shards'.",
)
INDEX_MISSING = Check(
    "index-missing",
    ("error",),
    means="The index that the run file asks for is not in S3.",
    impact="Its channel would be empty: the job fails when it has started.",
    fix="`sm-train index PREFIX` writes it. Or write `data.index: false`, and every start reads "
    "the headers of all shards.",
)
INDEX_UNREADABLE = Check(
    "index-unreadable",
    ("error",),
    means="What lies where the index should is no index, is damaged, or was written by a newer "
    "sm-train.",
    impact="The job stops at its start.",
    fix="`sm-train index PREFIX` writes it anew.",
)

Progress = Callable[[int], None]


def bucket_findings(session: Any, region: str, bucket: str, where: str) -> Iterator[Finding]:
    """Whether a bucket is there, and in the job's region.

    Raises:
        ClientError: S3 refuses to say.
    """
    try:
        actual = bucket_region(session, bucket)
    except LookupError:
        yield BUCKET_MISSING.found(
            "error",
            where,
            f"bucket {bucket} does not exist",
            f"make it in {region}, or name another",
        )
        return
    if actual not in (None, region):
        yield BUCKET_REGION.found(
            "error",
            where,
            f"bucket {bucket} is in {actual} and the job would run in {region}",
            "use a bucket in the job's region, or run there",
        )


def buckets(config: RunConfig, region: str) -> dict[str, str]:
    """Every bucket of the run with the first place that names it."""
    named = {staging_bucket(config, region): "bucket"} if knows_its_bucket(config) else {}
    for where, uri in {"data.uri": config.data.uri, **_prefixes(config)}.items():
        named.setdefault(split_uri(uri)[0], where)
    return named


def knows_its_bucket(config: RunConfig) -> bool:
    """Whether the bucket for code and checkpoints is named, or follows from the role's account."""
    return config.bucket is not None or config.role is not None


def _prefixes(config: RunConfig) -> dict[str, str]:
    """The smaller channels."""
    named = {"data.validation": config.data.validation, "model.components": config.model.components}
    return {where: uri for where, uri in named.items() if uri}


def prefix_findings(config: RunConfig, session: Any, closed: set[str]) -> Iterator[Finding]:
    """Whether anything is below the smaller channels' prefixes, outside of ``closed`` buckets.

    Raises:
        ClientError: S3 refuses to say.
    """
    for where, uri in _prefixes(config).items():
        bucket, prefix = split_uri(uri)
        if bucket in closed:
            continue
        answer = session.client("s3").list_objects_v2(Bucket=bucket, Prefix=prefix, MaxKeys=1)
        if not answer.get("KeyCount"):
            yield PREFIX_MISSING.found(
                "error", where, f"{uri} holds nothing", "upload it, or mend the address"
            )


def list_data(config: RunConfig, session: Any, progress: Progress) -> ShardListing:
    """The objects below ``data.uri``, as the job would be dealt them.

    Raises:
        ClientError: S3 refuses to say.
    """
    s3 = session.client("s3")
    return list_prefix(s3, config.data.uri, most=MOST_OBJECTS, progress=progress)


def listing_findings(config: RunConfig, listing: ShardListing) -> Iterator[Finding]:
    """What is wrong with the prefix itself."""
    uri = config.data.uri
    if split_uri(uri)[1].rstrip("/") in listing.others:
        yield SINGLE_OBJECT.found(
            "error", "data.uri", f"{uri} is a single object", "name the prefix above it"
        )
    elif listing.others:
        yield NOT_SHARDS.found(
            "warning",
            "data.uri",
            f"{len(listing.others):,} objects below {uri} are no shards of it, such as "
            f"{listing.others[0]}; each is dealt to an instance in a shard's place",
            "move them away, and end the address with a slash",
        )
    if not listing.shards:
        yield NO_SHARDS.found(
            "error", "data.uri", f"{uri} holds no .tar", "run sm-train pack, or mend the address"
        )
    if listing.cut:
        yield TOO_MANY_OBJECTS.found(
            "warning",
            "data.uri",
            f"{uri} has more than {MOST_OBJECTS:,} objects; the rest were not looked at",
            "pack into larger shards",
        )


def index_findings(
    config: RunConfig, session: Any, listing: ShardListing, known: dict[str, int] | None
) -> Iterator[Finding]:
    """The index in S3 against the shards: by its totals, which take two or three small reads.

    ``known`` are the names and bytes of an index that is here.

    Raises:
        ClientError: S3 refuses to say.
    """
    if known is not None and not listing.cut:
        found = {one.name: one.bytes for one in listing.shards}
        yield from index_differences(found, known, "data.uri")
    if config.data.index_uri is not None:
        yield from _index_in_s3(config, config.data.index_uri, session, listing)


def _index_in_s3(
    config: RunConfig, uri: str, session: Any, listing: ShardListing
) -> Iterator[Finding]:
    from botocore.exceptions import ClientError

    bucket, key = split_uri(uri)
    s3 = session.client("s3")
    again = f"run `sm-train index {config.data.uri}`"
    try:
        size = s3.head_object(Bucket=bucket, Key=key)["ContentLength"]
    except ClientError as error:
        if error.response["Error"].get("Code") not in ("404", "NoSuchKey"):
            raise
        yield INDEX_MISSING.found(
            "error", "data.index", f"{uri} is not there", f"{again}, or write index: false"
        )
        return
    try:
        header = read_header(S3File(s3, bucket, key, size), uri)
    except ShardError as error:
        yield INDEX_UNREADABLE.found("error", "data.index", str(error), again)
        return
    total = sum(one.bytes for one in listing.shards)
    if not listing.cut and (header.shards, header.bytes) != (len(listing.shards), total):
        yield INDEX_STALE.found(
            "error",
            "data.index",
            f"{uri} is of {header.shards:,} shards with {header.bytes:,} bytes, and "
            f"{config.data.uri} has {len(listing.shards):,} with {total:,}",
            again,
        )


def shards_in_s3(config: RunConfig, listing: ShardListing, local: Shards | None) -> Shards:
    """The listed shards; with the samples of ``local``, where those are the same ones."""
    listed = of_listing(listing.shards, "data.uri", config.data.uri)
    if local is not None and np.array_equal(local.bytes, listed.bytes):
        return Shards("data.uri", config.data.uri, listed.bytes, local.samples)
    return listed
