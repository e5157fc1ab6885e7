"""Names, files and marker of a checkpoint, shared by the job and the laptop.

A stage's checkpoint folder, locally and in S3::

    step-00000100/
        tensors-00000.safetensors   one file per rank with its shards of the tensors
        progress.json               schedule and EMA counters
        settings.json               what is learned, and how: not to be changed unnoticed
        data.npz                    sampler state
        complete.json               marker, written last
    final/                          the finished model, with settings.json

The laptop reads markers from S3 without PyTorch.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from sm_train.entrypoints.base.stored_fields import (
    list_of,
    optional,
    positive,
    record_of,
    size,
    text,
)

MARKER = "complete.json"
"""The file that makes a checkpoint complete. It lists all other files with size and digest."""

FORMAT_VERSION = 4

FINAL_MODEL = "final"
"""The folder of a stage's final model, next to its step folders."""

PROGRESS_FILE = "progress.json"
SETTINGS_FILE = "settings.json"
SAMPLER_FILE = "data.npz"

STEP_PREFIX = "step-"
_STEP_FOLDER = re.compile(rf"{STEP_PREFIX}(\d{{8,}})")
_SHARD_PREFIX, _SHARD_SUFFIX = "tensors-", ".safetensors"


def step_folder_name(step: int) -> str:
    """Return the folder name of a step's checkpoint, such as ``step-00000100``."""
    return f"{STEP_PREFIX}{step:08d}"


def parse_step_folder(name: str) -> int | None:
    """Return the step of a folder name; None if it does not name a checkpoint."""
    match = _STEP_FOLDER.fullmatch(name)
    return int(match[1]) if match else None


def step_folders(checkpoints: Path) -> list[Path]:
    """Return the step folders in ``checkpoints``, newest first, complete or not."""
    steps = {path: parse_step_folder(path.name) for path in checkpoints.glob(f"{STEP_PREFIX}*")}
    numbered = [(step, path) for path, step in steps.items() if step is not None]
    return [path for _, path in sorted(numbered, reverse=True)]


def shard_file_name(rank: int) -> str:
    """Return the name of the file with the tensor shards that ``rank`` writes."""
    return f"{_SHARD_PREFIX}{rank:05d}{_SHARD_SUFFIX}"


def is_shard_file(name: str) -> bool:
    """Return whether a file of a checkpoint holds tensor shards."""
    return name.startswith(_SHARD_PREFIX) and name.endswith(_SHARD_SUFFIX)


class LastCheckpointError(RuntimeError):
    """A training that was stopped could not save its last checkpoint; the message is one line."""


class MarkerError(ValueError):
    """The marker is damaged or of another format; the message is one line."""


class FormatError(MarkerError):
    """The marker is of another format, so another version of this toolkit wrote it."""


@dataclass(frozen=True)
class CheckpointFile:
    """One file of a checkpoint: its name, size in bytes and BLAKE3 digest."""

    name: str
    bytes: int
    blake3: str


_MARKER_FIELDS = record_of(
    {
        "step": size,
        "world_size": positive,
        "fingerprint": text,
        "files": list_of(record_of({"name": text, "bytes": size, "blake3": text})),
    }
)


@dataclass(frozen=True)
class CheckpointMarker:
    """The content of :data:`MARKER`; ``world_size`` is the number of ranks that wrote it.

    ``platform`` is what ran the job, None if it was started by hand.
    """

    step: int
    world_size: int
    fingerprint: str
    files: tuple[CheckpointFile, ...]
    platform: str | None = None

    def to_json(self) -> str:
        """Return the marker as JSON, its files sorted by name."""
        files = sorted(self.files, key=lambda file: file.name)
        document = {"format": FORMAT_VERSION, **asdict(self), "files": [asdict(f) for f in files]}
        return json.dumps(document, indent=2) + "\n"

    @classmethod
    def parse(cls, content: bytes) -> CheckpointMarker:
        """Parse the content of a marker file.

        Raises:
            MarkerError: it is damaged.
            FormatError: it is of another format.
        """
        try:
            document = json.loads(content)
            version = document["format"]
            if version == FORMAT_VERSION:
                fields = _MARKER_FIELDS(document)
                return cls(
                    fields["step"],
                    fields["world_size"],
                    fields["fingerprint"],
                    tuple(CheckpointFile(**file) for file in fields["files"]),
                    optional(text)(document.get("platform")),
                )
        except (ValueError, KeyError, TypeError, RecursionError):
            raise MarkerError(f"{MARKER} is damaged") from None
        raise FormatError(f"format {version}, this version reads {FORMAT_VERSION}")


def checkpoint_folders(names: Iterable[str]) -> dict[str, int | None]:
    """Return the folders of checkpoints among the files ``names``, sorted.

    These are folders with a marker, whatever a script calls them, and the step folders of the
    built-in training. The value is the step of one without a marker, else None.
    """
    folders: dict[str, int | None] = {}
    for name in names:
        folder, _, file = name.rpartition("/")
        first = name.partition("/")[0]
        if file == MARKER and folder:
            folders[folder] = None
        elif folder and (step := parse_step_folder(first)) is not None:
            folders.setdefault(first, step)
    return dict(sorted(folders.items()))


def checkpoint_series(folders: Iterable[str]) -> list[list[str]]:
    """Group folders whose names differ only in the number at the end, each group newest first."""
    series: dict[str, list[tuple[int, str]]] = {}
    for name in sorted(folders):
        stem = name.rstrip("0123456789")
        series.setdefault(stem, []).append((int(name.removeprefix(stem) or "0"), name))
    return [[name for _, name in sorted(group, reverse=True)] for group in series.values()]


ReadMarker = Callable[[str], bytes]
"""Returns the content of the marker in a folder."""


def complete_marker(
    name: str, sizes: Mapping[str, int], read_marker: ReadMarker
) -> tuple[CheckpointMarker | None, str]:
    """Return the marker of a complete checkpoint, or None and why it is incomplete.

    ``sizes`` maps the path of each file, from the folder that holds the checkpoints, to its size:
    uploads go file by file, so a marker alone says nothing of the files that it lists.
    """
    if f"{name}/{MARKER}" not in sizes:
        return None, f"no {MARKER}"
    try:
        marker = CheckpointMarker.parse(read_marker(name))
    except MarkerError as error:
        return None, str(error)
    problem = file_problem(name, marker, sizes)
    return (None, problem) if problem else (marker, "")


def file_problem(name: str, marker: CheckpointMarker, sizes: Mapping[str, int]) -> str:
    """Return which file of the marker is not in ``sizes``, in its size; empty if all are."""
    for file in marker.files:
        size = sizes.get(f"{name}/{file.name}")
        if size != file.bytes:
            return f"{file.name} {'is missing' if size is None else 'has the wrong size'}"
    return ""


@dataclass(frozen=True)
class NewestCheckpoint:
    """The newest complete checkpoint; ``name`` and ``marker`` are None if there is none.

    ``skipped`` are newer ones of the same kind of name, which are unusable, as (folder, reason).
    """

    name: str | None
    marker: CheckpointMarker | None
    skipped: tuple[tuple[str, str], ...] = ()

    @property
    def step(self) -> int | None:
        return None if self.marker is None else self.marker.step


Examine = Callable[[str], tuple[CheckpointMarker | None, str]]
"""Returns the marker of the checkpoint in a folder, or None and why it is unusable."""


def newest_complete(folders: Iterable[str], examine: Examine) -> NewestCheckpoint:
    """Return the newest checkpoint in ``folders`` that ``examine`` accepts.

    A script of the user's own names its checkpoints itself: their markers state the steps.
    """
    newest = NewestCheckpoint(None, None)
    skipped: list[tuple[str, str]] = []
    for names in checkpoint_series(folders):
        problems: list[tuple[str, str]] = []
        found = next(newest_first(names, examine, problems), None)
        skipped += problems
        if found is not None and (newest.step is None or found[1].step > newest.step):
            newest = NewestCheckpoint(*found)
    return replace(newest, skipped=tuple(skipped))


def newest_first(
    series: Sequence[str], examine: Examine, problems: list[tuple[str, str]]
) -> Iterator[tuple[str, CheckpointMarker]]:
    """Yield the checkpoints of one of :func:`checkpoint_series` that ``examine`` accepts.

    ``problems`` receives the folder and the reason of each other one that comes before them. The
    built-in training names a checkpoint after its step. What a number in another name means, only
    its script knows, so the markers of all are compared.
    """
    is_step = all(parse_step_folder(name) is not None for name in series)
    accepted: list[tuple[str, CheckpointMarker]] = []
    for name in series:
        marker, problem = examine(name)
        if marker is None:
            if is_step or not accepted:
                problems.append((name, problem))
        elif is_step:
            yield name, marker
        else:
            accepted.append((name, marker))
    yield from sorted(accepted, key=lambda found: found[1].step, reverse=True)


def newest_listed(sizes: Mapping[str, int], read_marker: ReadMarker) -> NewestCheckpoint:
    """Return the newest checkpoint whose files are all listed in ``sizes``, in their sizes.

    Who resumes from it also compares the digests.
    """
    return newest_complete(
        checkpoint_folders(sizes), lambda name: complete_marker(name, sizes, read_marker)
    )


def shard_bytes(files: Sequence[CheckpointFile]) -> int:
    """Return the total size of the tensor shards among ``files``, in bytes."""
    return sum(file.bytes for file in files if is_shard_file(file.name))
