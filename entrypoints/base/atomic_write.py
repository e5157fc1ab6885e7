"""Atomic file writes."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

NOT_UPLOADED_SUFFIX = ".sagemaker-ignore"
"""SageMaker does not upload files with this suffix from a checkpoint folder (AWS's own
aws/sagemaker-xgboost-container writes its checkpoints under such names first; checkpointing.py,
read 2026-11)."""


def write_atomic(path: Path, content: bytes) -> None:
    """Write ``content`` to a temporary file in the same folder, then rename it.

    After any failure, also a power cut, ``path`` holds either its previous content or all of
    ``content``. A file that exists keeps its mode, and a new one gets the mode of the umask. A link
    is followed. A device or a pipe, such as /dev/stdout, is written to and never replaced.

    Raises:
        OSError: the file cannot be written; the error names ``path``.
    """
    try:
        mode = _mode(path)
        if mode is None or stat.S_ISREG(mode):
            _replace(path.resolve(), content, mode)
        else:
            # Not resolved: /dev/stdout leads to a name such as pipe:[123], which is no path.
            path.write_bytes(content)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None


@contextmanager
def errors_of(path: Path) -> Iterator[None]:
    """Name ``path`` in errors of the system that name no file: those of open descriptors.

    Raises:
        OSError: any of the context.
    """
    try:
        yield
    except OSError as error:
        if error.filename is None and error.errno is not None:
            error.filename = str(path)
        raise


def durable_replace(temporary: Path, final: Path, *, exclusive: bool = False) -> None:
    """Give a written file its final name; content and name survive a power cut afterwards.

    The content is flushed before the name exists, and the folder after it. ``exclusive`` fails if
    the name exists, also on NFS, and keeps the temporary name.

    Raises:
        FileExistsError: the name exists, and the file was to be a new one.
        OSError: the file cannot be flushed or renamed.
    """
    with errors_of(final):
        _flush(temporary)
        (os.link if exclusive else os.replace)(temporary, final)
        _flush(final.parent)


def durable_folder(folder: Path) -> None:
    """Create a folder, unless it exists; its name survives a power cut afterwards.

    Raises:
        OSError: it cannot be created or flushed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with errors_of(folder.parent):
        _flush(folder.parent)


def _flush(path: Path) -> None:
    """Flush a file's content, or the names in a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _mode(path: Path) -> int | None:
    try:
        return path.stat().st_mode
    except FileNotFoundError:
        return None


def _replace(path: Path, content: bytes, mode: int | None) -> None:
    temporary = path.with_name(f".{path.name}.{os.urandom(4).hex()}{NOT_UPLOADED_SUFFIX}")
    # The kernel applies the umask, which a process cannot read without changing it.
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            if mode is not None:
                os.fchmod(file.fileno(), stat.S_IMODE(mode))
        durable_replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
