"""Uploads a stream as one object, in parts, if the object has not changed meanwhile."""

from __future__ import annotations

import io
import uuid
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from sm_train.entrypoints.storage.aws_session import (
    is_aborted_upload,
    is_condition_failed,
    is_missing,
)
from sm_train.entrypoints.storage.stream_upload import PART_BYTES, UPLOAD_PARTS

if TYPE_CHECKING:
    from botocore.exceptions import BotoCoreError, ClientError
    from types_boto3_s3 import S3Client
    from types_boto3_s3.type_defs import CompletedPartTypeDef, HeadObjectOutputTypeDef

_IDENTITY = "sm-train-write"
"""Key of an object's metadata with the identity of the write that made it."""

_Part = Future[str]
"""The ETag of a part."""


class ConditionalUpload(io.RawIOBase):
    """A file to write whose content becomes an object if that still has a version.

    Exactly one of several concurrent writers succeeds (S3 user guide, Conditional writes). If the
    answer to a request is lost, botocore repeats it, and S3 refuses the repetition because of the
    object that the first one has written: an identity in its metadata distinguishes it from another
    writer's. Memory holds :data:`UPLOAD_PARTS` parts and the one that is being filled.
    """

    def __init__(
        self, client: S3Client, bucket: str, key: str, etag: str | None, options: dict[str, Any]
    ) -> None:
        """Prepare an upload over the object with ``etag``, or of a new object if that is None."""
        self._client, self._bucket, self._key = client, bucket, key
        self._identity = {_IDENTITY: uuid.uuid4().hex}
        self._options = {**options, "Metadata": self._identity}
        self._condition: dict[str, Any] = (
            {"IfNoneMatch": "*"} if etag is None else {"IfMatch": etag}
        )
        self._buffer = bytearray()
        self._size = 0
        self._upload_id: str | None = None
        self._pool = ThreadPoolExecutor(UPLOAD_PARTS)
        self._pending: deque[_Part] = deque()
        self._etags: list[str] = []
        self.etag: str | None = None
        """ETag of the written object; None if another writer was faster."""

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._size

    def write(self, content: Any) -> int:
        """Take the next bytes; wait while too many parts are in flight."""
        view = memoryview(content).cast("B")
        self._buffer += view
        self._size += len(view)
        while len(self._buffer) >= PART_BYTES:
            self._send(bytes(self._buffer[:PART_BYTES]))
            del self._buffer[:PART_BYTES]
        return len(view)

    def _send(self, content: bytes) -> None:
        if self._upload_id is None:
            created = self._client.create_multipart_upload(
                Bucket=self._bucket, Key=self._key, **self._options
            )
            self._upload_id = created["UploadId"]
        number = len(self._etags) + len(self._pending) + 1
        self._pending.append(self._pool.submit(self._put_part, number, content))
        if len(self._pending) >= UPLOAD_PARTS:
            self._etags.append(self._pending.popleft().result())

    def _put_part(self, number: int, content: bytes) -> str:
        assert self._upload_id is not None
        part = self._client.upload_part(
            Bucket=self._bucket,
            Key=self._key,
            UploadId=self._upload_id,
            PartNumber=number,
            Body=content,
        )
        return part["ETag"]

    def finish(self) -> None:
        """Write the object; :attr:`etag` stays None if its version was not the expected one."""
        from botocore.exceptions import BotoCoreError, ClientError

        try:
            self.etag = self._put_whole() if self._upload_id is None else self._complete()
        except (ClientError, BotoCoreError) as error:
            self.etag = self._written_before(error)
            if self.etag is None and not self._is_refused(error):
                raise
            if self.etag is None:
                self.abort()
        self._pool.shutdown()

    def _is_refused(self, error: ClientError | BotoCoreError) -> bool:
        """Return whether S3 has not written the object because it is not the expected one."""
        from botocore.exceptions import ClientError

        if not isinstance(error, ClientError):
            return False
        # An object that was deleted meanwhile has no ETag to compare.
        is_deleted = "IfMatch" in self._condition and is_missing(error)
        return is_condition_failed(error) or is_deleted

    def _written_before(self, error: ClientError | BotoCoreError) -> str | None:
        """Return the ETag if the request that failed, or an attempt of it, wrote the object."""
        if not _may_be_written(error):
            return None
        head = self._head()
        if head is None or head["Metadata"].get(_IDENTITY) != self._identity[_IDENTITY]:
            return None
        return head["ETag"]

    def _head(self) -> HeadObjectOutputTypeDef | None:
        from botocore.exceptions import ClientError

        try:
            return self._client.head_object(Bucket=self._bucket, Key=self._key)
        except ClientError as error:
            if is_missing(error):
                return None
            raise

    def _put_whole(self) -> str:
        response = self._client.put_object(
            Bucket=self._bucket,
            Key=self._key,
            Body=bytes(self._buffer),
            **self._condition,
            **self._options,
        )
        return response["ETag"]

    def _complete(self) -> str:
        assert self._upload_id is not None
        if self._buffer:
            self._send(bytes(self._buffer))
        self._etags += [part.result() for part in self._pending]
        self._pending.clear()
        parts: list[CompletedPartTypeDef] = [
            {"PartNumber": number, "ETag": etag} for number, etag in enumerate(self._etags, start=1)
        ]
        response = self._client.complete_multipart_upload(
            Bucket=self._bucket,
            Key=self._key,
            UploadId=self._upload_id,
            MultipartUpload={"Parts": parts},
            **self._condition,
        )
        return response["ETag"]

    def abort(self) -> None:
        """Abort the upload, whose parts S3 bills."""
        self._pool.shutdown(cancel_futures=True)
        if self._upload_id is not None:
            self._client.abort_multipart_upload(
                Bucket=self._bucket, Key=self._key, UploadId=self._upload_id
            )
            self._upload_id = None


def _may_be_written(error: ClientError | BotoCoreError) -> bool:
    """Return whether an attempt of a request may have been carried out that ended with ``error``.

    Its answer was lost then, or it is that of a repetition.
    """
    from botocore.exceptions import ClientError

    if (
        not isinstance(error, ClientError)
        or error.response["ResponseMetadata"]["HTTPStatusCode"] >= 500
    ):
        return True
    refused = is_condition_failed(error) or is_aborted_upload(error) or is_missing(error)
    return refused and bool(error.response["ResponseMetadata"].get("RetryAttempts"))


@contextmanager
def upload_if(
    client: S3Client, bucket: str, key: str, etag: str | None, options: dict[str, Any]
) -> Iterator[ConditionalUpload]:
    """Open a :class:`ConditionalUpload`, which ends with the context: without an error, it is
    finished, otherwise aborted."""
    upload = ConditionalUpload(client, bucket, key, etag, options)
    try:
        yield upload
        upload.finish()
    except BaseException:
        upload.abort()
        raise
