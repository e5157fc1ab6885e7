"""S3 URIs, buckets and objects."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from typing import TYPE_CHECKING

from sm_train.entrypoints.storage.store import store_of
from sm_train.toolkit.aws.aws_errors import translate_aws_errors
from sm_train.toolkit.aws.session import open_session, resolve_region, session_in_region
from sm_train.toolkit.base.errors import ExitCode, UserError

if TYPE_CHECKING:
    import boto3
    from sm_train.entrypoints.storage.store import S3Access


def split_uri(uri: str) -> tuple[str, str]:
    """Split ``s3://bucket/key`` into bucket and key."""
    bucket, _, key = uri.removeprefix("s3://").partition("/")
    return bucket, key


def read_optional_object(session: boto3.Session, uri: str, what: str) -> bytes | None:
    """Return the content of an object; None if it does not exist. ``what`` begins an error.

    Raises:
        UserError: AWS refuses the request.
    """
    bucket, key = split_uri(uri)
    with translate_aws_errors(f"{what}: {uri}"):
        stored = store_of(session).get_if_exists(bucket, key)
    return None if stored is None else stored.content


def write_object(
    session: boto3.Session, uri: str, content: bytes, what: str, content_type: str
) -> None:
    """Store ``content`` as an object; a PUT to S3 is atomic. ``what`` begins an error.

    Raises:
        UserError: AWS refuses the request.
    """
    bucket, key = split_uri(uri)
    with translate_aws_errors(f"{what}: {uri}"):
        store_of(session).put(bucket, key, content, content_type=content_type)


def bucket_region(session: boto3.Session, bucket: str, prefix: str) -> str | None:
    """Return the region of a bucket; None if S3 does not report it.

    Lists ``prefix``: a policy can limit that to the run's own objects, but not HeadBucket.

    Raises:
        LookupError: the bucket does not exist.
        ClientError: S3 denies access.
    """
    from botocore.exceptions import ClientError

    try:
        return store_of(session).bucket_region(bucket, prefix)
    except ClientError as error:
        if error.response["ResponseMetadata"].get("HTTPStatusCode") == 404:
            raise LookupError(bucket) from None
        raise


def open_bucket_session(uri: str, region: str | None, profile: str | None) -> boto3.Session:
    """Return a session in the region of the URI's bucket; ``region`` is the command line's, if any.

    Raises:
        UserError: there are no credentials, no such bucket, or S3 denies access.
    """
    try:
        region = resolve_region(region, None, profile)
    except UserError:
        # Any region's S3 names the region of a bucket.
        region = "us-east-1"
    session = open_session(profile, region)
    bucket, prefix = split_uri(uri)
    with translate_aws_errors(f"s3://{bucket}"):
        try:
            actual = bucket_region(session, bucket, prefix)
        except LookupError:
            raise UserError(
                f"s3://{bucket}: the bucket does not exist; check the name", ExitCode.PERMISSION
            ) from None
    return session_in_region(session, actual or region)


def regions_of_readers(uri: str, access: S3Access, others: Iterable[str] = ()) -> tuple[str, ...]:
    """Return the regions in which jobs may use an S3 prefix: that of its bucket first.

    SageMaker takes channels only from its own region, but a bucket's replica or access point may
    serve others: the region of the command line or the environment, and ``others``.

    Raises:
        UserError: there are no credentials, no such bucket, or S3 denies access.
    """
    session = open_bucket_session(uri, access.region, access.profile)
    found = [session.region_name]
    with suppress(UserError):  # no default is set
        found.append(resolve_region(access.region, None, access.profile))
    return tuple(dict.fromkeys([*found, *others]))


def require_bucket(session: boto3.Session, uri: str, region: str, field: str) -> None:
    """Reject a URI whose bucket does not exist, denies access, or is not in ``region``.

    Traffic between regions is billed and slow, and SageMaker rejects it for a job's channels.

    Raises:
        UserError: the bucket cannot be used; the message names ``field``.
    """
    bucket, prefix = split_uri(uri)
    with translate_aws_errors(f"{field}: bucket {bucket}"):
        try:
            actual = bucket_region(session, bucket, prefix)
        except LookupError:
            raise UserError(
                f"{field}: bucket {bucket} does not exist; create it in {region} or name another",
                ExitCode.PERMISSION,
            ) from None
    if actual is not None and actual != region:
        raise UserError(
            f"{field}: bucket {bucket} is in {actual} and the job would run in {region}; "
            "use a bucket in the job's region, or run there",
            ExitCode.PREFLIGHT,
        )
