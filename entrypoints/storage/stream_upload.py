"""Uploads a stream as one object, in parts, while it is produced."""

from __future__ import annotations

import fcntl
import io
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from s3transfer.futures import TransferFuture
    from types_boto3_s3 import S3Client

PART_BYTES = 16 * 2**20
"""Size of an upload's parts. S3 allows 10,000 parts, so objects of up to 160 GB."""

UPLOAD_PARTS = 4
"""Parts of one object that are held in memory and sent in parallel, on as many connections. AWS
recommends one connection for each 85 to 90 MB/s (S3 user guide, performance guidelines)."""

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


@contextmanager
def upload_stream(client: S3Client, bucket: str, key: str) -> Iterator[ShardSink]:
    """Open a sink; its content becomes the object when the context exits without an error."""
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
        TransferManager(client, config) as manager,
    ):
        upload = manager.upload(
            source,
            bucket,
            key,
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


class DescriptorSink:
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


class _UploadEndedError(Exception):
    """The upload failed while its content was still being written."""


class _UploadSink(DescriptorSink):
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
