"""Download objects so that an interrupted download continues where it ended."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from sm_train.entrypoints.storage.aws_session import is_condition_failed
from sm_train.entrypoints.storage.store import ObjectStore, StoredObject
from sm_train.toolkit.aws.aws_errors import translate_aws_errors
from sm_train.toolkit.base.errors import ExitCode, UserError

Progress = Callable[[int], None]
"""Receives the bytes that arrived since the last call, from several threads."""

_PARALLEL = 8
"""Files at a time: a single connection to S3 reaches 40 to 90 MB/s (AWS, "Performance guidelines
for Amazon S3", read 2026-11)."""
_BLOCK_BYTES = 2**20
_ATTEMPTS, _PAUSE_SECONDS = 5, 1.0


def download_all(
    store: ObjectStore,
    bucket: str,
    files: Sequence[tuple[StoredObject, Path]],
    progress: Progress,
) -> None:
    """Download each object to its path; what earlier calls downloaded stays.

    Raises:
        UserError: AWS returns an error, or an object changes meanwhile.
    """
    with ThreadPoolExecutor(_PARALLEL) as pool:
        tasks = [pool.submit(_download, store, bucket, *file, progress) for file in files]
        try:
            for task in tasks:
                task.result()
        except BaseException:
            for task in tasks:
                task.cancel()
            raise


def _download(
    store: ObjectStore, bucket: str, stored: StoredObject, path: Path, progress: Progress
) -> None:
    if path.is_file() and path.stat().st_size == stored.bytes:
        progress(stored.bytes)
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    # Of another ETag means of other content: never continued.
    partial = path.with_name(path.name + ".part-" + stored.etag.strip('"'))
    done = partial.stat().st_size if partial.is_file() else 0
    progress(done)
    failures = 0
    while done < stored.bytes or not partial.exists():
        try:
            _append(store, bucket, stored, partial, done, progress)
        except OSError as error:
            # urllib3's errors of a connection that ends early are not botocore's.
            now = partial.stat().st_size if partial.exists() else 0
            failures = 0 if now > done else failures + 1
            if failures == _ATTEMPTS or isinstance(error, PermissionError):
                raise UserError(
                    f"s3://{bucket}/{stored.key}: the download ends early ({error}); run the same "
                    "command again to resume it",
                    ExitCode.UNEXPECTED,
                ) from None
            time.sleep(_PAUSE_SECONDS * 2**failures)
        done = partial.stat().st_size
    partial.replace(path)


def _append(
    store: ObjectStore,
    bucket: str,
    stored: StoredObject,
    partial: Path,
    start: int,
    progress: Progress,
) -> None:
    """Append the object's bytes from ``start`` on.

    Raises:
        OSError: the connection ends early.
        UserError: AWS returns an error, or the object has changed.
    """
    from botocore.exceptions import ClientError, IncompleteReadError, ReadTimeoutError
    from urllib3.exceptions import HTTPError

    if not stored.bytes:
        partial.touch()
        return
    with translate_aws_errors(f"s3://{bucket}/{stored.key}"):
        try:
            body = store.stream(bucket, stored.key, start=start, etag=stored.etag)
        except ClientError as error:
            if is_condition_failed(error):
                raise UserError(
                    f"s3://{bucket}/{stored.key}: changed during the download; run the command "
                    "again",
                    ExitCode.UNEXPECTED,
                ) from None
            raise
    try:
        with partial.open("ab") as file:
            for block in body.iter_chunks(_BLOCK_BYTES):
                file.write(block)
                progress(len(block))
    except (HTTPError, IncompleteReadError, ReadTimeoutError) as error:
        raise ConnectionError(str(error)) from None
