"""Reads and writes files in a local folder or below an S3 prefix.

A name is a path below the folder or prefix, with forward slashes. Writes are atomic: a local file
gets its name when all of its bytes are on the disk, an S3 object appears when its upload completes.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Container, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from io import RawIOBase
from pathlib import Path
from typing import IO, Any, Protocol

from sm_train.entrypoints.base.atomic_write import durable_replace, errors_of
from sm_train.entrypoints.storage.aws_session import s3_errors_as_os_errors
from sm_train.entrypoints.storage.conditional_upload import ConditionalUpload
from sm_train.entrypoints.storage.lease_files import (
    AgedFile,
    LeaseFiles,
    LocalLeaseFiles,
    S3LeaseFiles,
)
from sm_train.entrypoints.storage.object_file import open_object
from sm_train.entrypoints.storage.store import ObjectStore, S3Access, open_store
from sm_train.entrypoints.storage.stream_upload import PART_BYTES, DescriptorSink, ShardSink


class Storage(Protocol):
    """A local folder or an S3 prefix. Can be pickled."""

    def read(self, name: str) -> bytes:
        """Return the content of a file.

        Raises:
            FileNotFoundError: no such file.
            OSError: the file cannot be read.
        """

    def read_aged(self, name: str) -> AgedFile:
        """Return a small file, and when it was written by the storage's clock.

        Raises:
            FileNotFoundError: no such file.
            OSError: the file cannot be read.
        """

    def size(self, name: str) -> int | None:
        """Return the size of a file in bytes, or None if it does not exist."""

    def remove(self, name: str) -> None:
        """Remove a file if it exists."""

    def remove_folder(self, folder: str) -> None:
        """Remove all files below ``folder``; a local folder above it, too, if it is then empty."""

    def remove_versions(self, name: str) -> None:
        """Remove a file if it exists, and earlier versions of it that the storage keeps."""

    def open(self, name: str) -> RawIOBase:
        """Open a file to read parts of it.

        Raises:
            FileNotFoundError: no such file.
        """

    def version(self, name: str) -> str | None:
        """Return what changes with a file's content; None if it does not exist."""

    def replace_if(self, name: str, file: IO[bytes], version: str | None) -> bool:
        """Write the content of ``file`` over a stored one if that still has ``version``.

        With None, write it if there is none yet. Return whether it was written.
        """

    def atomic_writer(self, name: str) -> AbstractContextManager[ShardSink]:
        """Open a sink whose content gets the name when the context exits without an error."""

    def has_files(self, folder: str) -> bool:
        """Return whether any file is below ``folder``."""

    def list_sizes(self, folder: str) -> dict[str, int]:
        """Return the size in bytes of every file below ``folder``, by its name there.

        An empty ``folder`` lists everything.
        """

    def modified_ns(self, name: str) -> int:
        """Return when an existing file was last modified, Unix nanoseconds."""

    def set_modified_ns(self, name: str, modified_ns: int) -> None:
        """Set the modification time of a file, if the storage supports that."""

    def address(self, name: str) -> str:
        """Return the path or URI of a file, for messages."""

    @property
    def lease_files(self) -> LeaseFiles:
        """Leases in the storage."""


def open_storage(address: str, access: S3Access) -> Storage:
    """Return the storage at a local path or an ``s3://`` URI."""
    if address.startswith("s3://"):
        bucket, _, prefix = address.removeprefix("s3://").partition("/")
        return S3Prefix(bucket, prefix.rstrip("/") + "/" if prefix.rstrip("/") else "", access)
    return LocalFolder(Path(address))


def write_file(storage: Storage, name: str, content: bytes) -> None:
    """Write a file atomically."""
    with storage.atomic_writer(name) as sink:
        sink.write(content)


def store_file(storage: Storage, name: str, file: IO[bytes]) -> None:
    """Write the content of ``file`` atomically, a part at a time."""
    file.seek(0)
    with storage.atomic_writer(name) as sink:
        while content := file.read(PART_BYTES):
            sink.write(content)


def read_uri(address: str, access: S3Access) -> bytes:
    """Return the content of a local file or an ``s3://`` object.

    Raises:
        FileNotFoundError: it does not exist.
        OSError: it cannot be read.
    """
    if address.startswith("s3://"):
        bucket, _, key = address.removeprefix("s3://").partition("/")
        return open_store(access).read(bucket, key)
    with open(address, "rb", buffering=0) as file:  # noqa: PTH123  a Path costs more than the call
        return file.readall()


@dataclass(frozen=True)
class LocalFolder:
    """A folder in the local file system."""

    path: Path

    def read(self, name: str) -> bytes:
        return (self.path / name).read_bytes()

    def read_aged(self, name: str) -> AgedFile:
        return _existing(self.lease_files.read(name), self.address(name))

    def size(self, name: str) -> int | None:
        try:
            return (self.path / name).stat().st_size
        except (FileNotFoundError, NotADirectoryError):
            return None

    def remove(self, name: str) -> None:
        (self.path / name).unlink(missing_ok=True)

    def remove_versions(self, name: str) -> None:
        self.remove(name)

    def open(self, name: str) -> RawIOBase:
        return (self.path / name).open("rb", buffering=0)

    def version(self, name: str) -> str | None:
        return self.lease_files.version(name)

    def replace_if(self, name: str, file: IO[bytes], version: str | None) -> bool:
        return self.lease_files.write_if(name, file, version=version) is not None

    def remove_folder(self, folder: str) -> None:
        path = self.path / folder
        shutil.rmtree(path, ignore_errors=True)
        for parent in path.relative_to(self.path).parents[:-1]:
            with suppress(OSError):  # other files are in it
                (self.path / parent).rmdir()

    @contextmanager
    def atomic_writer(self, name: str) -> Iterator[ShardSink]:
        final = self.path / name
        final.parent.mkdir(parents=True, exist_ok=True)
        partial = final.with_name(f".{final.name}.part")
        file = partial.open("wb", buffering=0)
        try:
            with errors_of(final):
                yield DescriptorSink(file.fileno())
                file.close()
            durable_replace(partial, final)
        except BaseException:
            with suppress(OSError):
                file.close()
            partial.unlink(missing_ok=True)
            raise

    def has_files(self, folder: str) -> bool:
        path = self.path / folder
        return path.exists() and (not path.is_dir() or any(path.iterdir()))

    def list_sizes(self, folder: str) -> dict[str, int]:
        sizes, top = {}, self.path / folder
        # Unlike rglob, os.walk ignores a folder that is removed meanwhile.
        for parent, _, names in os.walk(top):
            for path in (Path(parent) / name for name in names if not name.startswith(".")):
                with suppress(FileNotFoundError):  # deleted since
                    if path.is_file():
                        sizes[path.relative_to(top).as_posix()] = path.stat().st_size
        return sizes

    def modified_ns(self, name: str) -> int:
        return (self.path / name).stat().st_mtime_ns

    def set_modified_ns(self, name: str, modified_ns: int) -> None:
        os.utime(self.path / name, ns=(modified_ns, modified_ns))

    def address(self, name: str) -> str:
        return str(self.path / name)

    @property
    def lease_files(self) -> LocalLeaseFiles:
        return LocalLeaseFiles(self.path)


def _existing(found: AgedFile | None, address: str) -> AgedFile:
    if found is None:
        raise FileNotFoundError(2, "no such file", address)
    return found


@dataclass(frozen=True)
class S3Prefix:
    """The objects below ``prefix``, which ends with a slash or is empty."""

    bucket: str
    prefix: str
    access: S3Access

    @property
    def _store(self) -> ObjectStore:
        return open_store(self.access)

    def read(self, name: str) -> bytes:
        return self._store.read(self.bucket, self.prefix + name)

    def read_aged(self, name: str) -> AgedFile:
        with s3_errors_as_os_errors(self.address(name)):
            found = self.lease_files.read(name)
        return _existing(found, self.address(name))

    def size(self, name: str) -> int | None:
        head = self._store.head(self.bucket, self.prefix + name)
        return None if head is None else head.bytes

    def remove(self, name: str) -> None:
        self._store.delete(self.bucket, self.prefix + name)

    def remove_versions(self, name: str) -> None:
        self._store.delete_versions(self.bucket, self.prefix + name)

    def open(self, name: str) -> RawIOBase:
        return open_object(self._store, self.address(name))

    def version(self, name: str) -> str | None:
        head = self._store.head(self.bucket, self.prefix + name)
        return None if head is None else head.etag

    def replace_if(self, name: str, file: IO[bytes], version: str | None) -> bool:
        key = self.prefix + name
        return self._store.put_if(self.bucket, key, file, etag=version) is not None

    def writer_if(
        self, name: str, version: str | None
    ) -> AbstractContextManager[ConditionalUpload]:
        """Open a file that is written as :meth:`replace_if` does; see its ``etag`` at the end."""
        return self._store.writer_if(self.bucket, self.prefix + name, etag=version)

    def download(self, name: str, path: Path) -> None:
        """Download a large object to a local file."""
        self._store.download(self.bucket, self.prefix + name, path)

    def remove_folder(self, folder: str) -> None:
        for name in self.list_sizes(folder):
            self.remove(f"{folder}/{name}")

    def create_if_absent(self, name: str, content: bytes) -> bool:
        """Put an object unless it exists; return whether this call created it.

        Exactly one of several concurrent callers creates the object.
        """
        key = self.prefix + name
        return self._store.put_if(self.bucket, key, content, etag=None) is not None

    def objects(self, folder: str, *, after: str | None = None) -> Iterator[tuple[str, int]]:
        """Yield the name below ``folder`` and the size in bytes of every object there, in order.

        With ``after``, only those whose names come after it.
        """
        base = f"{self.prefix}{folder}/" if folder else self.prefix
        start = None if after is None else base + after
        for stored in self._store.objects(self.bucket, base, after=start):
            yield stored.key.removeprefix(base), stored.bytes

    def list_sizes(self, folder: str) -> dict[str, int]:
        return dict(self.objects(folder))

    def abort_uploads(
        self,
        folder: str | None = None,
        *,
        started_before: datetime | None = None,
        names: Container[str] | None = None,
    ) -> int:
        """Abort unfinished uploads below ``folder``; see :meth:`ObjectStore.abort_uploads`.

        Without a folder, abort those below the prefix.
        """
        below = self.prefix if folder is None else f"{self.prefix}{folder}/"
        return self._store.abort_uploads(
            self.bucket, below, started_before=started_before, names=names
        )

    def atomic_writer(self, name: str) -> AbstractContextManager[ShardSink]:
        return self._store.writer(self.bucket, self.prefix + name)

    def has_files(self, folder: str) -> bool:
        return self._store.first(self.bucket, f"{self.prefix}{folder}/") is not None

    def modified_ns(self, name: str) -> int:
        head = self._store.head(self.bucket, self.prefix + name)
        if head is None:
            raise FileNotFoundError(2, "no such object", self.address(name))
        return int(head.modified.timestamp() * 1e9)

    def set_modified_ns(self, name: str, modified_ns: int) -> None:
        """Do nothing: S3 sets the time itself."""

    def address(self, name: str) -> str:
        return f"s3://{self.bucket}/{self.prefix}{name}"

    @property
    def lease_files(self) -> S3LeaseFiles:
        return S3LeaseFiles(self._store, self.bucket, self.prefix)


def read_document(storage: Storage, name: str) -> dict[str, Any] | None:
    """Return a stored JSON object; None if there is none, or if it is damaged.

    Raises:
        OSError: the storage cannot be read.
    """
    try:
        document = json.loads(storage.read(name))
    except (FileNotFoundError, ValueError):
        return None
    return document if isinstance(document, dict) else None
