"""Checkpoints that are whole or are none.

``checkpoints/step-00000100/`` holds files whose names no two processes share, each written under
a temporary name and renamed, and last ``complete.json``: every file with its size and digest.
SageMaker copies the folder to S3 file by file, for all instances into one prefix, so a folder is
never renamed and one without its marker counts for nothing.
"""

from __future__ import annotations

import hashlib
import io
import json
import secrets
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from sm_train.entrypoints.common.file_digest import file_digest
from torch import Tensor

MARKER = "complete.json"
FORMAT = 2

MODEL, EMA = "model.", "ema."


class CheckpointError(RuntimeError):
    """A checkpoint cannot be used; the message is one line."""


@dataclass(frozen=True)
class CheckpointFile:
    """One file of a checkpoint: its name, bytes and digest (BLAKE3)."""

    name: str
    bytes: int
    blake3: str


@dataclass(frozen=True)
class CheckpointInfo:
    """A complete checkpoint; ``world_size`` is of the processes that wrote it."""

    folder: Path
    step: int
    world_size: int
    fingerprint: str


def step_folder(checkpoints: Path, step: int) -> Path:
    return checkpoints / f"step-{step:08d}"


def shard_file_name(rank: int) -> str:
    """The file of a process's share of the tensors."""
    return f"tensors-{rank:05d}.safetensors"


def shard_files(folder: Path) -> list[Path]:
    """Every process's share."""
    return sorted(folder.glob("tensors-*.safetensors"))


def architecture_hash(state: dict[str, Tensor]) -> str:
    """A digest of an architecture: the names and shapes of its weights."""
    shapes = sorted((name, list(tensor.shape)) for name, tensor in state.items())
    return hashlib.sha256(json.dumps(shapes).encode()).hexdigest()[:16]


def write_file(folder: Path, name: str, save: Callable[[Path], None]) -> CheckpointFile:
    """Write one file whole: ``save`` under a temporary name, digest, rename.

    The temporary name is nobody else's: machines that share the folder all write the marker.
    """
    temporary = folder / f".{name}.{secrets.token_hex(4)}.writing"
    try:
        save(temporary)
        file = CheckpointFile(name, temporary.stat().st_size, _digest(temporary))
        temporary.replace(folder / name)
    finally:
        temporary.unlink(missing_ok=True)
    return file


def write_marker(
    folder: Path, step: int, world_size: int, model_fingerprint: str, files: list[CheckpointFile]
) -> None:
    """Declare a checkpoint complete, now that every process has written its ``files``."""
    document = {
        "format": FORMAT,
        "step": step,
        "world_size": world_size,
        "fingerprint": model_fingerprint,
        "files": [asdict(file) for file in sorted(files, key=lambda file: file.name)],
    }
    write_file(folder, MARKER, lambda path: _write_text(path, json.dumps(document, indent=2)))


def latest_complete(
    checkpoints: Path, passed_over: Callable[[Path, str], None], *, verify: bool = True
) -> CheckpointInfo | None:
    """The newest checkpoint whose marker and digests are right; None if there is none.

    ``passed_over`` is told of every newer one that is not, and why. ``verify`` reads every byte.
    """
    for folder in sorted(checkpoints.glob("step-*"), reverse=True):
        try:
            return read_marker(folder, verify=verify)
        except CheckpointError as error:
            passed_over(folder, str(error))
    return None


def read_marker(folder: Path, *, verify: bool = True) -> CheckpointInfo:
    """What a checkpoint's marker says.

    Raises:
        CheckpointError: it is incomplete, damaged, or of another format.
    """
    try:
        text = (folder / MARKER).read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        raise CheckpointError(f"{folder}: incomplete (no {MARKER})") from None
    try:
        document = json.loads(text)
        if document["format"] != FORMAT:
            raise CheckpointError(f"{folder}: format {document['format']}, this reads {FORMAT}")
        files = [CheckpointFile(**entry) for entry in document["files"]]
        found = CheckpointInfo(
            folder, document["step"], document["world_size"], document["fingerprint"]
        )
    except (ValueError, KeyError, TypeError):
        raise CheckpointError(f"{folder}: {MARKER} is damaged") from None
    for file in files:
        _check(folder, file, verify)
    return found


def _check(folder: Path, file: CheckpointFile, verify: bool) -> None:
    path = folder / file.name
    if not path.is_file():
        raise CheckpointError(f"{folder}: {file.name} is missing")
    if path.stat().st_size != file.bytes:
        raise CheckpointError(
            f"{folder}: {file.name} has {path.stat().st_size} bytes of {file.bytes}"
        )
    if verify and _digest(path) != file.blake3:
        raise CheckpointError(f"{folder}: {file.name} is not what was written")


def invalidate(folder: Path) -> None:
    """Declare a folder incomplete before it is written again."""
    (folder / MARKER).unlink(missing_ok=True)


def prune(checkpoints: Path, keep: int) -> None:
    """Remove all but the newest ``keep`` complete checkpoints, and incomplete ones before them."""
    complete = 0
    for folder in sorted(checkpoints.glob("step-*"), reverse=True):
        if complete >= keep:
            # The marker goes first: a removal that is cut short leaves no false checkpoint.
            invalidate(folder)
            shutil.rmtree(folder, ignore_errors=True)
        complete += (folder / MARKER).exists()


def save_object(document: Any) -> Callable[[Path], None]:
    """Saves plain data and small tensors, as they are now, in PyTorch's format."""
    content = io.BytesIO()
    # By way of memory: of a full disk PyTorch itself only says that it is at another place.
    torch.save(document, content)
    return save_bytes(content.getvalue())


def save_bytes(content: bytes) -> Callable[[Path], None]:
    """Saves bytes as they are."""

    def save(path: Path) -> None:
        path.write_bytes(content)

    return save


def load_object(path: Path) -> Any:
    return torch.load(path, map_location="cpu", weights_only=True)


def _write_text(path: Path, text: str) -> None:
    path.write_text(text + "\n", encoding="utf-8")


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return file_digest(file)
