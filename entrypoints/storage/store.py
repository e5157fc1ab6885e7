"""Lists, reads, writes and deletes S3 objects.

All S3 requests of the product but those of the SageMaker SDK go through :class:`ObjectStore`. Each
names the bucket's owner and KMS key (:mod:`sm_train.entrypoints.storage.bucket_parameters`).
Methods raise the errors of botocore and boto3 unchanged, unless they say otherwise.
"""

from __future__ import annotations

import json
import shutil
import threading
import time
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from functools import cached_property, lru_cache
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, TypeVar

from sm_train.entrypoints.storage.aws_session import error_code, is_missing, prepare_session
from sm_train.entrypoints.storage.conditional_upload import ConditionalUpload, upload_if
from sm_train.entrypoints.storage.parallel_read import ParallelReader
from sm_train.entrypoints.storage.server_copy import ObjectName, copy_objects
from sm_train.entrypoints.storage.stream_upload import PART_BYTES, ShardSink, upload_stream

if TYPE_CHECKING:
    import boto3
    from botocore.config import Config
    from botocore.response import StreamingBody
    from types_boto3_s3 import S3Client
    from types_boto3_s3.type_defs import GetObjectOutputTypeDef

MAX_CONNECTIONS = 64
"""Requests to S3 that one process has in flight."""


_ATTEMPTS, _PAUSE_SECONDS = 5, 0.1
"""For a body that ends early: botocore repeats a request only until the body begins."""


@dataclass(frozen=True)
class S3Access:
    """The AWS profile and region to reach S3 with; None leaves the choice to the environment."""

    profile: str | None = None
    region: str | None = None


@dataclass(frozen=True)
class StoredObject:
    """An object in a listing. ``etag`` is in quotes, as S3 sends it."""

    key: str
    bytes: int
    etag: str
    modified: datetime


@dataclass(frozen=True)
class ListedPage:
    """Up to 1,000 objects, and the folders below the prefix if the listing has a delimiter."""

    objects: list[StoredObject]
    folders: list[str]
    has_more: bool


@dataclass(frozen=True)
class ObjectHead:
    """What S3 knows of an object. ``encryption`` is its algorithm, ``kms_key`` its key's ARN."""

    bytes: int
    etag: str
    modified: datetime
    version: str | None
    metadata: Mapping[str, str]
    encryption: str | None
    kms_key: str | None


@dataclass(frozen=True)
class ObjectContent:
    """A whole object, and when it was written: Unix seconds by S3's clock.

    ``age`` is in seconds, by S3's clock alone: the local clock may be wrong.
    """

    content: bytes
    etag: str
    modified: float
    age: float


_Answer = TypeVar("_Answer")


def _if_exists(request: Callable[[], _Answer]) -> _Answer | None:
    """Return the answer to a request; None if its object does not exist."""
    from botocore.exceptions import ClientError

    try:
        return request()
    except ClientError as error:
        if is_missing(error):
            return None
        raise


class ObjectStore:
    """S3 as one session and region reach it. Threads may share it."""

    def __init__(self, client: S3Client) -> None:
        self._client = client

    # ------------------------------------------------------------------ list

    def pages(
        self, bucket: str, prefix: str, *, delimiter: str = "", after: str | None = None
    ) -> Iterator[ListedPage]:
        """Yield the objects below ``prefix`` in the order of their keys, a request at a time.

        With a delimiter, keys that contain it after the prefix are summed up as folders. Only keys
        ``after`` one are listed.
        """
        options: dict[str, Any] = {"Delimiter": delimiter} if delimiter else {}
        if after is not None:
            options["StartAfter"] = after
        pages = self._client.get_paginator("list_objects_v2")
        for page in pages.paginate(Bucket=bucket, Prefix=prefix, **options):
            yield _page(page)

    def objects(
        self, bucket: str, prefix: str, *, after: str | None = None
    ) -> Iterator[StoredObject]:
        """Yield all objects below ``prefix``, or those whose keys come ``after`` one."""
        for page in self.pages(bucket, prefix, after=after):
            yield from page.objects

    def folders(self, bucket: str, prefix: str) -> list[str]:
        """Return the prefixes, each with a slash at its end, of the folders that start so."""
        return [
            folder for page in self.pages(bucket, prefix, delimiter="/") for folder in page.folders
        ]

    def first(self, bucket: str, prefix: str) -> StoredObject | None:
        """Return the first object below ``prefix``. One named exactly like it comes first."""
        page = self._client.list_objects_v2(Bucket=bucket, Prefix=prefix, MaxKeys=1)
        return next(iter(_page(page).objects), None)

    # ------------------------------------------------------------------ read

    def head(self, bucket: str, key: str) -> ObjectHead | None:
        """Return what S3 knows of an object; None if it does not exist."""
        head = _if_exists(lambda: self._client.head_object(Bucket=bucket, Key=key))
        if head is None:
            return None
        return ObjectHead(
            head["ContentLength"],
            head["ETag"],
            head["LastModified"],
            head.get("VersionId"),
            head.get("Metadata", {}),
            head.get("ServerSideEncryption"),
            head.get("SSEKMSKeyId"),
        )

    def tags(self, bucket: str, key: str) -> dict[str, str] | None:
        """Return the tags of an object; None if it does not exist."""
        found = _if_exists(lambda: self._client.get_object_tagging(Bucket=bucket, Key=key))
        if found is None:
            return None
        return {tag["Key"]: tag["Value"] for tag in found["TagSet"]}

    def get(self, bucket: str, key: str) -> bytes:
        """Return an object's content, in one request.

        Raises:
            OSError: its body is cut again and again.
        """
        return self._whole(bucket, key)[1]

    def get_if_exists(self, bucket: str, key: str) -> ObjectContent | None:
        """Return an object; None if it does not exist.

        Raises:
            OSError: its body is cut again and again.
        """
        found = _if_exists(lambda: self._whole(bucket, key))
        if found is None:
            return None
        response, content = found
        date = response["ResponseMetadata"]["HTTPHeaders"].get("date")
        now = parsedate_to_datetime(date) if date else datetime.now(UTC)
        modified = response["LastModified"]
        age = max(0.0, (now - modified).total_seconds())
        return ObjectContent(content, response["ETag"], modified.timestamp(), age)

    def start(self, bucket: str, key: str, length: int) -> bytes | None:
        """Return up to ``length`` bytes of an object from its start; None if it does not exist."""
        return _if_exists(lambda: self.stream(bucket, key).read(length))

    def get_range(self, bucket: str, key: str, start: int, length: int) -> bytes:
        """Return ``length`` bytes of an object from ``start`` on; fewer at its end.

        Raises:
            OSError: the body is cut again and again.
        """
        response, content = self._whole(bucket, key, Range=f"bytes={start}-{start + length - 1}")
        sent = response.get("ContentRange", "")
        if not sent.startswith(f"bytes {start}-{start + len(content) - 1}/"):
            reason = f"asked for bytes from {start} on, got {sent or 'another part'}"
            raise OSError(5, f"{reason}; check the proxy before S3", f"s3://{bucket}/{key}")
        return content

    def _whole(self, bucket: str, key: str, **options: Any) -> tuple[GetObjectOutputTypeDef, bytes]:
        """Return an answer with its whole body: one that ends early is requested again."""
        from botocore.exceptions import HTTPClientError, IncompleteReadError

        for attempt in range(_ATTEMPTS):
            if attempt:
                time.sleep(_PAUSE_SECONDS * 2**attempt)
            response = self._client.get_object(Bucket=bucket, Key=key, **options)
            try:
                return response, response["Body"].read()
            except (HTTPClientError, IncompleteReadError) as error:
                reason = str(error)
        raise OSError(5, f"{reason}; run the same command again", f"s3://{bucket}/{key}")

    def stream(
        self, bucket: str, key: str, *, start: int = 0, etag: str | None = None
    ) -> StreamingBody:
        """Open an object as a stream, from byte ``start`` on.

        Raises:
            ClientError: S3 rejects it; status 412 if the object does not have ``etag`` any more.
        """
        options: dict[str, Any] = {"Range": f"bytes={start}-"} if start else {}
        if etag is not None:
            options["IfMatch"] = etag
        return self._client.get_object(Bucket=bucket, Key=key, **options)["Body"]

    def read(self, bucket: str, key: str) -> bytes:
        """Return an object's content, large ones in ranges that are requested in parallel.

        Raises:
            OSError: as that of the file system, also for an object that is replaced meanwhile.
        """
        return self._reader.read(bucket, key)

    @cached_property
    def _reader(self) -> ParallelReader:
        return ParallelReader(self._client, MAX_CONNECTIONS)

    def download(self, bucket: str, key: str, path: Path) -> None:
        """Download an object to a file.

        Raises:
            OSError: its body is cut again and again.
        """
        from boto3.exceptions import RetriesExceededError

        try:
            self._client.download_file(bucket, key, str(path))
        except RetriesExceededError as error:
            reason = f"{getattr(error, 'last_exception', error)}; run the same command again"
            raise OSError(5, reason, f"s3://{bucket}/{key}") from None

    # ------------------------------------------------------------------ write

    def put(
        self, bucket: str, key: str, content: bytes, *, content_type: str | None = None
    ) -> None:
        """Write an object."""
        self._client.put_object(Bucket=bucket, Key=key, Body=content, **_type(content_type))

    def put_if(
        self,
        bucket: str,
        key: str,
        content: bytes | IO[bytes],
        *,
        etag: str | None,
        content_type: str | None = None,
    ) -> str | None:
        """Write an object if it has ``etag``, or if it does not exist and ``etag`` is None.

        Exactly one of several concurrent writers succeeds (S3 user guide, Conditional writes).
        Return the new ETag; None if another writer was faster.
        """
        with self.writer_if(bucket, key, etag=etag, content_type=content_type) as upload:
            if isinstance(content, bytes):
                upload.write(content)
            else:
                shutil.copyfileobj(content, upload, PART_BYTES)
        return upload.etag

    def writer_if(
        self, bucket: str, key: str, *, etag: str | None, content_type: str | None = None
    ) -> AbstractContextManager[ConditionalUpload]:
        """Open a file that is written as :meth:`put_if` does; its ``etag`` is set at the end."""
        return upload_if(self._client, bucket, key, etag, _type(content_type))

    def upload(
        self, path: Path, bucket: str, key: str, *, metadata: Mapping[str, str] | None = None
    ) -> None:
        """Upload a file, a large one in parts."""
        extra = {"Metadata": dict(metadata)} if metadata else None
        self._client.upload_file(str(path), bucket, key, ExtraArgs=extra)

    def writer(self, bucket: str, key: str) -> AbstractContextManager[ShardSink]:
        """Open a sink; its content becomes the object when the context exits without an error."""
        return upload_stream(self._client, bucket, key)

    def copy_to(
        self,
        target: ObjectStore,
        names: Iterable[tuple[ObjectName, ObjectName]],
        on_progress: Callable[[int], None],
    ) -> None:
        """Copy objects of this store to other names in ``target``; see :func:`copy_objects`."""
        copy_objects(self._client, target._client, names, on_progress)

    # ------------------------------------------------------------------ remove

    def delete(self, bucket: str, key: str) -> None:
        """Delete an object if it exists."""
        self._client.delete_object(Bucket=bucket, Key=key)

    def delete_versions(self, bucket: str, key: str) -> int:
        """Delete all versions of an object, and what marks it as deleted; return their number.

        A bucket without versioning has one version of each object.
        """
        found = [
            version["VersionId"]
            for page in self._client.get_paginator("list_object_versions").paginate(
                Bucket=bucket, Prefix=key
            )
            for version in [*page.get("Versions", []), *page.get("DeleteMarkers", [])]
            if version["Key"] == key
        ]
        for version in found:
            self._client.delete_object(Bucket=bucket, Key=key, VersionId=version)
        return len(found)

    def abort_uploads(
        self,
        bucket: str,
        prefix: str,
        *,
        started_before: datetime | None = None,
        names: Container[str] | None = None,
    ) -> int:
        """Abort unfinished multipart uploads below ``prefix``, whose parts S3 bills.

        Both filters are optional; ``names`` are relative to the prefix. Return how many it were.
        """
        aborted = 0
        pages = self._client.get_paginator("list_multipart_uploads")
        for page in pages.paginate(Bucket=bucket, Prefix=prefix):
            for upload in page.get("Uploads", []):
                key = upload["Key"]
                is_old = started_before is None or upload["Initiated"] < started_before
                if is_old and (names is None or key.removeprefix(prefix) in names):
                    self._client.abort_multipart_upload(
                        Bucket=bucket, Key=key, UploadId=upload["UploadId"]
                    )
                    aborted += 1
        return aborted

    # ------------------------------------------------------------------ buckets

    def bucket_names(self, region: str) -> list[str]:
        """Return the account's buckets in ``region``."""
        listed = self._client.list_buckets(BucketRegion=region)["Buckets"]
        return [bucket["Name"] for bucket in listed if bucket.get("BucketRegion", region) == region]

    def bucket_region(self, bucket: str, prefix: str) -> str | None:
        """Return a bucket's region; None if the caller may list ``prefix`` but not see it.

        Raises:
            ClientError: S3 denies access; status 404 if there is no such bucket.
        """
        from botocore.exceptions import ClientError

        try:
            listed = self._client.list_objects_v2(Bucket=bucket, Prefix=prefix, MaxKeys=1)
            return _region_header(listed) or self._location(bucket)
        except ClientError as error:
            status = error.response["ResponseMetadata"].get("HTTPStatusCode")
            region = _region_header(error.response)
            # S3 answers a request for another region's bucket with a redirect that names it.
            if status not in (301, 400) or region in (None, self._client.meta.region_name):
                raise
            return region

    def _location(self, bucket: str) -> str | None:
        from botocore.exceptions import ClientError

        try:
            location = self._client.get_bucket_location(Bucket=bucket)["LocationConstraint"]
        except ClientError as error:
            if error.response["ResponseMetadata"].get("HTTPStatusCode") != 403:
                raise
            return None
        # S3 reports us-east-1 as no location, and EU for buckets of its first years in eu-west-1.
        return "eu-west-1" if location == "EU" else location or "us-east-1"

    def policy(self, bucket: str) -> dict[str, Any] | None:
        """Return the bucket's policy document; None if it has none."""
        from botocore.exceptions import ClientError

        try:
            text = self._client.get_bucket_policy(Bucket=bucket)["Policy"]
        except ClientError as error:
            if error_code(error) != "NoSuchBucketPolicy":
                raise
            return None
        document: dict[str, Any] = json.loads(text)
        return document

    def default_encryption(self, bucket: str) -> tuple[str, str | None]:
        """Return the algorithm that the bucket encrypts with by default, and its KMS key if any."""
        response = self._client.get_bucket_encryption(Bucket=bucket)
        rules = response["ServerSideEncryptionConfiguration"]["Rules"]
        default = rules[0]["ApplyServerSideEncryptionByDefault"]
        return default["SSEAlgorithm"], default.get("KMSMasterKeyID")


def _region_header(response: Mapping[str, Any]) -> str | None:
    headers = response.get("ResponseMetadata", {}).get("HTTPHeaders", {})
    region: str | None = headers.get("x-amz-bucket-region")
    return region


def store_of(
    session: boto3.Session, region: str | None = None, *, config: Config | None = None
) -> ObjectStore:
    """Return S3 as ``session`` reaches it, in ``region`` if that is not the session's."""
    return ObjectStore(session.client("s3", region_name=region, config=config))


_opening = threading.Lock()


def open_store(access: S3Access) -> ObjectStore:
    """Return this process's store with many connections, for pipelines of images and shards."""
    # Threads that start together share one client, which takes a third of a second to create.
    with _opening:
        return _open_store(access)


@lru_cache(maxsize=4)
def _open_store(access: S3Access) -> ObjectStore:
    import boto3
    from botocore.config import Config

    session = boto3.Session(profile_name=access.profile, region_name=access.region)
    prepare_session(session)
    config = Config(
        max_pool_connections=MAX_CONNECTIONS,
        retries={"mode": "adaptive", "max_attempts": 10},
        # S3 has no checksum for a range of an object; asking for one makes s3transfer send a HEAD
        # request ahead of every GET, which doubles the requests for a data set of small images.
        response_checksum_validation="when_required",
    )
    return ObjectStore(session.client("s3", config=config))


def _type(content_type: str | None) -> dict[str, Any]:
    return {} if content_type is None else {"ContentType": content_type}


def _page(response: Mapping[str, Any]) -> ListedPage:
    objects = [
        StoredObject(entry["Key"], entry["Size"], entry.get("ETag", ""), entry["LastModified"])
        for entry in response.get("Contents", ())
    ]
    folders = [entry["Prefix"] for entry in response.get("CommonPrefixes", ())]
    return ListedPage(objects, folders, bool(response.get("IsTruncated")))
