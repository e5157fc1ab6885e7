"""Reads and writes files in a local folder or below an S3 prefix.

A name is a path below the folder or prefix, with forward slashes. Writes are atomic: a local file
gets its name when all of its bytes are on the disk, an S3 object appears when its upload completes.
"""

from __future__ import annotations

import fcntl
import io
import os
import shutil
import threading
from collections.abc import Container, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from sm_train.entrypoints.common.bucket_owner import require_bucket_owners

if TYPE_CHECKING:
    from botocore.exceptions import ClientError
    from s3transfer.futures import TransferFuture
    from s3transfer.manager import TransferManager
    from types_boto3_s3 import S3Client

PART_BYTES = 16 * 2**20
"""Size of an upload's parts. S3 allows 10,000 parts, so objects of up to 160 GB."""

UPLOAD_PARTS = 4
"""Parts of one object that are held in memory and sent in parallel, on as many connections. AWS
recommends one connection for each 85 to 90 MB/s (S3 user guide, performance guidelines)."""

RANGE_BYTES = 8 * 2**20
"""Larger objects are downloaded in parallel, in ranges of this size; most images in one request."""

MAX_CONNECTIONS = 64
"""Requests to S3 that one process has in flight."""

_IO_CHUNK_BYTES = 2**20
"""Read from a response at a time; at most 64 of these wait to be copied into their objects."""

_PIPE_BYTES = 2**20
"""Capacity of the pipe into an upload; more is not allowed without privileges (pipe(7))."""

_MAX_IOVECS = 1024
"""Buffers that one writev takes (IOV_MAX of Linux)."""

BytesLike = bytes | memoryview


class ShardSink(Protocol):
    """Receives the bytes of a file that is being written."""

    def write(self, content: bytes, /) -> None: ...

    def writelines(self, buffers: Sequence[BytesLike], /) -> None:
        """Write the buffers one after another."""


class Storage(Protocol):
    """A local folder or an S3 prefix. Can be pickled."""

    def read(self, name: str) -> bytes:
        """Return the content of a file.

        Raises:
            FileNotFoundError: no such file.
            OSError: the file cannot be read.
        """

    def size(self, name: str) -> int | None:
        """Return the size of a file in bytes, or None if it does not exist."""

    def remove(self, name: str) -> None:
        """Remove a file if it exists."""

    def remove_folder(self, folder: str) -> None:
        """Remove all files below ``folder``; a local folder above it, too, if it is then empty."""

    def atomic_writer(self, name: str) -> AbstractContextManager[ShardSink]:
        """Open a sink whose content gets the name when the context exits without an error."""

    def has_files(self, folder: str) -> bool:
        """Return whether any file is below ``folder``."""

    def modified_ns(self, name: str) -> int:
        """Return when an existing file was last modified, Unix nanoseconds."""

    def set_modified_ns(self, name: str, modified_ns: int) -> None:
        """Set the modification time of a file, if the storage supports that."""

    def address(self, name: str) -> str:
        """Return the path or URI of a file, for messages."""


@dataclass(frozen=True)
class S3Access:
    """The AWS profile and region to reach S3 with; None leaves the choice to the environment."""

    profile: str | None = None
    region: str | None = None


@lru_cache(maxsize=4)
def s3_client(access: S3Access) -> S3Client:
    """Return this process's S3 client. It is thread-safe."""
    import boto3
    from botocore.config import Config

    session = boto3.Session(profile_name=access.profile, region_name=access.region)
    require_bucket_owners(session)
    config = Config(
        max_pool_connections=MAX_CONNECTIONS,
        retries={"mode": "adaptive", "max_attempts": 10},
        # S3 has no checksum for a range of an object; asking for one makes s3transfer send a HEAD
        # request ahead of every GET, which doubles the requests for a data set of small images.
        response_checksum_validation="when_required",
    )
    return session.client("s3", config=config)


def open_storage(address: str, access: S3Access) -> Storage:
    """Return the storage at a local path or an ``s3://`` URI."""
    if address.startswith("s3://"):
        bucket, _, prefix = address.removeprefix("s3://").partition("/")
        return S3Prefix(bucket, prefix.rstrip("/") + "/" if prefix.rstrip("/") else "", access)
    return LocalFolder(Path(address))


def write_file(storage: Storage, name: str, content: bytes) -> None:
    """Write a file atomically."""
    with storage.atomic_writer(name) as sink:
        sink.write(content)


def read_uri(address: str, access: S3Access) -> bytes:
    """Return the content of a local file or an ``s3://`` object.

    Raises:
        FileNotFoundError: it does not exist.
        OSError: it cannot be read.
    """
    if address.startswith("s3://"):
        bucket, _, key = address.removeprefix("s3://").partition("/")
        return _download(s3_client(access), bucket, key)
    with open(address, "rb", buffering=0) as file:  # noqa: PTH123  a Path costs more than the call
        return file.readall()


@dataclass(frozen=True)
class LocalFolder:
    """A folder in the local file system."""

    path: Path

    def read(self, name: str) -> bytes:
        return (self.path / name).read_bytes()

    def size(self, name: str) -> int | None:
        try:
            return (self.path / name).stat().st_size
        except FileNotFoundError:
            return None

    def remove(self, name: str) -> None:
        (self.path / name).unlink(missing_ok=True)

    def remove_folder(self, folder: str) -> None:
        path = self.path / folder
        shutil.rmtree(path, ignore_errors=True)
        for parent in path.relative_to(self.path).parents[:-1]:
            with suppress(OSError):  # other files are in it
                (self.path / parent).rmdir()

    @contextmanager
    def atomic_writer(self, name: str) -> Iterator[ShardSink]:
        final = self.path / name
        final.parent.mkdir(parents=True, exist_ok=True)
        partial = final.with_name(f".{final.name}.part")
        file = partial.open("wb", buffering=0)
        try:
            yield _DescriptorSink(file.fileno())
            os.fsync(file.fileno())
            file.close()
            partial.replace(final)
        except BaseException as error:
            with suppress(OSError):
                file.close()
            partial.unlink(missing_ok=True)
            if isinstance(error, OSError) and error.filename is None:
                error.filename = str(final)  # "no space left on device" does not name the file
            raise
        _sync_folder(final.parent)

    def has_files(self, folder: str) -> bool:
        path = self.path / folder
        return path.exists() and (not path.is_dir() or any(path.iterdir()))

    def modified_ns(self, name: str) -> int:
        return (self.path / name).stat().st_mtime_ns

    def set_modified_ns(self, name: str, modified_ns: int) -> None:
        os.utime(self.path / name, ns=(modified_ns, modified_ns))

    def address(self, name: str) -> str:
        return str(self.path / name)


class _DescriptorSink:
    """Writes buffers to a file descriptor without joining them first."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def write(self, content: bytes) -> None:
        self.writelines([content])

    def writelines(self, buffers: Sequence[BytesLike]) -> None:
        for first in range(0, len(buffers), _MAX_IOVECS):
            self._write_all(buffers[first : first + _MAX_IOVECS])

    def _write_all(self, buffers: Sequence[BytesLike]) -> None:
        remaining = sum(map(len, buffers)) - os.writev(self._descriptor, buffers)
        if remaining:  # a short write: the disk is full or a signal arrived; retry or raise
            content = memoryview(b"".join(buffers))
            while remaining:
                remaining -= os.write(self._descriptor, content[-remaining:])


def _sync_folder(folder: Path) -> None:
    """Flush the folder's directory entries to the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@dataclass(frozen=True)
class S3Prefix:
    """The objects below ``prefix``, which ends with a slash or is empty."""

    bucket: str
    prefix: str
    access: S3Access

    def read(self, name: str) -> bytes:
        return _download(s3_client(self.access), self.bucket, self.prefix + name)

    def size(self, name: str) -> int | None:
        from botocore.exceptions import ClientError

        try:
            head = s3_client(self.access).head_object(Bucket=self.bucket, Key=self.prefix + name)
        except ClientError as error:
            if is_missing(error):
                return None
            raise
        return head["ContentLength"]

    def remove(self, name: str) -> None:
        s3_client(self.access).delete_object(Bucket=self.bucket, Key=self.prefix + name)

    def remove_folder(self, folder: str) -> None:
        for name in self.list_sizes(folder):
            self.remove(f"{folder}/{name}")

    def create_if_absent(self, name: str, content: bytes) -> bool:
        """Put an object unless it exists; return whether this call created it.

        Exactly one of several concurrent callers creates the object.
        """
        from botocore.exceptions import ClientError

        try:
            s3_client(self.access).put_object(
                Bucket=self.bucket, Key=self.prefix + name, Body=content, IfNoneMatch="*"
            )
        except ClientError as error:
            # 409 ConditionalRequestConflict: a concurrent put of the same key won.
            code = error.response["Error"].get("Code")
            if code in ("PreconditionFailed", "ConditionalRequestConflict"):
                return False
            raise
        return True

    def list_sizes(self, folder: str) -> dict[str, int]:
        """Return the size in bytes of every object below ``folder``, by its name there."""
        base = f"{self.prefix}{folder}/"
        pages = s3_client(self.access).get_paginator("list_objects_v2")
        return {
            entry["Key"].removeprefix(base): entry["Size"]
            for page in pages.paginate(Bucket=self.bucket, Prefix=base)
            for entry in page.get("Contents", [])
        }

    def abort_uploads(
        self,
        folder: str,
        *,
        started_before: datetime | None = None,
        names: Container[str] | None = None,
    ) -> int:
        """Abort unfinished multipart uploads below ``folder``, whose parts S3 bills.

        Both filters are optional. Return the number of aborted uploads.
        """
        client = s3_client(self.access)
        base = f"{self.prefix}{folder}/"
        aborted = 0
        pages = client.get_paginator("list_multipart_uploads")
        for page in pages.paginate(Bucket=self.bucket, Prefix=base):
            for upload in page.get("Uploads", []):
                key = upload["Key"]
                is_old = started_before is None or upload["Initiated"] < started_before
                if is_old and (names is None or key.removeprefix(base) in names):
                    client.abort_multipart_upload(
                        Bucket=self.bucket, Key=key, UploadId=upload["UploadId"]
                    )
                    aborted += 1
        return aborted

    @contextmanager
    def atomic_writer(self, name: str) -> Iterator[ShardSink]:
        # A shard is produced as a stream, and s3transfer reads a file object: a pipe connects the
        # two. A temporary file would need 4 GB of disk (Lambda has 0.5 GB) and delay the upload
        # until the shard is finished. Memory is bounded: the pipe blocks the producer while
        # UPLOAD_PARTS are in flight.
        from s3transfer.manager import TransferConfig, TransferManager

        config = TransferConfig(
            multipart_threshold=PART_BYTES,
            multipart_chunksize=PART_BYTES,
            max_request_concurrency=UPLOAD_PARTS,
            max_in_memory_upload_chunks=UPLOAD_PARTS,
            max_submission_concurrency=1,  # reads the pipe
        )
        read_end, write_end = _open_pipe()
        with (
            # Each object has its own manager: an upload that waits for its producer must not
            # occupy the threads of the downloads that the producer waits for.
            open(read_end, "rb") as source,  # noqa: PTH123  a descriptor
            TransferManager(s3_client(self.access), config) as manager,
        ):
            upload = manager.upload(
                source,
                self.bucket,
                self.prefix + name,
                subscribers=[_CloseWhenDone(source)],  # type: ignore[list-item]  # duck-typed
            )
            with (
                suppress(_UploadEndedError),
                open(write_end, "wb", buffering=0) as pipe,  # noqa: PTH123  a descriptor
            ):
                try:
                    yield _UploadSink(pipe.fileno(), upload)
                except BaseException:
                    # Cancel before the pipe closes: s3transfer would take the end of the pipe for
                    # the end of the object and complete the upload. Cancelling aborts it.
                    upload.cancel()
                    raise
            upload.result()

    def has_files(self, folder: str) -> bool:
        listing = s3_client(self.access).list_objects_v2(
            Bucket=self.bucket, Prefix=f"{self.prefix}{folder}/", MaxKeys=1
        )
        return bool(listing.get("KeyCount"))

    def modified_ns(self, name: str) -> int:
        head = s3_client(self.access).head_object(Bucket=self.bucket, Key=self.prefix + name)
        return int(head["LastModified"].timestamp() * 1e9)

    def set_modified_ns(self, name: str, modified_ns: int) -> None:
        """Do nothing: S3 sets the time itself."""

    def address(self, name: str) -> str:
        return f"s3://{self.bucket}/{self.prefix}{name}"


class _UploadEndedError(Exception):
    """The upload failed while its content was still being written."""


class _UploadSink(_DescriptorSink):
    """Writes into the pipe of an upload; stops as soon as the upload has failed."""

    def __init__(self, descriptor: int, upload: TransferFuture) -> None:
        super().__init__(descriptor)
        self._upload = upload

    def writelines(self, buffers: Sequence[BytesLike]) -> None:
        # After an error s3transfer still reads the pipe to its end: without this check, a whole
        # shard would be packed before the error is raised.
        if self._upload.done():
            raise _UploadEndedError
        try:
            super().writelines(buffers)
        except BrokenPipeError:
            raise _UploadEndedError from None


class _CloseWhenDone:
    """Closes the read end of the pipe once the upload no longer reads it.

    A producer that is blocked by a full pipe then gets a BrokenPipeError.
    """

    def __init__(self, source: io.BufferedReader) -> None:
        self._source = source

    def on_done(self, **_: Any) -> None:
        """Run as s3transfer's callback at the end of a transfer."""
        self._source.close()


def _open_pipe() -> tuple[int, int]:
    """Return the read end and the write end of a pipe."""
    read_end, write_end = os.pipe()
    if hasattr(fcntl, "F_SETPIPE_SZ"):  # Linux only; other systems keep their default, 64 KB
        with suppress(OSError):  # the user's pipes have used up their limit
            fcntl.fcntl(write_end, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
    return read_end, write_end


@lru_cache(maxsize=4)
def _download_manager(client: S3Client) -> TransferManager:
    """Return the transfer manager that all threads of this process download with."""
    from s3transfer.manager import TransferConfig, TransferManager

    config = TransferConfig(
        multipart_threshold=RANGE_BYTES,
        multipart_chunksize=RANGE_BYTES,
        max_request_concurrency=MAX_CONNECTIONS,
        max_submission_concurrency=MAX_CONNECTIONS // 2,
        io_chunksize=_IO_CHUNK_BYTES,
        max_io_queue_size=64,
    )
    return TransferManager(client, config)


_download_lock = threading.Lock()  # TransferManager numbers its transfers without one


def _download(client: S3Client, bucket: str, key: str) -> bytes:
    """Return an object's content, all of one version; errors are those of the file system.

    Raises:
        FileNotFoundError: no such object.
        PermissionError: S3 denies access.
        OSError: any other error, also an object that was replaced during the download.
    """
    from botocore.exceptions import BotoCoreError, ClientError
    from s3transfer.exceptions import RetriesExceededError, S3DownloadFailedError

    address = f"s3://{bucket}/{key}"
    content = io.BytesIO()
    try:
        with _download_lock:
            download = _download_manager(client).download(bucket, key, content)
        download.result()
    except ClientError as error:
        code = error.response["Error"].get("Code", "")
        if is_missing(error):
            raise FileNotFoundError(2, "no such object", address) from None
        if code in ("403", "AccessDenied"):
            message = error.response["Error"].get("Message", "")
            raise PermissionError(13, f"S3 answers AccessDenied: {message}", address) from None
        raise OSError(5, f"S3 answers {code}", address) from None
    except RetriesExceededError as error:
        raise OSError(5, str(error.last_exception), address) from None
    except (BotoCoreError, S3DownloadFailedError) as error:
        raise OSError(5, str(error), address) from None
    return content.getvalue()


def is_missing(error: ClientError) -> bool:
    """Return whether S3 reports that the object does not exist."""
    return error.response["Error"].get("Code") in ("404", "NoSuchKey")


def is_aborted_upload(error: BaseException) -> bool:
    """Return whether S3 reports that the upload was aborted, by another process."""
    from botocore.exceptions import ClientError

    return isinstance(error, ClientError) and error.response["Error"].get("Code") == "NoSuchUpload"
