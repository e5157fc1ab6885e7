"""Finds the tables that a user names: files, folders of Parquet parts, and their S3 addresses."""

from __future__ import annotations

import gzip
import os
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import IO, Any, cast

from sm_train.entrypoints.data_prep.packing.plan import IMAGE_SUFFIXES
from sm_train.entrypoints.storage.object_file import open_object
from sm_train.entrypoints.storage.store import ObjectStore, S3Access, open_store
from sm_train.toolkit.aws.aws_errors import translate_aws_errors
from sm_train.toolkit.aws.s3 import split_uri
from sm_train.toolkit.base.errors import UserError
from sm_train.toolkit.data_prep.packing.file_kinds import is_pattern, matching_files

KINDS = (".csv", ".jsonl", ".parquet")
_COMPRESSED = ".gz"

METADATA_NAMES = tuple(f"metadata{kind}" for kind in KINDS)
"""Tables of Hugging Face's image folders, next to their images."""


@dataclass(frozen=True)
class TableFile:
    """A file of a table: its path or URI, and where its text is on this machine.

    ``folder`` precedes the paths of its images, relative to the source. ``of_image_folder`` tables
    name their images in ``file_name``.
    """

    location: str
    local: Path
    access: S3Access
    folder: str = ""
    of_image_folder: bool = False

    @property
    def name(self) -> str:
        """The name of the file."""
        return PurePosixPath(self.location).name

    @property
    def parent(self) -> str:
        """The folder or prefix of the file."""
        if self.location.startswith("s3://"):
            return self.location.rpartition("/")[0]
        return str(Path(self.location).parent)

    @cached_property
    def modified_ns(self) -> int:
        """When it was last modified, Unix nanoseconds; 0 in S3, where its size reveals a change."""
        return 0 if self.location.startswith("s3://") else self.local.stat().st_mtime_ns

    @property
    def kind(self) -> str:
        """One of :data:`KINDS`."""
        kind = table_kind(self.name)
        assert kind is not None
        return kind

    def open_text(self) -> IO[str]:
        """Open a CSV or JSONL table; bytes that are not UTF-8 become lone surrogates."""
        options = {"encoding": "utf-8-sig", "errors": "surrogateescape", "newline": ""}
        if self.name.endswith(_COMPRESSED):
            return cast("IO[str]", gzip.open(self.local, "rt", **options))  # type: ignore[call-overload]
        return self.local.open(**options)  # type: ignore[call-overload, no-any-return]

    def open_parquet(self) -> Any:
        """Return what pyarrow reads a Parquet table from: the object itself, if it is in S3."""
        if self.location.startswith("s3://"):
            return open_object(open_store(self.access), self.location)
        return self.local


def table_kind(name: str) -> str | None:
    """Return the kind of a table by its name, None for other files."""
    suffix = PurePosixPath(name.lower().removesuffix(_COMPRESSED)).suffix
    if suffix == ".parquet" and name.lower().endswith(_COMPRESSED):
        return None
    return suffix if suffix in KINDS else None


def no_table(address: str) -> str:
    """Return the message on an address at which there is no table."""
    exists = address.startswith("s3://") or Path(address).exists()
    return f"{address}: " + (f"not a table ({', '.join(KINDS)})" if exists else "no such table")


def find_tables(address: str, access: S3Access, folder: Path) -> list[TableFile]:
    """Return the files of the table at ``address``; none if there is no table.

    A table in S3 that is no Parquet file is downloaded to ``folder``.

    Raises:
        UserError: AWS refuses a request.
    """
    if address.startswith("s3://"):
        return _find_in_s3(address, access, folder)
    path = Path(address)
    if is_pattern(address):
        found = sorted(matching_files(address)) if table_kind(address) else []
        return [_local(path, access) for path in found]
    if path.is_dir():
        with os.scandir(path) as entries:
            names = _parts(entry.name for entry in entries)
        return [_local(path / name, access) for name in names]
    return [_local(path, access)] if path.is_file() and table_kind(address) else []


def find_image_folder(folder: Path, access: S3Access) -> list[TableFile]:
    """Return the tables of an image folder: in it, and in its folders such as ``train``."""
    with os.scandir(folder) as entries:
        folders = sorted(Path(entry.path) for entry in entries if entry.is_dir())
    paths = [place / name for place in (folder, *folders) for name in METADATA_NAMES]
    return [
        TableFile(
            str(path), path, access, _prefix(path.parent.relative_to(folder)), of_image_folder=True
        )
        for path in paths
        if path.is_file()
    ]


def _prefix(folder: Path) -> str:
    return "" if folder == Path() else f"{folder.as_posix()}/"


def _local(path: Path, access: S3Access) -> TableFile:
    return TableFile(str(path), path, access)


def _parts(names: Iterable[str]) -> list[str]:
    """Return the Parquet parts among the names of a folder, sorted; none if it has images."""
    parts = []
    for name in names:
        if PurePosixPath(name.lower()).suffix in IMAGE_SUFFIXES:
            return []
        # Spark writes _SUCCESS and _metadata next to them.
        if table_kind(name) == ".parquet" and name[0] not in "_.":
            parts.append(name)
    return sorted(parts)


def _find_in_s3(address: str, access: S3Access, folder: Path) -> list[TableFile]:
    bucket, key = split_uri(address)
    with translate_aws_errors(address):
        store = open_store(access)
        if table_kind(key) and not key.endswith("/"):
            return [_stored(store, bucket, key, access, folder)]
        prefix = f"{key.rstrip('/')}/" if key else ""
        # Objects are listed in the order of their names, until the first image.
        names = (
            stored.key.removeprefix(prefix)
            for page in store.pages(bucket, prefix, delimiter="/")
            for stored in page.objects
        )
        metadata = [name for name in METADATA_NAMES if store.head(bucket, prefix + name)]
        return [
            _stored(store, bucket, prefix + name, access, folder, of_image_folder=bool(metadata))
            for name in metadata or _parts(names)
        ]


def _stored(
    store: ObjectStore,
    bucket: str,
    key: str,
    access: S3Access,
    folder: Path,
    *,
    of_image_folder: bool = False,
) -> TableFile:
    """Return a table in S3; what is no Parquet file is downloaded to ``folder``."""
    local = folder / PurePosixPath(key).name
    if table_kind(key) != ".parquet":
        if store.head(bucket, key) is None:
            raise UserError(f"s3://{bucket}/{key}: no such table")
        store.download(bucket, key, local)
    return TableFile(f"s3://{bucket}/{key}", local, access, of_image_folder=of_image_folder)
