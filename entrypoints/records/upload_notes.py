"""The notes that uploads leave next to a checkpoint's files: what is known to be in storage.

SageMaker puts an empty ``FILE.sagemaker-uploading`` next to each file of a node's checkpoint folder
during its upload, and ``FILE.sagemaker-uploaded`` after it (aws/sagemaker-xgboost-container,
checkpointing.py, read 2026-11). The start script on Kubernetes and Slurm, and local runs, leave the
same. They come and go while the folder is read.

Standard library only.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path

from sm_train.entrypoints.job_interface.checkpoint_layout import (
    MARKER,
    CheckpointMarker,
    MarkerError,
    checkpoint_folders,
    checkpoint_series,
    step_folder_name,
)

UPLOAD_NOTES = "*.sagemaker-*"
"""Glob pattern of files in a checkpoint folder that are no content."""

UPLOADING_SUFFIX, UPLOADED_SUFFIX = ".sagemaker-uploading", ".sagemaker-uploaded"


@dataclass(frozen=True)
class UploadedSteps:
    """What a node's own notes say: the steps whose files are all uploaded, and if any note exists.

    ``complete`` are the steps of the checkpoints with a marker in the node's folder, and
    ``folders`` their folders. The marker comes last, but a node may hold no more than its own
    files, so that nobody can tell here whether others have lost theirs.
    """

    uploaded: tuple[int, ...]
    complete: tuple[int, ...]
    has_notes: bool
    folders: Mapping[int, str] = field(default_factory=dict)

    @property
    def newest(self) -> int | None:
        """The step of the newest checkpoint with a marker in the node's folder."""
        return max(self.complete, default=None)

    def folder_of(self, step: int) -> str:
        """Return the folder of a step's checkpoint."""
        return self.folders.get(step, step_folder_name(step))


def is_upload_note(name: str) -> bool:
    """Return whether a file of a checkpoint folder is no content."""
    return fnmatch(name.rpartition("/")[2], UPLOAD_NOTES)


def note(path: Path, suffix: str) -> Path:
    """Return the path of the note with ``suffix`` on ``path``."""
    return path.with_name(path.name + suffix)


def read_uploads(checkpoints: Path) -> UploadedSteps:
    """Read the notes in a node's folder of checkpoints.

    A checkpoint that this node restored has no notes: it counts as not uploaded here.
    """
    uploaded: list[int] = []
    complete: list[int] = []
    has_notes = False
    folders: dict[int, str] = {}
    for folder, marker, names in _complete_checkpoints(checkpoints):
        complete.append(marker.step)
        folders[marker.step] = folder
        own = {MARKER, *(file.name for file in marker.files)} & names
        if all(name + UPLOADED_SUFFIX in names for name in own):
            uploaded.append(marker.step)
        has_notes = has_notes or any(
            name.endswith((UPLOADING_SUFFIX, UPLOADED_SUFFIX)) for name in names
        )
    return UploadedSteps(tuple(uploaded), tuple(complete), has_notes, folders)


def _complete_checkpoints(checkpoints: Path) -> Iterator[tuple[str, CheckpointMarker, set[str]]]:
    """Yield folder, marker and file names of each checkpoint with a marker, newest first."""
    # Unlike rglob, os.walk ignores a folder that is removed meanwhile.
    markers = [
        (Path(parent) / MARKER).relative_to(checkpoints).as_posix()
        for parent, _, names in os.walk(checkpoints)
        if MARKER in names
    ]
    for series in checkpoint_series(checkpoint_folders(markers)):
        for name in series:
            folder = checkpoints / name
            with contextlib.suppress(OSError, MarkerError):
                marker = CheckpointMarker.parse((folder / MARKER).read_bytes())
                yield (
                    name,
                    marker,
                    {path.relative_to(folder).as_posix() for path in folder.rglob("*")},
                )


def stored_on_all(nodes: Iterable[UploadedSteps]) -> int | None:
    """Return the newest step that every node has uploaded; None if there is none."""
    steps = [set(node.uploaded) for node in nodes]
    return max(set.intersection(*steps), default=None) if steps else None
