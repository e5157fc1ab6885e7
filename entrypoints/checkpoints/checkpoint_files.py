"""Atomic checkpoints: a folder counts only once its marker lists every file.

Each rank writes its own files into ``checkpoints/step-00000100/``, under a temporary name that is
then renamed. ``complete.json`` comes last and holds every file with its size and digest. Every node
has its own folder with the files of its own ranks. SageMaker copies them to S3 file by file, from
all nodes into one prefix, in any order and slower than they are written, and deletes in S3 what a
node deletes. Only a job that starts gets the whole prefix, on every node. Therefore a folder is
never renamed, a folder without its marker is ignored, and a marker alone proves nothing.

Why not PyTorch's Distributed Checkpoint (DCP): ``async_save`` needs a Gloo process group next to
the training's own, which SMDDP forbids, and features of PyTorch 2.4, while the SMDDP images have
2.3. DCP also writes no digests, so it cannot detect a checkpoint that SageMaker copied in part.
Reconsider when SMDDP support is dropped.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import secrets
import shutil
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sm_train.entrypoints.base.atomic_write import NOT_UPLOADED_SUFFIX, durable_replace
from sm_train.entrypoints.base.digests import file_digest
from sm_train.entrypoints.job_interface.checkpoint_layout import (
    MARKER,
    CheckpointFile,
    CheckpointMarker,
    MarkerError,
    is_shard_file,
    newest_complete,
    parse_step_folder,
    step_folders,
)
from sm_train.entrypoints.job_interface.node_description import current_platform
from torch import Tensor

MODEL, EMA = "model.", "ema."
"""Prefixes of the names of tensors: weights and buffers, and the averaged weights."""


class CheckpointError(RuntimeError):
    """A checkpoint cannot be used; the message is one line."""


@dataclass(frozen=True)
class CheckpointInfo:
    """A complete checkpoint; ``world_size`` is the number of ranks that wrote it."""

    folder: Path
    step: int
    world_size: int
    fingerprint: str


def shard_files(folder: Path) -> list[Path]:
    """Return the files with the tensor shards of every rank that wrote the checkpoint.

    The folder may hold other such files: of an attempt with more ranks that never completed it.

    Raises:
        CheckpointError: the marker is missing or damaged.
    """
    names = [file.name for file in parse_marker(folder).files if is_shard_file(file.name)]
    return [folder / name for name in sorted(names)]


def architecture_hash(state: Mapping[str, Tensor], base: str | None = None) -> str:
    """Return a digest of an architecture: the names and shapes of its weights.

    ``base`` identifies the weights that are not trained and in no checkpoint; None if there are
    none.
    """
    shapes: list[Any] = sorted((name, list(tensor.shape)) for name, tensor in state.items())
    if base is not None:
        shapes.append(base)
    return hashlib.sha256(json.dumps(shapes).encode()).hexdigest()[:16]


def write_file(
    folder: Path, name: str, save: Callable[[Path], str | None], reusable: Path | None = None
) -> CheckpointFile:
    """Write one file: ``save`` it under a temporary name, digest it, flush it, rename it.

    ``save`` may return the file's digest. It overwrites ``reusable``, a file that nobody needs.
    """
    temporary = folder / f".{name}.{secrets.token_hex(4)}{NOT_UPLOADED_SUFFIX}"
    try:
        if reusable is not None:
            with contextlib.suppress(FileNotFoundError):
                reusable.replace(temporary)
        digest = save(temporary) or _digest(temporary)
        file = CheckpointFile(name, temporary.stat().st_size, digest)
        durable_replace(temporary, folder / name)
    finally:
        temporary.unlink(missing_ok=True)
    return file


def write_marker(
    folder: Path, step: int, world_size: int, fingerprint: str, files: Sequence[CheckpointFile]
) -> None:
    """Mark a checkpoint complete; call it after every rank has written its ``files``."""
    marker = CheckpointMarker(step, world_size, fingerprint, tuple(files), current_platform())
    write_file(folder, MARKER, save_bytes(marker.to_json().encode()))


def latest_complete(
    checkpoints: Path, on_skip: Callable[[Path, str], None], *, verify: bool = True
) -> CheckpointInfo | None:
    """Return the newest checkpoint with a valid marker and intact files; None if there is none.

    Call ``on_skip`` with each newer folder that is unusable and the reason. ``verify`` compares
    digests, which reads every byte.
    """

    def examine(name: str) -> tuple[CheckpointMarker | None, str]:
        try:
            return _intact_marker(checkpoints / name, verify=verify), ""
        except CheckpointError as error:
            return None, str(error)

    newest = newest_complete([folder.name for folder in step_folders(checkpoints)], examine)
    for name, reason in newest.skipped:
        on_skip(checkpoints / name, reason)
    if newest.name is None or newest.marker is None:
        return None
    return _info(checkpoints / newest.name, newest.marker)


def read_marker(folder: Path, *, verify: bool = True) -> CheckpointInfo:
    """Read a checkpoint's marker and check the files that it lists.

    Raises:
        CheckpointError: it is incomplete, damaged, or of another format.
    """
    return _info(folder, _intact_marker(folder, verify=verify))


def _intact_marker(folder: Path, *, verify: bool) -> CheckpointMarker:
    marker = parse_marker(folder)
    for file in marker.files:
        check_file(folder, file, verify=verify)
    return marker


def _info(folder: Path, marker: CheckpointMarker) -> CheckpointInfo:
    return CheckpointInfo(folder, marker.step, marker.world_size, marker.fingerprint)


def parse_marker(folder: Path) -> CheckpointMarker:
    """Read a checkpoint's marker, without the files that it lists.

    Raises:
        CheckpointError: it is missing, damaged, or of another format.
    """
    try:
        return CheckpointMarker.parse((folder / MARKER).read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        raise CheckpointError(f"{folder}: incomplete (no {MARKER})") from None
    except MarkerError as error:
        raise CheckpointError(f"{folder}: {error}") from None


def check_file(folder: Path, file: CheckpointFile, *, verify: bool = True) -> None:
    """Compare a file with its entry in the marker; ``verify`` compares the digest as well.

    Raises:
        CheckpointError: it is missing or differs.
    """
    path = folder / file.name
    if not path.is_file():
        raise CheckpointError(f"{folder}: {file.name} is missing")
    if path.stat().st_size != file.bytes:
        raise CheckpointError(
            f"{folder}: {file.name} has {path.stat().st_size} bytes of {file.bytes}"
        )
    if verify and _digest(path) != file.blake3:
        raise CheckpointError(f"{folder}: the digest of {file.name} does not match the marker")


def invalidate(folder: Path) -> None:
    """Mark a folder incomplete before it is written again."""
    (folder / MARKER).unlink(missing_ok=True)


def remove(folder: Path) -> None:
    """Remove a checkpoint, the marker first: an interrupted removal must not leave one that counts.

    What another process adds meanwhile stays, such as SageMaker's notes on uploads.
    """
    invalidate(folder)
    shutil.rmtree(folder, ignore_errors=True)


def surplus(
    checkpoints: Path,
    keep: int,
    step: int,
    committed: int | None = None,
    protected: Collection[int] = (),
) -> list[Path]:
    """Return the folders that go before the checkpoint of ``step`` is written.

    Of the earlier steps the newest ``keep`` complete ones and the ``protected`` ones stay. Those of
    later steps go as well:
    the job skipped them when it resumed, and they would count as the newest. The checkpoint of
    ``committed`` counts as complete although another process may still be writing its marker.
    """
    complete = 0
    folders = []
    for folder in step_folders(checkpoints):
        number = parse_step_folder(folder.name)
        assert number is not None
        is_complete = number == committed or (folder / MARKER).exists()
        if number < step and is_complete and (complete < keep or number in protected):
            complete += 1
        elif number != step:
            folders.append(folder)
    return folders


def save_bytes(content: bytes) -> Callable[[Path], None]:
    """Return a function that writes ``content`` to a path, for :func:`write_file`."""

    def save(path: Path) -> None:
        path.write_bytes(content)

    return save


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return file_digest(file)
