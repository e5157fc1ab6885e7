"""Copies objects from bucket to bucket in S3 itself, also between regions."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from types_boto3_s3 import S3Client

_PART_BYTES = 256 << 20
"""Objects of at least this size are copied in parts; S3 copies at most 5 GB in one request."""

_CONCURRENT_PARTS = 16

ObjectName = tuple[str, str]
"""Bucket and key."""


def copy_objects(
    source: S3Client,
    target: S3Client,
    names: Iterable[tuple[ObjectName, ObjectName]],
    on_progress: Callable[[int], None],
) -> None:
    """Copy each object of ``names`` to the other name; large ones in parts.

    ``on_progress`` receives the bytes that were copied since its last call.
    """
    from boto3.s3.transfer import TransferConfig, create_transfer_manager

    settings = TransferConfig(
        multipart_threshold=_PART_BYTES,
        multipart_chunksize=_PART_BYTES,
        max_concurrency=_CONCURRENT_PARTS,
    )
    with create_transfer_manager(target, settings) as manager:
        copies = [
            manager.copy(
                {"Bucket": from_bucket, "Key": from_key},
                to_bucket,
                to_key,
                subscribers=[_Progress(on_progress)],  # type: ignore[list-item]  # duck-typed
                source_client=source,
            )
            for (from_bucket, from_key), (to_bucket, to_key) in names
        ]
        for copy in copies:
            copy.result()


class _Progress:
    """A subscriber of s3transfer that reports the bytes of each part."""

    def __init__(self, on_progress: Callable[[int], None]) -> None:
        self._on_progress = on_progress

    def on_progress(self, bytes_transferred: int, **_: Any) -> None:
        """Called by s3transfer."""
        self._on_progress(bytes_transferred)
