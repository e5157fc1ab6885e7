"""Copies what a job resumes from to the bucket of the region where it will run.

"Ensure that the S3 bucket is in the same Region as that of the current SageMaker AI session"
(SageMaker developer guide, Resume training from a checkpoint, 2026-11). S3 copies server-side. No
lock is needed: concurrent copies write the same objects to the same keys, a checkpoint's marker
last, and the job is started only after all of them exist. Objects copied before are skipped.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sm_train.entrypoints.job_interface.checkpoint_layout import MARKER, step_folder_name
from sm_train.entrypoints.storage.store import StoredObject, store_of
from sm_train.estimators.request.training_request import TrainingRequest, stage_name
from sm_train.toolkit.aws.aws_errors import translate_aws_errors
from sm_train.toolkit.aws.s3 import split_uri
from sm_train.toolkit.base.errors import UserError
from sm_train.toolkit.records.stage_state import StageState

if TYPE_CHECKING:
    import boto3

ProgressCallback = Callable[[int, int], None]
"""Progress callback ``(bytes_copied, bytes_total)``."""


@dataclass(frozen=True)
class FolderCopy:
    """All objects below ``source_uri``, to be copied below ``target_uri``."""

    source_uri: str
    source_region: str
    target_uri: str
    target_region: str


def replicate_inputs(
    session: boto3.Session,
    request: TrainingRequest,
    region: str,
    stages: Sequence[StageState],
    progress: ProgressCallback,
) -> bool:
    """Copy what ``request``, a job of one of ``stages`` in ``region``, needs from other buckets.

    Return whether anything had to be copied.

    Raises:
        UserError: AWS returns an error, or an object has disappeared.
    """
    copied = [
        copy_folder(session, folder, progress)
        for folder in required_copies(request, region, stages)
    ]
    return any(copied)


def required_copies(
    request: TrainingRequest, region: str, stages: Sequence[StageState]
) -> list[FolderCopy]:
    """Return the newest checkpoint of the request's stage, and the inputs from the previous stage,
    as far as they are not where the request reads them.
    """
    names = [stage.name for stage in stages]
    index = names.index(stage_name(request))
    stored, target = stages[index].stored, request["CheckpointConfig"]["S3Uri"].rstrip("/")
    copies = []
    if stored.step is not None and stored.uri != target:
        name = stored.name or step_folder_name(stored.step)
        copies.append(FolderCopy(f"{stored.uri}/{name}", stored.region, f"{target}/{name}", region))
    for channel in request["InputDataConfig"]:
        if channel["ChannelName"] in ("previous", "previous_state"):
            uri = channel["DataSource"]["S3DataSource"]["S3Uri"].rstrip("/")
            prefix, _, name = uri.rpartition("/")
            previous = stages[index - 1].stored
            if previous.uri != prefix:
                copies.append(FolderCopy(f"{previous.uri}/{name}", previous.region, uri, region))
    return copies


def copy_folder(session: boto3.Session, folder: FolderCopy, progress: ProgressCallback) -> bool:
    """Copy the missing objects and return whether there were any.

    Raises:
        UserError: AWS returns an error, or an object has disappeared.
    """
    with translate_aws_errors(f"copying {folder.source_uri} to {folder.target_uri}"):
        objects = _objects(session, folder.source_uri, folder.source_region)
        copied = _objects(session, folder.target_uri, folder.target_region)
        missing = [
            name
            for name, source in objects.items()
            if name not in copied or not _is_copy(copied[name], source)
        ]
        total = sum(source.bytes for source in objects.values())
        done = total - sum(objects[name].bytes for name in missing)
        counter = _ProgressCounter(progress, total, done)
        # The marker goes last: a checkpoint counts as complete once its marker exists.
        for marker_pass in (False, True):
            names = [name for name in missing if (name == MARKER) == marker_pass]
            _transfer(session, folder, names, counter)
        copied = _objects(session, folder.target_uri, folder.target_region)
    lost = [
        name
        for name, source in objects.items()
        if name not in copied or copied[name].bytes != source.bytes
    ]
    if lost or not objects:
        raise UserError(
            f"{folder.target_uri}: {lost[0] if lost else 'nothing'} was copied incompletely from "
            f"{folder.source_uri}; run this again, the copy continues where it ended"
        )
    return bool(missing)


def _is_copy(copied: StoredObject, original: StoredObject) -> bool:
    """Return whether ``copied`` is not older in S3: a step trained again has the same sizes."""
    return copied.bytes == original.bytes and copied.modified >= original.modified


def _objects(session: boto3.Session, uri: str, region: str) -> dict[str, StoredObject]:
    bucket, prefix = split_uri(f"{uri}/")
    listed = store_of(session, region).objects(bucket, prefix)
    return {stored.key.removeprefix(prefix): stored for stored in listed}


class _ProgressCounter:
    """Sums the progress of concurrent transfers."""

    def __init__(self, progress: ProgressCallback, total: int, done: int) -> None:
        self._progress, self._total, self._done = progress, total, done
        progress(done, total)

    def add(self, copied_bytes: int) -> None:
        """Count bytes that were copied."""
        self._done += copied_bytes
        self._progress(self._done, self._total)


def _transfer(
    session: boto3.Session, folder: FolderCopy, names: Sequence[str], counter: _ProgressCounter
) -> None:
    """Copy the objects server-side, large ones in parts, and wait for all of them."""
    source_bucket, source_prefix = split_uri(folder.source_uri)
    target_bucket, target_prefix = split_uri(folder.target_uri)
    store_of(session, folder.source_region).copy_to(
        store_of(session, folder.target_region),
        [
            ((source_bucket, f"{source_prefix}/{name}"), (target_bucket, f"{target_prefix}/{name}"))
            for name in names
        ],
        counter.add,
    )
