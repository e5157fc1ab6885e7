"""The set of shards that a user names: its shards, its index and its list of removed samples."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from sm_train.entrypoints.job_interface.index_location import (
    INDEX_NAME,
    SHARDS_FOLDER,
    index_name,
    index_uri,
    indexed_folder,
    removal_list,
    replaced_index,
)
from sm_train.entrypoints.shards.removal_list import RemovalList, RemovalListError, decode_list
from sm_train.entrypoints.shards.shard_format import ShardError
from sm_train.entrypoints.shards.shard_index import ShardIndex
from sm_train.entrypoints.storage.storage import Storage, open_storage, write_file
from sm_train.entrypoints.storage.store import S3Access
from sm_train.toolkit.base.errors import UserError


@dataclass(frozen=True)
class ShardSet:
    """Shards in the folder ``name`` of ``storage``, with their index next to it."""

    storage: Storage
    name: str
    access: S3Access

    @property
    def address(self) -> str:
        """The path or URI of the shards."""
        return self.storage.address(self.name)

    @property
    def index_file(self) -> str:
        """The index's name in the storage."""
        return index_name(self.name)

    @property
    def list_file(self) -> str:
        """The name of the list of removed samples in the storage."""
        return removal_list(self.index_file)

    @property
    def replaced_file(self) -> str:
        """The name of the index of shards that were rewritten without removed samples."""
        return replaced_index(self.index_file)

    def shard_file(self, shard: str) -> str:
        """Return the name of a shard in the storage."""
        return f"{self.name}/{shard}"

    def read_list(self) -> RemovalList:
        """Return the list of removed samples, an empty one if there is none.

        Raises:
            UserError: it is damaged.
        """
        try:
            content = self.storage.read(self.list_file)
        except (FileNotFoundError, NotADirectoryError):
            return RemovalList()
        try:
            return decode_list(content, self.storage.address(self.list_file))
        except RemovalListError as error:
            raise UserError(str(error)) from None

    def write_list(self, removals: RemovalList) -> None:
        """Write the list of removed samples; the destination must be locked."""
        write_file(self.storage, self.list_file, removals.encode())

    @contextmanager
    def open_replaced(self) -> Iterator[ShardIndex | None]:
        """Open the index of replaced shards; None if there is none.

        Raises:
            UserError: it is damaged.
        """
        try:
            content = self.storage.read(self.replaced_file)
        except FileNotFoundError:
            yield None
            return
        with self._opened(content, self.replaced_file) as index:
            yield index

    @contextmanager
    def _opened(self, content: bytes, name: str) -> Iterator[ShardIndex]:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / INDEX_NAME
            path.write_bytes(content)
            try:
                index = ShardIndex(path)
            except ShardError as error:
                location = self.storage.address(name)
                raise UserError(f"{location}: {str(error).partition(': ')[2]}") from None
            yield index

    @contextmanager
    def open_index(self) -> Iterator[tuple[ShardIndex, str]]:
        """Open the index, and return its version.

        Raises:
            UserError: there is none, or it is damaged.
        """
        version = self.storage.version(self.index_file)
        location = self.storage.address(self.index_file)
        if version is None:
            if not self.storage.has_files(self.name):
                raise UserError(f"{self.address}: no such folder of shards")
            raise UserError(f"{location}: no such index; `sm-train index {self.address}` writes it")
        with self._opened(self.storage.read(self.index_file), self.index_file) as index:
            yield index, version


def find_shard_set(address: str, access: S3Access) -> ShardSet:
    """Return the shards of a pack in ``address``, or those in the folder ``address`` itself."""
    storage = open_storage(address, access)
    if storage.size(INDEX_NAME) is not None:
        return ShardSet(storage, SHARDS_FOLDER, access)
    parent, name = _split(address)
    return ShardSet(open_storage(parent, access), name, access)


def shard_set_of_index(index: str, access: S3Access) -> ShardSet:
    """Return the shards of the index at an address."""
    parent, name = _split(index)
    return ShardSet(open_storage(parent, access), indexed_folder(name), access)


def find_shards_folder(address: str, access: S3Access) -> ShardSet:
    """Return the shards in a folder or prefix, or in the folder ``shards`` in it.

    They need no index.

    Raises:
        UserError: it does not exist, or no index can lie next to it.
    """
    if address.startswith("s3://"):
        if index_uri(address) is None:
            raise UserError(
                f"{address}: the index is written next to the shards; move them to a prefix"
            )
        parent, name = _split(address)
        return ShardSet(open_storage(parent, access), name, access)
    folder = Path(address)
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder of shards")
    if (folder / SHARDS_FOLDER).is_dir():  # the folder that contains the shards folder
        folder /= SHARDS_FOLDER
    parent, name = _split(str(folder))
    shards = ShardSet(open_storage(parent, access), name, access)
    location = Path(parent) / shards.index_file
    if location.exists() and not location.is_file():
        raise UserError(f"{location}: is no file; remove it")
    return shards


def _split(address: str) -> tuple[str, str]:
    """Return the folder or prefix that holds ``address``, and the last part of it.

    Raises:
        UserError: it is a bucket.
    """
    if not address.startswith("s3://"):
        path = Path(address)
        if path.name in ("", ".."):
            path = path.resolve()
        return str(path.parent), path.name
    parent, _, name = address.rstrip("/").rpartition("/")
    if parent.count("/") < 2:
        raise UserError(f"{address}: no pack in it; name the prefix of the shards")
    return parent, name
