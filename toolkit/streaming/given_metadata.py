"""Writes the captions and columns of a table next to the images that a stream packs.

A file that an image has already is kept, so a caption of its author stays, and the same command can
be repeated.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

from sm_train.entrypoints.object_store.store import S3Access, open_store
from sm_train.entrypoints.packing.plan import CAPTION_SUFFIXES, PackInput, next_to
from sm_train.entrypoints.shared_work.work_stages import in_groups
from sm_train.entrypoints.shared_work.worker_pool import WorkProgress
from sm_train.entrypoints.streaming.arrivals import is_image
from sm_train.entrypoints.streaming.companions import (
    SIDECAR_SUFFIX,
    DeclaredColumns,
    NotYetError,
)
from sm_train.entrypoints.streaming.stream_state import S3_REQUESTS
from sm_train.toolkit.aws.aws_errors import translate_aws_errors
from sm_train.toolkit.aws.s3 import split_uri
from sm_train.toolkit.errors import UserError
from sm_train.toolkit.packing.table_files import KINDS, find_tables
from sm_train.toolkit.packing.table_preview import preview_tables
from sm_train.toolkit.packing.tables import TableOptions

_CAPTION_COLUMN = TableOptions.caption_columns[0]

OPTION = "--captions"

Outcome = Literal["caption", "file of columns", "kept"]
"""What was written, or that there was such a file already."""


@dataclass(frozen=True)
class MetadataTable:
    """A table of images and its columns of images and captions, as `stream --captions` names them.

    Without ``caption_columns``, that is the column ``caption`` if the table has it.
    """

    location: str
    image_column: str = TableOptions.image_column
    caption_columns: tuple[str, ...] = ()

    def options(self, declared: DeclaredColumns, access: S3Access) -> TableOptions:
        """Return which columns of the table are read: captions, and those that are ``declared``.

        Raises:
            UserError: there is no such table, or it lacks some of the columns.
        """
        with TemporaryDirectory(prefix="sm-train-table-") as folder:
            tables = find_tables(self.location, access, Path(folder))
            if not tables:
                raise UserError(f"{OPTION}: {self.location}: not a table ({', '.join(KINDS)})")
            names = [column.name for column in preview_tables(tables)]
        captions = self.caption_columns or tuple({_CAPTION_COLUMN} & {*names})
        is_sidecar = declared.origin == "sidecar"
        keep = [name for name in declared.types if name in names and is_sidecar]
        lacking = [name for name in declared.types if name not in names]
        if keep and lacking:
            raise UserError(
                f"{OPTION}: {self.location}: has {keep[0]} but not {lacking[0]}, which the stack "
                "declares, too; add the column"
            )
        if not keep and not captions:
            wanted = [_CAPTION_COLUMN, *(declared.types if is_sidecar else ())]
            raise UserError(
                f"{OPTION}: {self.location}: has no column {' and no column '.join(wanted)}; it "
                f"has {', '.join(names)}; name one with --caption-column"
            )
        return TableOptions(self.image_column, captions, tuple(keep))


@dataclass(frozen=True)
class GivenImages:
    """The images of a table, as they were planned, in the bucket ``bucket``."""

    planned: Iterable[PackInput]
    bucket: str
    declared: DeclaredColumns
    access: S3Access

    def require_valid(self) -> None:
        """Require that all images are in the bucket, and that columns have the declared types.

        Raises:
            UserError: that is not so.
        """
        for item in self.planned:
            if not item.address.startswith(f"s3://{self.bucket}/"):
                raise UserError(
                    f"{OPTION}: {item.address}: the stack packs images of s3://{self.bucket}/"
                )
            if columns := _columns(item):
                try:
                    self.declared.cells(columns, item.address)
                except NotYetError as error:
                    raise UserError(f"{OPTION}: {error}, as the stack declares it") from None

    def present(self) -> Iterator[PackInput]:
        """Yield the images that exist, of the kinds that a stream packs."""
        return (item for item in self.planned if item.bytes and is_image(item.address))


def _columns(item: PackInput) -> dict[str, Any]:
    """Return the columns that the table has of an image."""
    document = {} if item.table_fields is None else json.loads(item.table_fields)
    columns: dict[str, Any] = document.get("columns", {})
    return columns


@dataclass
class WrittenFiles:
    """What became of the files next to ``images``: how many of each :data:`Outcome`."""

    images: int = 0
    counts: Counter[Outcome] = field(default_factory=Counter)


def write_given(
    given: GivenImages, total: int, on_progress: Callable[[WorkProgress], None]
) -> WrittenFiles:
    """Write what the images of a table lack, of ``total``.

    Raises:
        UserError: access is denied.
    """
    written = WrittenFiles()

    def write(item: PackInput) -> list[Outcome]:
        return [*_write_caption(item, given.access), *_write_sidecar(item, given)]

    place = f"s3://{given.bucket}/"
    with translate_aws_errors(place), ThreadPoolExecutor(S3_REQUESTS) as pool:
        for group in in_groups(given.present(), S3_REQUESTS * 8):
            for outcomes in pool.map(write, group):
                written.counts.update(outcomes)
            written.images += len(group)
            done = WorkProgress(written.images, total, 0, 0, "writing captions and columns")
            on_progress(done)
    return written


def _write_caption(item: PackInput, access: S3Access) -> list[Outcome]:
    """Write the caption of an image that has none; return what became of it."""
    if item.caption is None or not item.caption.strip():
        return []
    store = open_store(access)
    for suffix in CAPTION_SUFFIXES[1:]:
        if store.head(*split_uri(next_to(item.address, suffix))) is not None:
            return ["kept"]
    content = item.caption.encode(errors="replace")
    return ["caption" if _create(next_to(item.address), content, access) else "kept"]


def _write_sidecar(item: PackInput, given: GivenImages) -> list[Outcome]:
    columns = _columns(item)
    if not columns:
        return []
    content = json.dumps(given.declared.cells(columns, item.address), ensure_ascii=False).encode()
    created = _create(next_to(item.address, SIDECAR_SUFFIX), content, given.access)
    return ["file of columns" if created else "kept"]


def _create(address: str, content: bytes, access: S3Access) -> bool:
    """Write an object unless it exists; return whether it was written."""
    bucket, key = split_uri(address)
    return open_store(access).put_if(bucket, key, content, etag=None) is not None
