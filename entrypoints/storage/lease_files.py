"""Where leases are stored: files that are written only if they are as expected.

The storage's clock decides how old a file is, because the clocks of the machines that write and
read it may differ.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Protocol

from sm_train.entrypoints.base.atomic_write import durable_replace, errors_of
from sm_train.entrypoints.storage.store import ObjectStore

_COPY_BYTES = 2**20


@dataclass(frozen=True)
class AgedFile:
    """The content of a file, its version, and when it was written, by the storage's clock.

    ``modified`` is in Unix seconds, ``age`` in seconds until it was read. ``read`` is when that
    was, by this machine's clock.
    """

    content: bytes
    version: str
    modified: float
    age: float
    read: float = field(default_factory=time.time, compare=False)


class LeaseFiles(Protocol):
    """A place for leases. Names are paths with forward slashes."""

    def read(self, name: str) -> AgedFile | None:
        """Return a file; None if it does not exist."""

    def write_if(self, name: str, content: bytes, *, version: str | None) -> str | None:
        """Write a file if it has ``version``, or if it does not exist and ``version`` is None.

        Exactly one of several concurrent writers succeeds. Return the new version; None if another
        writer was faster.
        """

    def remove(self, name: str) -> None:
        """Remove a file if it exists."""


@dataclass(frozen=True)
class S3LeaseFiles:
    """Objects below a prefix. Age is by S3's clock, and conditions by ETag."""

    store: ObjectStore
    bucket: str
    prefix: str = ""

    def read(self, name: str) -> AgedFile | None:
        found = self.store.get_if_exists(self.bucket, self.prefix + name)
        if found is None:
            return None
        return AgedFile(found.content, found.etag, found.modified, found.age)

    def write_if(self, name: str, content: bytes, *, version: str | None) -> str | None:
        key = self.prefix + name
        kind = "application/json"
        return self.store.put_if(self.bucket, key, content, etag=version, content_type=kind)

    def remove(self, name: str) -> None:
        self.store.delete(self.bucket, self.prefix + name)


@dataclass(frozen=True)
class LocalLeaseFiles:
    """Files in a folder, which several machines may share.

    Age is by the clock that sets the times of files: a file server's, or that of this machine.
    """

    folder: Path

    def read(self, name: str) -> AgedFile | None:
        try:
            with (self.folder / name).open("rb") as file:
                status = os.fstat(file.fileno())
                content = file.read()
        except FileNotFoundError:
            return None
        age = max(0.0, _server_time(self.folder) - status.st_mtime)
        return AgedFile(content, _version(status), status.st_mtime, age)

    def write_if(self, name: str, content: bytes | IO[bytes], *, version: str | None) -> str | None:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
        try:
            _write(temporary, content)
            own = temporary.stat().st_ino
            with _lock(path.parent):
                if version is not None and _version(path.stat()) != version:
                    return None
                try:
                    durable_replace(temporary, path, exclusive=version is None)
                except (FileExistsError, FileNotFoundError):
                    # NFS repeats a request whose answer is lost, and then refuses it.
                    if path.stat().st_ino != own:
                        return None
                return _version(path.stat())
        except FileNotFoundError:
            return None
        finally:
            temporary.unlink(missing_ok=True)

    def version(self, name: str) -> str | None:
        """Return a file's version; None if it does not exist."""
        try:
            return _version((self.folder / name).stat())
        except FileNotFoundError:
            return None

    def remove(self, name: str) -> None:
        (self.folder / name).unlink(missing_ok=True)


def _server_time(folder: Path) -> float:
    """Return the time that a file gets which is written now, Unix seconds.

    A file system without a server for times (Lustre) takes them from the client. Where this process
    may not write, it is the local time.
    """
    probe = folder / f".clock.{uuid.uuid4().hex}"
    try:
        descriptor = os.open(probe, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
    except OSError:
        return time.time()
    try:
        os.utime(descriptor)  # NFS sends it as "the server's time" (RFC 1813, SET_TO_SERVER_TIME)
        return os.fstat(descriptor).st_mtime
    finally:
        os.close(descriptor)
        probe.unlink(missing_ok=True)


def _write(path: Path, content: bytes | IO[bytes]) -> None:
    """Write a file; ``content`` may be a large one."""
    with errors_of(path), path.open("wb") as file:
        if isinstance(content, bytes):
            file.write(content)
        else:
            shutil.copyfileobj(content, file, _COPY_BYTES)


def _version(status: os.stat_result) -> str:
    return f"{status.st_ino}-{status.st_mtime_ns}"


@contextmanager
def _lock(folder: Path) -> Iterator[None]:
    """Lock a folder among the processes of this machine, which leaves no file behind."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):  # some network file systems lock no folders
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
