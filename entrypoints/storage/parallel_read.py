"""Reads whole objects into memory, large ones in ranges that are requested in parallel."""

from __future__ import annotations

import io
import threading
from typing import TYPE_CHECKING

from sm_train.entrypoints.storage.aws_session import s3_errors_as_os_errors

if TYPE_CHECKING:
    from types_boto3_s3 import S3Client

RANGE_BYTES = 8 * 2**20
"""Larger objects are downloaded in parallel, in ranges of this size; most images in one request."""

_IO_CHUNK_BYTES = 2**20
"""Read from a response at a time; at most 64 of these wait to be copied into their objects."""


class ParallelReader:
    """Reads objects for all threads of this process, with at most ``requests`` in flight."""

    def __init__(self, client: S3Client, requests: int) -> None:
        from s3transfer.manager import TransferConfig, TransferManager

        config = TransferConfig(
            multipart_threshold=RANGE_BYTES,
            multipart_chunksize=RANGE_BYTES,
            max_request_concurrency=requests,
            max_submission_concurrency=requests // 2,
            io_chunksize=_IO_CHUNK_BYTES,
            max_io_queue_size=64,
        )
        self._manager = TransferManager(client, config)
        self._lock = threading.Lock()  # TransferManager numbers its transfers without one

    def read(self, bucket: str, key: str) -> bytes:
        """Return an object's content, all of one version; errors are those of the file system.

        Raises:
            FileNotFoundError: no such object.
            PermissionError: S3 denies access.
            OSError: any other error, also an object that was replaced during the download.
        """
        from s3transfer.exceptions import RetriesExceededError, S3DownloadFailedError

        address = f"s3://{bucket}/{key}"
        content = io.BytesIO()
        try:
            with s3_errors_as_os_errors(address):
                with self._lock:
                    download = self._manager.download(bucket, key, content)
                download.result()
        except RetriesExceededError as error:
            reason = f"{error.last_exception}; run the same command again"
            raise OSError(5, reason, address) from None
        except S3DownloadFailedError as error:
            raise OSError(5, str(error), address) from None
        return content.getvalue()
