"""Names, files and marker of a checkpoint, shared by the job and the laptop.

A stage's checkpoint folder, locally and in S3::

    step-00000100/
        tensors-00000.safetensors   one file per rank with its shards of the tensors
        progress.json               schedule and EMA counters
        settings.json               what is learned, and how: not to be changed unnoticed
        data.npz                    sampler state
        complete.json               marker, written last
    final/                          the finished model, with settings.json

Standard library only: the laptop reads markers from S3 without PyTorch.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

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
                return cls(
                    document["step"],
                    document["world_size"],
                    document["fingerprint"],
                    tuple(CheckpointFile(**file) for file in document["files"]),
                    document.get("platform"),
                )
        except (ValueError, KeyError, TypeError, RecursionError):
            raise MarkerError(f"{MARKER} is damaged") from None
        raise FormatError(f"format {version}, this version reads {FORMAT_VERSION}")


def shard_bytes(files: Sequence[CheckpointFile]) -> int:
    """Return the total size of the tensor shards among ``files``, in bytes."""
    return sum(file.bytes for file in files if is_shard_file(file.name))
