"""A stage's checkpoints as stored in S3."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from sm_train.entrypoints.common.checkpoint_layout import (
    FINAL_MODEL,
    MARKER,
    CheckpointMarker,
    MarkerError,
    parse_step_folder,
)
from sm_train.toolkit.aws.errors import translate_aws_errors
from sm_train.toolkit.aws.s3 import split_uri
from sm_train.toolkit.errors import ExitCode, UserError
from sm_train.toolkit.jobs.training_job import TrainingJob

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


def latest_stored(
    session: boto3.Session, uri: str, jobs: Iterable[TrainingJob]
) -> StoredCheckpoint:
    """Return the newest checkpoint that ``jobs`` of a stage left in any region; ``uri`` is the
    prefix in the session's region.

    Raises:
        UserError: AWS returns an error.
    """
    prefixes = {uri: session.region_name} | {job.checkpoint_uri: job.region for job in jobs}
    stored = [stored_checkpoints(session, prefix, region) for prefix, region in prefixes.items()]
    newest = max(stored, key=lambda one: -1 if one.step is None else one.step)
    skipped = {
        folder: reason
        for one in stored
        for folder, reason in one.skipped
        if newest.step is None or (parse_step_folder(folder) or 0) > newest.step
    }
    return replace(newest, skipped=tuple(skipped.items()), final=any(one.final for one in stored))


def stored_checkpoints(session: boto3.Session, uri: str, region: str) -> StoredCheckpoint:
    """Return the newest checkpoint below ``uri``, by one listing and the newest markers.

    SageMaker uploads file by file, so a checkpoint is complete if it has a marker and every file
    that the marker lists, with its size. The resuming job verifies the digests.

    Raises:
        UserError: AWS returns an error.
    """
    newest = _newest_complete(*_read_folders(session, uri, region))
    return replace(newest, uri=uri.rstrip("/"), region=region)


def require_stored(session: boto3.Session, uri: str, region: str, folder: str) -> None:
    """Refuse a checkpoint below ``uri`` that is missing or incomplete.

    Raises:
        UserError: it is, or AWS returns an error.
    """
    folders, read_marker = _read_folders(session, f"{uri}/{folder}", region)
    files = folders.get(folder, {})
    problem = f"no {MARKER}" if files else "the folder does not exist"
    if MARKER in files:
        problem = _incomplete(read_marker(folder), files)
    if problem:
        raise UserError(f"{uri}/{folder}: incomplete ({problem})", ExitCode.PREFLIGHT)


def _read_folders(
    session: boto3.Session, uri: str, region: str
) -> tuple[dict[str, dict[str, int]], Callable[[str], bytes]]:
    """List the step folders below ``uri``, or that of ``uri`` itself.

    Return the sizes of their files, and a function that reads a folder's marker.

    Raises:
        UserError: AWS returns an error.
    """
    parent, _, last = uri.rstrip("/").rpartition("/")
    is_step = parse_step_folder(last) is not None
    bucket, listed = split_uri(uri.rstrip("/") + "/")
    prefix = split_uri(f"{parent}/")[1] if is_step else listed
    client = session.client("s3", region_name=region)
    folders: dict[str, dict[str, int]] = {}
    with translate_aws_errors(f"checkpoints: {uri}"):
        pages = client.get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=listed)
        for page in pages:
            for entry in page.get("Contents", ()):
                folder, _, name = entry["Key"].removeprefix(prefix).partition("/")
                folders.setdefault(folder, {})[name] = entry["Size"]

    def read_marker(folder: str) -> bytes:
        with translate_aws_errors(f"checkpoints: {uri}"):
            key = f"{prefix}{folder}/{MARKER}"
            return client.get_object(Bucket=bucket, Key=key)["Body"].read()

    return folders, read_marker


def local_checkpoints(folder: Path) -> StoredCheckpoint:
    """Return the newest complete checkpoint of a local run's stage, below ``folder``."""
    folders: dict[str, dict[str, int]] = {}
    for path in folder.glob("*/*"):
        with contextlib.suppress(OSError):  # deleted by the job since
            folders.setdefault(path.parent.name, {})[path.name] = path.stat().st_size
    return _newest_complete(folders, lambda name: (folder / name / MARKER).read_bytes())


def _newest_complete(
    folders: dict[str, dict[str, int]], read_marker: Callable[[str], bytes]
) -> StoredCheckpoint:
    """Return the newest complete one of ``folders``: name → its files with their sizes."""
    skipped: list[tuple[str, str]] = []
    steps = [(step, name) for name in folders if (step := parse_step_folder(name)) is not None]
    for step, name in sorted(steps, reverse=True):
        problem = f"no {MARKER}"
        if MARKER in folders[name]:
            problem = _incomplete(read_marker(name), folders[name])
        if not problem:
            return StoredCheckpoint(step, tuple(skipped), FINAL_MODEL in folders)
        skipped.append((name, problem))
    return StoredCheckpoint(None, tuple(skipped), FINAL_MODEL in folders)


def _incomplete(marker: bytes, sizes: dict[str, int]) -> str:
    """Return why the folder lacks a file that the marker lists; empty if it is complete."""
    try:
        files = CheckpointMarker.parse(marker).files
    except MarkerError as error:
        return str(error)
    for file in files:
        if sizes.get(file.name) != file.bytes:
            problem = "has the wrong size" if file.name in sizes else "is missing"
            return f"{file.name} {problem}"
    return ""
