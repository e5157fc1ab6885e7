"""Brings what a job goes on from to the bucket of the place where it will run.

"Ensure that the S3 bucket is in the same Region as that of the current SageMaker AI session"
(SageMaker developer guide, Resume training from a checkpoint, 2026-11). S3 copies by itself, from
server to server. No lock is needed: whoever copies, the same objects come to lie at the same
places, a checkpoint's marker last, and the job is started only when all of them are there. What
was copied before is not copied again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sm_train.entrypoints.common.checkpoint_layout import MARKER, step_folder_name
from sm_train.estimators.bundle.bundle import ARCHIVE_NAME
from sm_train.estimators.request.training import TrainingRequest, staged_uri
from sm_train.toolkit.aws.session import for_region, split_uri, translate_aws_errors
from sm_train.toolkit.errors import UserError
from sm_train.toolkit.jobs.stage_state import StageState
from sm_train.toolkit.submit.submission import FallbackTarget

Progress = Callable[[int, int], None]
"""Is told of bytes: those that are there, and all."""

_PART_BYTES = 256 << 20
"""From this size on an object is copied in parts; in one piece S3 copies 5 GB at most."""

_PARTS_AT_ONCE = 16


@dataclass(frozen=True)
class FolderCopy:
    """What lies below ``source``, in ``region``, and where it has to lie."""

    source: str
    region: str
    target: str


@dataclass(frozen=True)
class _Object:
    bytes: int
    written: datetime


def replicate_inputs(
    session: Any,
    request: TrainingRequest,
    region: str,
    stages: Sequence[StageState],
    progress: Progress,
) -> bool:
    """Copy what ``request``, a job of one of ``stages`` in ``region``, needs of other places;
    returns whether anything was not there yet.

    Raises:
        UserError: AWS refuses, or something was not there any more.
    """
    copied = [
        _copy(for_region(session, folder.region), for_region(session, region), folder, progress)
        for folder in required_copies(request, stages)
    ]
    return any(copied)


def stage_fallback_code(
    session: Any, elsewhere: Sequence[FallbackTarget], sent: TrainingRequest
) -> None:
    """Leave the run's code at each fallback, too, as ``sent`` has it at the run's own place.

    Raises:
        UserError: AWS refuses.
    """
    own = staged_uri(sent)
    drivers = [one for one in sent["InputDataConfig"] if one["ChannelName"] == "sm_drivers"]
    for one in elsewhere:
        there, staged = for_region(session, one.place.region), one.staged(own)
        bucket, key = split_uri(f"{staged}/code/{ARCHIVE_NAME}")
        with translate_aws_errors(f"{one.place.where}: s3://{bucket}/{key}"):
            there.client("s3").put_object(Bucket=bucket, Key=key, Body=one.bundle.archive)
        if drivers:
            region = session.region_name
            folder = FolderCopy(f"{own}/sm_drivers", region, f"{staged}/sm_drivers")
            _copy(session, there, folder, lambda done, total: None)


def required_copies(request: TrainingRequest, stages: Sequence[StageState]) -> list[FolderCopy]:
    """The newest checkpoint of the request's stage, and what it takes of the stage before, where
    these lie at another place.
    """
    names = [stage.name for stage in stages]
    index = names.index(request["HyperParameters"]["stage"])
    own, target = stages[index].stored, request["CheckpointConfig"]["S3Uri"]
    found = []
    if own.step is not None and own.uri != target:
        name = step_folder_name(own.step)
        found.append(FolderCopy(f"{own.uri}/{name}", own.region, f"{target}/{name}"))
    for channel in request["InputDataConfig"]:
        if channel["ChannelName"] in ("previous", "previous_state"):
            uri = channel["DataSource"]["S3DataSource"]["S3Uri"].rstrip("/")
            prefix, _, name = uri.rpartition("/")
            before = stages[index - 1].stored
            if before.uri != prefix:
                found.append(FolderCopy(f"{before.uri}/{name}", before.region, uri))
    return found


def _copy(here: Any, there: Any, folder: FolderCopy, progress: Progress) -> bool:
    """Copy what is not there yet; returns whether there was anything."""
    with translate_aws_errors(f"copying {folder.source} to {folder.target}"):
        objects, copied = _objects(here, folder.source), _objects(there, folder.target)
        todo = [
            name
            for name, one in objects.items()
            if name not in copied or not _is_copy(copied[name], one)
        ]
        total = sum(one.bytes for one in objects.values())
        done = _Done(progress, total, total - sum(objects[name].bytes for name in todo))
        for last in (False, True):
            names = [name for name in todo if (name == MARKER) == last]
            _transfer(here, there, folder, names, done)
        copied = _objects(there, folder.target)
    lost = [
        name
        for name, one in objects.items()
        if name not in copied or copied[name].bytes != one.bytes
    ]
    if lost or not objects:
        raise UserError(
            f"{folder.target}: {lost[0] if lost else 'nothing'} came of {folder.source}; look "
            "again, the copy goes on where it was"
        )
    return bool(todo)


def _is_copy(copied: _Object, original: _Object) -> bool:
    """By S3's clock: a step that was trained again would have the same sizes."""
    return copied.bytes == original.bytes and copied.written >= original.written


def _objects(session: Any, uri: str) -> dict[str, _Object]:
    bucket, prefix = split_uri(f"{uri}/")
    pages = session.client("s3").get_paginator("list_objects_v2")
    return {
        entry["Key"].removeprefix(prefix): _Object(entry["Size"], entry["LastModified"])
        for page in pages.paginate(Bucket=bucket, Prefix=prefix)
        for entry in page.get("Contents", ())
    }


class _Done:
    """Counts what has been copied, for all transfers at once."""

    def __init__(self, progress: Progress, total: int, done: int) -> None:
        self._progress, self._total, self._done = progress, total, done
        progress(done, total)

    def on_progress(self, bytes_transferred: int, **_: Any) -> None:
        """What s3transfer calls of a subscriber."""
        self._done += bytes_transferred
        self._progress(self._done, self._total)


def _transfer(here: Any, there: Any, folder: FolderCopy, names: Sequence[str], done: _Done) -> None:
    """Ask S3 for the copies, in parts where they are large, and wait for all of them."""
    from boto3.s3.transfer import TransferConfig, create_transfer_manager

    settings = TransferConfig(
        multipart_threshold=_PART_BYTES,
        multipart_chunksize=_PART_BYTES,
        max_concurrency=_PARTS_AT_ONCE,
    )
    source, prefix = split_uri(folder.source)
    target, below = split_uri(folder.target)
    with create_transfer_manager(there.client("s3"), settings) as manager:
        copies = [
            manager.copy(
                {"Bucket": source, "Key": f"{prefix}/{name}"},
                target,
                f"{below}/{name}",
                subscribers=[done],  # type: ignore[list-item]  # duck-typed
                source_client=here.client("s3"),
            )
            for name in names
        ]
        for one in copies:
            one.result()
