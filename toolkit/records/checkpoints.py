"""A stage's checkpoints as stored in S3."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from sm_train.entrypoints.job_interface.checkpoint_layout import (
    FINAL_MODEL,
    MARKER,
    ReadMarker,
    complete_marker,
    newest_listed,
    parse_step_folder,
)
from sm_train.entrypoints.storage.storage import LocalFolder, Storage
from sm_train.entrypoints.storage.store import store_of
from sm_train.toolkit.aws.aws_errors import translate_aws_errors
from sm_train.toolkit.aws.s3 import split_uri
from sm_train.toolkit.base.errors import ExitCode, UserError
from sm_train.toolkit.records.run_job import RunJob

if TYPE_CHECKING:
    import boto3


@dataclass(frozen=True)
class StoredCheckpoint:
    """The newest complete checkpoint below a stage's prefix.

    ``step`` is None if there is none. ``skipped`` lists newer, incomplete checkpoints as (folder,
    reason). ``final`` is whether the stage's final model exists.
    """

    step: int | None
    skipped: tuple[tuple[str, str], ...]
    final: bool
    uri: str = ""
    region: str = ""
    """Prefix and region of that checkpoint: a stage that was relocated has several prefixes."""
    name: str | None = None
    """Its folder below the prefix."""
    platform: str | None = None
    """What ran the job that wrote it; None if that is unknown."""
    output: bool = False
    """Whether the output of the newest job, if it was looked for, holds a file."""
    model: Path | None = None
    """The folder on this machine with the final model; None if it is elsewhere."""


def latest_stored(session: boto3.Session, uri: str, jobs: Iterable[RunJob]) -> StoredCheckpoint:
    """Return the newest checkpoint that ``jobs`` of a stage left in any region; ``uri`` is the
    prefix in the session's region.

    Raises:
        UserError: AWS returns an error.
    """
    prefixes = {uri: session.region_name} | {job.checkpoint_uri: job.region for job in jobs}
    stored = [stored_checkpoints(session, prefix, region) for prefix, region in prefixes.items()]
    newest = max(
        stored, key=lambda folder_state: -1 if folder_state.step is None else folder_state.step
    )
    skipped = {
        folder: reason
        for folder_state in stored
        for folder, reason in folder_state.skipped
        if newest.step is None or (parse_step_folder(folder) or 0) > newest.step
    }
    return replace(
        newest,
        skipped=tuple(skipped.items()),
        final=any(folder_state.final for folder_state in stored),
    )


def stored_checkpoints(session: boto3.Session, uri: str, region: str) -> StoredCheckpoint:
    """Return the newest checkpoint below ``uri``, by one listing and the newest markers.

    SageMaker uploads file by file, so a checkpoint is complete if it has a marker and every file
    that the marker lists, with its size. The resuming job verifies the digests.

    Raises:
        UserError: AWS returns an error.
    """
    newest = _stored(*_list_files(session, uri, region))
    return replace(newest, uri=uri.rstrip("/"), region=region)


def output_keys(session: boto3.Session, job: RunJob) -> list[str]:
    """Return the keys that SageMaker stored of the job's model and output folder, at most 1,000.

    Raises:
        UserError: AWS returns an error.
    """
    uri = f"{job.output_uri}/"
    bucket, prefix = split_uri(uri)
    with translate_aws_errors(uri):
        page = next(store_of(session, job.region).pages(bucket, prefix))
    return [stored.key for stored in page.objects]


def stored_encryption(
    session: boto3.Session, stored: StoredCheckpoint
) -> tuple[str | None, str | None]:
    """Return the algorithm and the KMS key that S3 encrypted a checkpoint's marker with.

    Raises:
        UserError: AWS returns an error.
    """
    bucket, key = split_uri(f"{stored.uri}/{stored.name}/{MARKER}")
    with translate_aws_errors(f"s3://{bucket}/{key}"):
        head = store_of(session, stored.region).head(bucket, key)
    return (None, None) if head is None else (head.encryption, head.kms_key)


def require_stored(session: boto3.Session, uri: str, region: str, folder: str) -> None:
    """Refuse a checkpoint below ``uri`` that is missing or incomplete.

    Raises:
        UserError: it is, or AWS returns an error.
    """
    sizes, read_marker = _list_files(session, uri, region, folder)
    problem = "the folder does not exist"
    if sizes:
        _, problem = complete_marker(folder, sizes, read_marker)
    if problem:
        raise UserError(f"{uri}/{folder}: incomplete ({problem})", ExitCode.PREFLIGHT)


def _list_files(
    session: boto3.Session, uri: str, region: str, folder: str = ""
) -> tuple[dict[str, int], ReadMarker]:
    """Return the files below ``uri``, of one ``folder`` if given, and a reader of markers.

    Files are path below ``uri`` → size.

    Raises:
        UserError: AWS returns an error; the reader raises it too.
    """
    bucket, prefix = split_uri(uri.rstrip("/") + "/")
    store = store_of(session, region)
    with translate_aws_errors(f"checkpoints: {uri}"):
        listed = store.objects(bucket, f"{prefix}{folder}/" if folder else prefix)
        sizes = {stored.key.removeprefix(prefix): stored.bytes for stored in listed}

    def read_marker(name: str) -> bytes:
        with translate_aws_errors(f"checkpoints: {uri}"):
            return store.get(bucket, f"{prefix}{name}/{MARKER}")

    return sizes, read_marker


def local_checkpoints(folder: Path) -> StoredCheckpoint:
    """Return the newest complete checkpoint of a local run's stage, below ``folder``."""
    return checkpoints_in(LocalFolder(folder))


def checkpoints_in(storage: Storage) -> StoredCheckpoint:
    """Return the newest complete checkpoint of a stage, whose checkpoint folder is ``storage``.

    Raises:
        OSError: the storage cannot be read.
    """
    return _stored(storage.list_sizes(""), lambda name: storage.read(f"{name}/{MARKER}"))


def _stored(sizes: Mapping[str, int], read_marker: ReadMarker) -> StoredCheckpoint:
    newest = newest_listed(sizes, read_marker)
    final = any(path.startswith(f"{FINAL_MODEL}/") for path in sizes)
    platform = None if newest.marker is None else newest.marker.platform
    return StoredCheckpoint(newest.step, newest.skipped, final, name=newest.name, platform=platform)
