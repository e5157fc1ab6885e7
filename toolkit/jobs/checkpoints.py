"""A stage's checkpoints as they lie in S3, from any laptop."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from sm_train.entrypoints.common.checkpoint_layout import (
    FINAL_MODEL,
    MARKER,
    CheckpointMarker,
    MarkerError,
    parse_step_folder,
)
from sm_train.toolkit.aws.session import for_region, split_uri, translate_aws_errors
from sm_train.toolkit.jobs.training_job import TrainingJob


@dataclass(frozen=True)
class StoredCheckpoint:
    """What is below a stage's prefix: the newest whole checkpoint's step, and newer ones that are
    not whole, each with the reason. ``final`` says whether the stage's final model is there.
    """

    step: int | None
    passed_over: tuple[tuple[str, str], ...]
    final: bool
    uri: str = ""
    region: str = ""
    """Where that checkpoint lies: a stage that was moved has several prefixes."""


def latest_stored(session: Any, uri: str, jobs: Iterable[TrainingJob]) -> StoredCheckpoint:
    """What ``jobs`` of a stage have left, wherever they were; ``uri`` is the prefix in the
    session's region.

    Raises:
        UserError: AWS refuses.
    """
    prefixes = {uri: session.region_name} | {job.checkpoints: job.region for job in jobs}
    found = [
        stored_checkpoints(for_region(session, region), one) for one, region in prefixes.items()
    ]
    newest = max(found, key=lambda one: -1 if one.step is None else one.step)
    passed_over = {
        folder: reason
        for one in found
        for folder, reason in one.passed_over
        if newest.step is None or (parse_step_folder(folder) or 0) > newest.step
    }
    return replace(
        newest, passed_over=tuple(passed_over.items()), final=any(one.final for one in found)
    )


def stored_checkpoints(session: Any, uri: str) -> StoredCheckpoint:
    """What lies below ``uri``, by one listing and the newest markers.

    SageMaker copies file by file, so a folder counts by its marker: every file that it names must
    be there with its size. Digests are checked by the job that resumes.

    Raises:
        UserError: AWS refuses.
    """
    bucket, prefix = split_uri(uri.rstrip("/") + "/")
    client = session.client("s3")
    place = (uri.rstrip("/"), session.region_name)
    folders: dict[str, dict[str, int]] = {}
    with translate_aws_errors(f"checkpoints: {uri}"):
        pages = client.get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=prefix)
        for page in pages:
            for entry in page.get("Contents", ()):
                folder, _, name = entry["Key"].removeprefix(prefix).partition("/")
                folders.setdefault(folder, {})[name] = entry["Size"]
        passed_over: list[tuple[str, str]] = []
        steps = [(step, name) for name in folders if (step := parse_step_folder(name)) is not None]
        for step, name in sorted(steps, reverse=True):
            reason = f"no {MARKER}"
            if MARKER in folders[name]:
                key = f"{prefix}{name}/{MARKER}"
                marker = client.get_object(Bucket=bucket, Key=key)["Body"].read()
                reason = _missing(marker, folders[name])
            if not reason:
                return StoredCheckpoint(step, tuple(passed_over), FINAL_MODEL in folders, *place)
            passed_over.append((name, reason))
    return StoredCheckpoint(None, tuple(passed_over), FINAL_MODEL in folders, *place)


def _missing(marker: bytes, sizes: dict[str, int]) -> str:
    """What the marker names and the folder lacks; nothing where it is whole."""
    try:
        files = CheckpointMarker.parse(marker).files
    except MarkerError as error:
        return str(error)
    for file in files:
        if sizes.get(file.name) != file.bytes:
            return f"{file.name} is {'of another size' if file.name in sizes else 'missing'}"
    return ""
